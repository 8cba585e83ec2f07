/* recover.c: the sweep after a death, and at every start.
 *
 * For the set of dead ids seen at its beginning, in this order:
 *   1. clients: clear the holder bit in every slot (the last bit of a FAILED slot empties it), take back
 *      reservation and busy bit
 *   2. workers: what they counted and did not publish is taken back; their READING slots become QUEUED again;
 *      a slot that has now killed three becomes FAILED
 *   3. push every QUEUED slot again, on its flag's queue, without ever blocking; also where nobody died, if
 *      that queue is empty
 *   4. only then free the entries
 *
 * Each step is idempotent: a sweeper killed half-way is made good by the next one that does it again.
 * The entries are freed last, so that until then everybody sees that there is something to clean.  Homes
 * are not mended and queues never rebuilt: both are hints.
 *
 * An id is dead when its entry is used and the kernel says that nobody holds its lock.  The sweeper then
 * takes the lock for the time of the sweep, so that nobody registers under the id meanwhile.
 */
#include "core.h"

#define KILLS_MAX 3 /* workers that one slot may kill */

/* --- 1. clients ------------------------------------------------------------------------------------- */

static void clear_holders(smoe_ring *r, uint32_t id) {
    for (uint32_t s = 0; s < r->n_slots; s++) {
        slot_drop(r, s, HOLDER_BIT(id));
        FAILPOINT("recover.slot_dropped");
    }
}

static void take_back(smoe_ring *r, uint32_t id) {
    atomic_store_explicit(&r->reservations[id], 0, memory_order_seq_cst);
    FAILPOINT("recover.reservation_back");
    bool busy = atomic_fetch_and_explicit(&r->hot->busy, ~(1u << id), memory_order_seq_cst) >> id & 1;
    FAILPOINT("recover.busy_back");
    if (busy)
        prewarm_ring(r);
    space_freed(r);
    FAILPOINT("recover.client_done");
}

void free_entry(smoe_ring *r, uint32_t id) {
    uint32_t g = atomic_load_explicit(&r->participants[id].generation, memory_order_acquire);
    if (g & 1)
        atomic_store_explicit(&r->participants[id].generation, g + 1, memory_order_release);
}

/* A client goes by itself: nothing of it is half done. */
void leave_client(smoe_ring *r, uint32_t id) {
    clear_holders(r, id);
    take_back(r, id);
    free_entry(r, id);
}

/* --- 2. workers ------------------------------------------------------------------------------------- */

/* The worker is dead, so until the slot's word is changed here nobody else writes to the slot. */
static uint32_t requeue_reads(smoe_ring *r, uint32_t worker) {
    uint32_t requeued = 0;
    for (uint32_t s = 0; s < r->n_slots; s++) {
        uint64_t w = slot_word(r, s);
        if (WORD_STATE(w) != SMOE_READING || WORD_WORKER(w) != worker)
            continue;
        atomic_store_explicit(&r->slots[s].read_started_ns, 0, memory_order_relaxed);
        if (atomic_load_explicit(&r->slots[s].kills, memory_order_relaxed) >= KILLS_MAX) {
            slot_error_set(r, s, SMOE_READ_KILLER, 0, 0, 0, 0);
            FAILPOINT("recover.killer_recorded");
            slot_fail(r, s, worker);
        } else if (slot_requeue(r, s, worker)) {
            requeued++;
            count(r, SMOE_C_REQUEUED, 1);
        }
        FAILPOINT("recover.requeued");
    }
    return requeued;
}

static void forget_read(smoe_ring *r, uint32_t id) {
    atomic_store_explicit(&r->participants[id].current_slot, 0, memory_order_relaxed);
    atomic_store_explicit(&r->participants[id].read_started_ns, 0, memory_order_relaxed);
    FAILPOINT("recover.read_forgotten");
}

/* --- 3. queues -------------------------------------------------------------------------------------- */

/* After a death all that is QUEUED is pushed, since nobody knows what the dead one had popped.  Without one,
 * only what its empty queue does not know: a push met a full queue, and nobody waits who would push again. */
static uint32_t push_queued(smoe_ring *r, bool after_death) {
    struct queue demands = demand_queue(r), guesses = speculative_queue(r);
    bool push_demands = after_death || queue_empty(demands), push_guesses = after_death || queue_empty(guesses);
    uint32_t pushed = 0;
    for (uint32_t s = 0; s < r->n_slots; s++) {
        uint64_t w = slot_word(r, s);
        bool guess = w & WORD_SPECULATIVE;
        if (WORD_STATE(w) != SMOE_QUEUED || !(guess ? push_guesses : push_demands))
            continue;
        /* Full: then there is enough to do; a waiter pushes again, and so does the next sweep. */
        pushed += queue_push(guess ? guesses : demands, s);
        FAILPOINT("recover.pushed");
    }
    if (pushed)
        doorbell_ring(r, 0);
    FAILPOINT("recover.rung");
    return pushed;
}

