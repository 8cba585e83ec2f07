/* trace.c: what is asked of the ring, written down while somebody records.
 *
 * The log is a ring of cells in the control segment, one for all participants.  Who has something to write
 * draws as many cells as it needs from trace_head, which gives all records one order, and stores them.  Nobody
 * waits: a recorder that is too slow loses what is written over, and learns how much.
 *
 * A cell is one word and carries the lap of its position, so each is right or known not to be, by itself:
 *
 *   bit  0-11  lap: position / SMOE_TRACE_CELLS + 1
 *       12     1: the record's first cell
 *       13-63  what it says
 *
 *   record     first cell: kind (13-15), participant (16-23), entries (24-39), layer (40-63)
 *              time: monotonic, microseconds (13-63)
 *              entries: expert index (13-33), outcome (34-35), one cell each
 *
 * Where the cell at the recorder's position has an older lap, its writer is not done yet, or was killed in
 * between: the recorder gives it time and then passes over it.  A newer lap: the recorder was overtaken.  All
 * accesses are relaxed, since no cell says anything of another.
 *
 * Off, it costs a load of a word that nobody writes.  The recorder is a participant: when it dies, the sweep
 * turns recording off.
 */
#include "core.h"

#include <errno.h>

#define LAP_MASK   0xFFFull
#define FIRST      (1ull << 12)
#define BODY_SHIFT 13u

static uint64_t lap_of(uint64_t position) {
    return (position / SMOE_TRACE_CELLS + 1) & LAP_MASK;
}

static void store(smoe_ring *r, uint64_t position, uint64_t body, uint64_t first) {
    atomic_store_explicit(&r->trace[position % SMOE_TRACE_CELLS], lap_of(position) | first | body << BODY_SHIFT,
                          memory_order_relaxed);
}

/* Begin a record of n entries, which the caller stores from the returned position on. */
uint64_t trace_begin(smoe_ring *r, enum smoe_trace_kind kind, uint32_t layer, uint32_t n) {
    uint64_t at = atomic_fetch_add_explicit(&r->hot->trace_head, n + 2ull, memory_order_relaxed);
    FAILPOINT("trace.drawn");
    store(r, at, (uint64_t)kind | (uint64_t)r->id << 3 | (uint64_t)n << 11 | (uint64_t)layer << 27, FIRST);
    FAILPOINT("trace.begun");
    store(r, at + 1, plat_now_ns() / 1000, 0);
    FAILPOINT("trace.timed");
    return at + 2;
}

void trace_entry(smoe_ring *r, uint64_t position, uint32_t expert, enum smoe_trace_outcome outcome) {
    store(r, position, expert | (uint64_t)outcome << 21, 0);
    FAILPOINT("trace.entry");
}

void trace_holds(smoe_ring *r, enum smoe_trace_kind kind, uint32_t layer, const smoe_hold *holds, uint32_t n) {
    uint64_t at = trace_begin(r, kind, layer, n);
    for (uint32_t i = 0; i < n; i++)
        trace_entry(r, at + i, holds[i].expert_index, holds[i].hit ? SMOE_TRACE_THERE : SMOE_TRACE_ASKED);
}

/* --- what clients call -------------------------------------------------------------------------------- */

const uint32_t *smoe_tracing(const smoe_ring *r) {
    return (const uint32_t *)&r->hot->tracing;
}

int smoe_trace_ranks(smoe_ring *r, int64_t layer, const int64_t *experts, uint32_t n, smoe_error *e) {
    int rc = ring_check(r, e);
    if (rc || !tracing(r))
        return rc;
    if (n > SMOE_TRACE_ENTRIES)
        n = SMOE_TRACE_ENTRIES;
    for (uint32_t i = 0; i < n; i++)
        if (smoe_expert_index(r, layer, experts[i]) < 0)
            return fail(e, SMOE_EID, "no such expert", 0, (uint64_t)experts[i], i);
    uint64_t at = trace_begin(r, SMOE_TRACE_RANKS, (uint32_t)layer, n);
    for (uint32_t i = 0; i < n; i++)
        trace_entry(r, at + i, (uint32_t)smoe_expert_index(r, layer, experts[i]), SMOE_TRACE_ASKED);
    return 0;
}

