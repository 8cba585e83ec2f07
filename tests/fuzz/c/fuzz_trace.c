/* fuzz_trace.c: the recorder on a log that is written over: what it gets is whole records, and it comes to an end. */
#include "scribble.h"

#include <errno.h>

#define ROOM 70000u

static struct stream in;

static void check_whole(const uint64_t *cells, int64_t n) {
    for (int64_t i = 0, length; i < n; i += length) {
        length = (int64_t)(cells[i] >> 24 & 0xFFFFu) + 2;
        REQUIRE((cells[i] >> 12 & 1) && length <= n - i);
        for (int64_t k = 1; k < length; k++)
            REQUIRE(!(cells[i + k] >> 12 & 1));
    }
}

static void write_over(const struct op *op) {
    struct op put = *op;
    put.a = op->what & 4 ? 14 : 1; /* the log, or the words among which its head is */
    if (op->what & 8)              /* a record that looks right, somewhere near the head */
        atomic_store(&ring.supervisor->trace[op->b],
                     (op->value << 12 & ~0xFFFull) | (uint64_t)((op->b / SMOE_TRACE_CELLS + 1) & 0xFFF));
    else if (op->what & 16)
        atomic_store(&ring.supervisor->hot->trace_head, op->value);
    else
        scribble_put(&put);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint64_t out[ROOM];
    struct op op;
    smoe_error e;
    smoe_ring *recorder, *client;
    uint64_t lost = 0;
    const int64_t experts[3] = {0, 1, 2};
    scribble_mend();
    int lock = smoe_supervisor_lock(ring.name, &e);
    REQUIRE(lock >= 0 &&
            smoe_attach(ring.name, SMOE_ROLE_SUPERVISOR, (uint32_t)lock, "fuzz", &ring.supervisor, &e) == 0);
    REQUIRE(smoe_attach(ring.name, SMOE_ROLE_TRACE, 0, "fuzz", &recorder, &e) == 0);
    REQUIRE(smoe_attach(ring.name, SMOE_ROLE_CLIENT, 0, "fuzz", &client, &e) == 0);
    uint64_t position = (uint64_t)smoe_trace_record(recorder, 1);
    in = (struct stream){data, size};
    for (uint32_t i = 0; i < OPS_MOST && scribble_next(&in, &op); i++) {
        if (op.what < 0x80)
            write_over(&op);
        else if (op.what < 0xC0)
            (void)smoe_trace_ranks(client, op.a & 1, experts, op.b & 3, &e);
        else
            for (int64_t n = 1, reads = 0; n > 0 && reads < 4; reads++) {
                n = smoe_trace_read(recorder, op.a & 1, &position, &lost, out, op.a & 2 ? ROOM : op.b);
                REQUIRE(n >= 0 || n == -ENOBUFS);
                check_whole(out, n);
            }
    }
    smoe_detach(client);
    smoe_detach(recorder);
    smoe_detach(ring.supervisor);
    ring.supervisor = NULL;
    return 0;
}