/* Guess bits and empty bits that a death left behind their words. */
static void mend_hints(smoe_ring *r) {
    for (uint32_t s = 0; s < r->n_slots; s++) {
        uint64_t w = slot_word(r, s);
        if (WORD_STATE(w) == SMOE_EMPTY)
            hint_empty(r, s);
        if (word_guess(w))
            guess_mark(r, s);
        else
            guess_clear(r, s);
        FAILPOINT("recover.mended");
    }
}

/* Whoever takes a dead owner's id does a sweep for that id.  The entry is used no more afterwards, so no
 * other sweep would find the slot that its owner had queued and not pushed, or the bits that it left.  The
 * caller holds the id's lock. */
void recover_client(smoe_ring *r, uint32_t id) {
    clear_holders(r, id);
    take_back(r, id);
    mend_hints(r);
    push_queued(r, true);
    free_entry(r, id);
}

void recover_worker(smoe_ring *r, uint32_t worker) {
    counters_recover(r, worker);
    requeue_reads(r, worker);
    forget_read(r, SMOE_ID_WORKER + worker);
    mend_hints(r);
    push_queued(r, true);
    free_entry(r, SMOE_ID_WORKER + worker);
}

/* A recorder that is gone records no more. */
void recover_trace(smoe_ring *r) {
    atomic_store_explicit(&r->hot->tracing, 0, memory_order_relaxed);
    FAILPOINT("recover.trace_off");
}

/* --- the sweep ---------------------------------------------------------------------------------------- */

struct dead {
    uint8_t ids[SMOE_PARTICIPANTS]; /* 1: dead when the sweep began, and its lock is ours now */
    uint32_t clients, workers, others;
};

static void find_dead(smoe_ring *r, struct dead *dead) {
    for (uint32_t id = 0; id < SMOE_PARTICIPANTS; id++) {
        if (id == r->id || !(atomic_load_explicit(&r->participants[id].generation, memory_order_acquire) & 1))
            continue;
        if (plat_lock_query(r->lock_fd, id) != 0 || plat_lock_try(r->lock_fd, id) != 0)
            continue;
        FAILPOINT("recover.locked");
        dead->ids[id] = 1;
        if (id < SMOE_CLIENTS)
            dead->clients++;
        else if (id < SMOE_ID_SUPERVISOR)
            dead->workers++;
        else
            dead->others++;
    }
}

int smoe_recover(smoe_ring *r, int in_full, smoe_recovery *out) {
    struct dead dead = {.clients = 0};
    smoe_recovery done = {0, 0, 0, 0, 0};
    find_dead(r, &dead);
    done.clients = dead.clients;
    done.workers = dead.workers;
    for (uint32_t id = 0; id < SMOE_CLIENTS; id++)
        if (dead.ids[id]) {
            clear_holders(r, id);
            take_back(r, id);
        }
    for (uint32_t id = SMOE_ID_WORKER; id < SMOE_ID_SUPERVISOR; id++)
        if (dead.ids[id]) {
            counters_recover(r, id - SMOE_ID_WORKER);
            done.requeued += requeue_reads(r, id - SMOE_ID_WORKER);
            forget_read(r, id);
        }
    if (dead.ids[SMOE_ID_TRACE])
        recover_trace(r);
    bool after_death = in_full || dead.clients || dead.workers || dead.others;
    if (after_death)
        mend_hints(r);
    done.pushed = push_queued(r, after_death);
    for (uint32_t id = 0; id < SMOE_PARTICIPANTS; id++)
        if (dead.ids[id]) {
            free_entry(r, id);
            FAILPOINT("recover.freed");
            plat_lock_drop(r->lock_fd, id);
            FAILPOINT("recover.unlocked");
        }
    if (out)
        *out = done;
    return (int)(dead.clients + dead.workers + dead.others);
}

int smoe_give_up_queued(smoe_ring *r) {
    int n = 0;
    for (uint32_t s = 0; s < r->n_slots; s++)
        if (WORD_STATE(slot_word(r, s)) == SMOE_QUEUED) {
            slot_error_set(r, s, SMOE_READ_UNSERVED, 0, 0, 0, 0);
            FAILPOINT("giveup.recorded");
            n += slot_give_up(r, s);
        }
    space_freed(r);
    return n;
}

int smoe_id_free(const smoe_ring *r, uint32_t worker) {
    uint32_t id = SMOE_ID_WORKER + worker;
    return worker < SMOE_WORKERS && plat_lock_query(r->lock_fd, id) == 0 &&
           !(atomic_load_explicit(&r->participants[id].generation, memory_order_acquire) & 1);
}