/* --- what the recorder calls -------------------------------------------------------------------------- */

static bool is_recorder(const smoe_ring *r) {
    return r->fork_generation == fork_generation() && r->id == SMOE_ID_TRACE;
}

int64_t smoe_trace_record(smoe_ring *r, int on) {
    if (!is_recorder(r))
        return -EPERM;
    uint64_t head = atomic_load_explicit(&r->hot->trace_head, memory_order_relaxed);
    atomic_store_explicit(&r->hot->tracing, on ? 1 : 0, memory_order_relaxed);
    FAILPOINT("trace.switched");
    return (int64_t)head;
}

uint64_t smoe_trace_head(const smoe_ring *r) {
    return r->fork_generation == fork_generation() ? atomic_load_explicit(&r->hot->trace_head, memory_order_relaxed)
                                                   : 0;
}

static uint64_t cell(const smoe_ring *r, uint64_t position) {
    return atomic_load_explicit(&r->trace[position % SMOE_TRACE_CELLS], memory_order_relaxed);
}

static bool is_first(uint64_t c, uint64_t position) {
    return (c & (LAP_MASK | FIRST)) == (lap_of(position) | FIRST);
}

static uint32_t cells_of(uint64_t first) {
    return (uint32_t)(first >> 24 & 0xFFFFu) + 2;
}

/* Entries and head of a whole record at `position`, 0 where it is not whole. */
static uint32_t whole_record(const smoe_ring *r, uint64_t position, uint64_t head) {
    uint64_t c = cell(r, position);
    if (!is_first(c, position))
        return 0;
    uint64_t n = cells_of(c);
    if (n > head - position)
        return 0;
    for (uint64_t i = 1; i < n; i++)
        if ((cell(r, position + i) & (LAP_MASK | FIRST)) != lap_of(position + i))
            return 0;
    return (uint32_t)n;
}

/* The next position behind `position` at which a record begins, or the head. */
static uint64_t next_first(const smoe_ring *r, uint64_t position, uint64_t head) {
    do
        position++;
    while (position < head && !is_first(cell(r, position), position));
    return position;
}

int64_t smoe_trace_read(const smoe_ring *r, int pass_over, uint64_t *position, uint64_t *lost, uint64_t *out,
                        uint32_t room) {
    if (!is_recorder(r))
        return -EPERM;
    uint32_t got = 0;
    for (;;) {
        uint64_t head = atomic_load_explicit(&r->hot->trace_head, memory_order_relaxed), to = *position;
        if (head - to > SMOE_TRACE_CELLS)
            to = next_first(r, head - SMOE_TRACE_CELLS - 1, head); /* overtaken */
        else if (to == head)
            return got;
        uint32_t n = to == *position ? whole_record(r, to, head) : 0;
        if (n > room - got)
            return got ? (int64_t)got : -ENOBUFS;
        /* A cell may be written over between the look and the copy: the copy is looked at, too. */
        for (uint32_t i = 0; i < n; i++) {
            uint64_t c = cell(r, to + i);
            if ((c & (LAP_MASK | FIRST)) != (lap_of(to + i) | (i == 0 ? FIRST : 0)) || (i == 0 && cells_of(c) != n))
                n = 0;
            else
                out[got + i] = c;
        }
        if (n == 0 && to == *position) {
            bool overtaken = atomic_load_explicit(&r->hot->trace_head, memory_order_relaxed) - to > SMOE_TRACE_CELLS;
            if (overtaken)
                continue;
            if (!pass_over || got)
                return got;
            pass_over = 0;
            to = next_first(r, to, head);
        }
        *lost += n ? 0 : to - *position;
        *position = to + n;
        got += n;
    }
}
