/* scribble.c: see scribble.h. */
#define _GNU_SOURCE
#include "scribble.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct testring ring;
static unsigned char *sound;
static bool trace_touched;

void scribble_open(void) {
    const struct shape shape = {.layers = 2, .experts = 12, .slots = 66, .files = 2, .part_bytes = 2500, .seed = 3};
    testring_open(&ring, &shape);
    testring_detach_supervisor(&ring);
    alarm(0); /* the fuzzer has a watch of its own */
    sound = malloc(ring.control_bytes);
    REQUIRE(sound != NULL);
    memcpy(sound, ring.control, ring.control_bytes);
}

static const struct smoe_header *header(void) {
    return (const struct smoe_header *)sound;
}

void scribble_mend(void) {
    uint64_t trace = header()->off_trace, tables = header()->tables_offset;
    memcpy(ring.control, sound, trace);
    memcpy(ring.control + tables, sound + tables, ring.control_bytes - tables);
    if (trace_touched)
        memcpy(ring.control + trace, sound + trace, tables - trace);
    trace_touched = false;
}

bool scribble_next(struct stream *in, struct op *op) {
    if (in->left < OP_BYTES)
        return false;
    op->what = in->at[0];
    op->a = in->at[1];
    memcpy(&op->b, in->at + 2, sizeof op->b);
    memcpy(&op->value, in->at + 4, sizeof op->value);
    in->at += OP_BYTES;
    in->left -= OP_BYTES;
    return true;
}

void scribble_put(const struct op *op) {
    const struct smoe_header *h = header();
    const struct {
        uint64_t from, to, record;
    } regions[] = {
        {0, h->off_hot, 0},
        {h->off_hot, h->off_reservations, SMOE_LINE},
        {h->off_reservations, h->off_participants, 4},
        {h->off_participants, h->off_counters, sizeof(struct smoe_participant)},
        {h->off_counters, h->off_file_modes, 8},
        {h->off_file_modes, h->off_ticks, 4},
        {h->off_ticks, h->off_bounds, 8},
        {h->off_bounds, h->off_empties, 8},
        {h->off_empties, h->off_demand, 8},
        {h->off_demand, h->off_speculative, 8},
        {h->off_speculative, h->off_homes, 8},
        {h->off_homes, h->off_words, 4},
        {h->off_words, h->off_slots, 8},
        {h->off_slots, h->off_trace, sizeof(struct smoe_slot)},
        {h->off_trace, h->tables_offset, 0},
        {h->off_grid, h->off_experts, 4},
        {h->off_experts, h->off_windows, sizeof(struct smoe_expert_rec)},
        {h->off_windows, h->off_parts, sizeof(struct smoe_window_rec)},
        {h->off_parts, h->off_moves, sizeof(struct smoe_part_rec)},
        {h->off_moves, h->off_layouts, sizeof(struct smoe_move_rec)},
        {h->off_layouts, h->off_tensors, sizeof(struct smoe_layout_rec)},
        {h->off_tensors, h->off_files, sizeof(struct smoe_tensor_rec)},
        {h->off_files, h->off_strings, sizeof(struct smoe_file_rec)},
        {h->off_strings, ring.control_bytes, 0},
    };
    size_t n = sizeof regions / sizeof *regions, which = op->a % n, width = 1u << (op->what & 3);
    uint64_t from = regions[which].from, to = regions[which].to, record = regions[which].record;
    bool everywhere = record && op->what & 4; /* in all records */
    uint64_t at = from + op->b * (uint64_t)width % (everywhere ? record : to - from);
    trace_touched |= which == 14;
    for (; at + width <= to; at += everywhere ? record : to)
        memcpy(ring.control + at, &op->value, width);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static const int signals[] = {SIGALRM, SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGABRT, SIGSEGV, SIGBUS};
    struct sigaction before[sizeof signals / sizeof *signals];
    (void)argc;
    (void)argv;
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], NULL, &before[i]);
    scribble_open();
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &before[i], NULL); /* the fuzzer's own, which tests of the core set otherwise */
    return 0;
}

/* Mutations by whole operations, so that what comes out has as many as what goes in, and values that are at some bound
 * more often than chance would have it. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed);

static void draw_op(uint8_t *at, uint64_t *state) {
    static const uint64_t values[] = {0,          1,
                                      2,          3,
                                      7,          12,
                                      24,         69,
                                      70,         71,
                                      127,        255,
                                      4096,       16384,
                                      8191,       UINT16_MAX,
                                      INT32_MAX,  UINT32_MAX,
                                      1ull << 32, 1ull << 40,
                                      INT64_MAX,  24575,
                                      1ull << 63, 1ull << 48,
                                      UINT64_MAX, UINT64_MAX - 4095};
    uint64_t value = random_below(state, 3) ? values[random_below(state, sizeof values / sizeof *values)]
                                            : random_next(state) >> random_below(state, 64);
    struct op op = {(uint8_t)random_next(state), (uint8_t)random_next(state), (uint16_t)random_next(state), value};
    if (random_below(state, 2))
        op.b = (uint16_t)random_below(state, 64);
    at[0] = op.what;
    at[1] = op.a;
    memcpy(at + 2, &op.b, sizeof op.b);
    memcpy(at + 4, &op.value, sizeof op.value);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint64_t state = seed;
    size_t rows = size / OP_BYTES, room = most / OP_BYTES;
    for (uint32_t n = 1 + random_below(&state, 4); n; n--) {
        size_t at = rows ? random_below(&state, (uint32_t)rows) : 0;
        uint8_t *row = data + at * OP_BYTES;
        switch (random_below(&state, 6)) {
        case 0:
        case 1: /* one more */
            if (rows < room) {
                memmove(row + OP_BYTES, row, (rows - at) * OP_BYTES);
                draw_op(row, &state);
                rows++;
            }
            break;
        case 2: /* one less */
            if (rows > 1) {
                memmove(row, row + OP_BYTES, (rows - at - 1) * OP_BYTES);
                rows--;
            }
            break;
        case 3: /* another one */
            if (rows)
                draw_op(row, &state);
            break;
        case 4: /* a byte of one */
            if (rows)
                row[random_below(&state, OP_BYTES)] ^= (uint8_t)(1u << random_below(&state, 8));
            break;
        default: /* the same once more */
            if (rows && rows < room) {
                memmove(row + OP_BYTES, row, (rows - at) * OP_BYTES);
                rows++;
            }
        }
    }
    return rows * OP_BYTES;
}
