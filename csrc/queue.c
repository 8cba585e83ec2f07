/* queue.c: bounded queues of slot numbers that no killed process can stop.
 *
 * Vyukov's bounded MPMC layout: a power-of-two array of cells, each with its own sequence, and
 * free-running head and tail (http://www.1024cores.net, "bounded MPMC queue").  There a producer takes
 * a position first and publishes the cell afterwards; killed in between it leaves a hole that stops
 * every consumer for good.  Here sequence (48 bits) and payload (16 bits) share one word, so that
 * push and pop are one compare-exchange of the cell each; head and tail only follow, moved on by
 * whoever sees them lag.
 *
 *     cell at position p, lap 0:  (p, -) free ──push──► (p + 1, slot) ──pop──► (p + capacity, -) free
 *
 * With d = sequence - position, as a signed number:
 *     push  d = 0: CAS   d > 0: the tail lags, move it on   d < 0: full, if the tail has not moved
 *     pop   d = 1: CAS   d > 1: the head lags, move it on   d <= 0: empty, if the head has not moved
 * (Looking only for "t" and "t + 1" would loop for ever when a pusher was killed before it moved the
 * tail and its cell has been popped since.)
 *
 * Somebody may have written over cells and positions.  Then neither rule need ever come to an end, so each call gives
 * up, as if full or empty, after more steps than a queue of sound cells takes.
 *
 * An entry is a hint: whoever pops a slot that is not QUEUED skips it.  So duplicates are harmless, and
 * recovery is pushing again.
 */
#include "core.h"

#define STEPS_A_CELL  16u
#define SEQUENCE_MASK ((1ull << 48) - 1)

static uint64_t cell_make(uint64_t sequence, uint32_t slot) {
    return (sequence & SEQUENCE_MASK) << 16 | (slot & 0xFFFFu);
}

/* Signed difference of a cell's sequence and a position, in 48 bits. */
static int64_t lead(uint64_t cell, uint64_t position) {
    return (int64_t)(((cell >> 16) - position) << 16) >> 16;
}

void queue_init(_Atomic uint64_t *cells, uint32_t capacity) {
    for (uint32_t i = 0; i < capacity; i++)
        atomic_init(&cells[i], cell_make(i, 0));
}

struct queue demand_queue(const smoe_ring *r) {
    return (struct queue){&r->hot->demand, r->demand_cells, r->queue_capacity};
}

struct queue speculative_queue(const smoe_ring *r) {
    return (struct queue){&r->hot->speculative, r->speculative_cells, r->queue_capacity};
}

static void move_on(_Atomic uint64_t *position, uint64_t from) {
    atomic_compare_exchange_strong_explicit(position, &from, from + 1, memory_order_acq_rel, memory_order_relaxed);
}

bool queue_push(struct queue q, uint32_t slot) {
    for (uint32_t steps = 0; steps < STEPS_A_CELL * q.capacity; steps++) {
        uint64_t t = atomic_load_explicit(&q.pos->tail, memory_order_acquire);
        _Atomic uint64_t *at = &q.cells[t & (q.capacity - 1)];
        uint64_t cell = atomic_load_explicit(at, memory_order_acquire);
        int64_t d = lead(cell, t);
        if (d == 0) {
            if (atomic_compare_exchange_strong_explicit(at, &cell, cell_make(t + 1, slot), memory_order_acq_rel,
                                                        memory_order_relaxed)) { /* Q1 */
                FAILPOINT("push.cell");
                move_on(&q.pos->tail, t);
                FAILPOINT("push.tail");
                return true;
            }
        } else if (d > 0) {
            move_on(&q.pos->tail, t);
        } else if (atomic_load_explicit(&q.pos->tail, memory_order_acquire) == t) {
            return false;
        }
    }
    return false;
}

int queue_pop(struct queue q) {
    for (uint32_t steps = 0; steps < STEPS_A_CELL * q.capacity; steps++) {
        uint64_t h = atomic_load_explicit(&q.pos->head, memory_order_acquire);
        _Atomic uint64_t *at = &q.cells[h & (q.capacity - 1)];
        uint64_t cell = atomic_load_explicit(at, memory_order_acquire); /* Q2 */
        int64_t d = lead(cell, h);
        if (d == 1) {
            int slot = (int)(cell & 0xFFFFu);
            if (atomic_compare_exchange_strong_explicit(at, &cell, cell_make(h + q.capacity, 0), memory_order_acq_rel,
                                                        memory_order_relaxed)) { /* Q2 */
                FAILPOINT("pop.cell");
                move_on(&q.pos->head, h);
                FAILPOINT("pop.head");
                return slot;
            }
        } else if (d > 1) {
            move_on(&q.pos->head, h);
        } else if (atomic_load_explicit(&q.pos->head, memory_order_acquire) == h) {
            return -1;
        }
    }
    return -1;
}

/* May say "not empty" of an empty queue whose head lags behind a killed popper; the next popper corrects it. */
bool queue_empty(struct queue q) {
    uint64_t h = atomic_load_explicit(&q.pos->head, memory_order_acquire);
    return lead(atomic_load_explicit(&q.cells[h & (q.capacity - 1)], memory_order_acquire), h) <= 0;
}

uint32_t queue_length(struct queue q) {
    uint64_t h = atomic_load_explicit(&q.pos->head, memory_order_acquire);
    uint64_t t = atomic_load_explicit(&q.pos->tail, memory_order_acquire);
    return t <= h ? 0 : t - h < UINT32_MAX ? (uint32_t)(t - h) : UINT32_MAX;
}

/* B1: after the push, so that a worker that reads the doorbell, finds both queues empty and sleeps on
 * what it read cannot miss it. */
void doorbell_ring(smoe_ring *r, int workers) {
    atomic_fetch_add_explicit(&r->hot->doorbell, 1, memory_order_seq_cst);
    FAILPOINT("doorbell.added");
    /* A worker sets its bit before it looks at the doorbell for the last time, so one whose bit is not seen
     * here sees that the doorbell has changed.  A bit, not a count: what a kill leaves costs a wake until the
     * worker's successor clears it. */
    if (atomic_load_explicit(&r->hot->sleepers[0], memory_order_seq_cst) |
        atomic_load_explicit(&r->hot->sleepers[1], memory_order_seq_cst))
        plat_wake(&r->hot->doorbell, workers);
}
