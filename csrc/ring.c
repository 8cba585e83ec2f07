/* ring.c: demand, claim, release, speculate and wait: what a client does, all of it on shared memory.
 *
 * Holds.  A client's holder bit in a slot word stands for any number of holds of its threads; how many
 * is counted in private memory that dies with the process, one word a slot with a lock bit.  The own
 * holder bit is set, cleared, taken and given back only under that lock bit: otherwise one thread's last
 * release would clear the bit under another thread's fresh hold.
 *
 * Reservations.  Every slot with the own holder bit is covered by one unit of the client's reservation,
 * and the reservations of all clients never exceed the slots; so whoever has one finds a slot.  The
 * count is the sum over the clients' registrations, each written by its owner alone: reserving adds to
 * the own one first and then looks at the sum, and takes back where it is too large.  Of two clients
 * that would overstep together at least one sees the other (sequential consistency), and a dead
 * client's share goes by clearing one word.  A batch reserves all it needs at once and holds nothing of
 * that batch while it waits.
 *
 * Homes.  homes[expert] names the slot that last took the expert.  It is a hint; the slot word decides.
 *
 * A hit touches: own reservation, private count, home, slot word, tick, histogram, counter.  It enters
 * the kernel not at all.
 *
 * Demands are counted when their batch is acquired, each once, as what it was when it was asked for; so a batch
 * that is given back and tried again is not counted twice.
 */
#include "core.h"

#include <errno.h>
#include <string.h>

#define SLICE_NS         100000000ull /* longest sleep before everything is looked at again */
#define LOCKED           0x80000000u
#define READ_DEADLINE_MS 30000u   /* where the ring has none */
#define READ_MOST_MS     3600000u /* no configuration gives more */
#define LOST_MOST        1000u    /* slots lost to others, before one waits as if there were none */

static void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* --- private holds -------------------------------------------------------------------------------- */

/* A count with a lock bit: take the lock, and get the count. */
static uint32_t word_lock(_Atomic uint32_t *word) {
    for (unsigned spins = 0;; spins++) {
        uint32_t v = atomic_load_explicit(word, memory_order_relaxed);
        if (!(v & LOCKED) &&
            atomic_compare_exchange_weak_explicit(word, &v, v | LOCKED, memory_order_acquire, memory_order_relaxed))
            return v;
        if (spins % 64 == 63)
            plat_relax(); /* the thread inside may have lost its core */
        else
            cpu_relax();
    }
}

static void word_unlock(_Atomic uint32_t *word, uint32_t n) {
    atomic_store_explicit(word, n, memory_order_release);
}

static uint32_t hold_lock(smoe_ring *r, uint32_t s) {
    return word_lock(&r->private_holds[s]);
}

static void hold_unlock(smoe_ring *r, uint32_t s, uint32_t held) {
    word_unlock(&r->private_holds[s], held);
}

/* --- state of the ring and of this handle ----------------------------------------------------------- */

static int usable(const smoe_ring *r, smoe_error *e) {
    if (r->fork_generation != fork_generation())
        return fail(e, SMOE_EFORKED, "fork", 0, 0, 0);
    if (r->id >= SMOE_PARTICIPANTS)
        return fail(e, -EPERM, "observer", EPERM, 0, 0);
    return 0;
}

/* Not so after a sweep: then the words of this id, its bits and its slots may be another client's. */
static bool lease_holds(const smoe_ring *r) {
    return atomic_load_explicit(&r->participants[r->id].generation, memory_order_acquire) == r->generation;
}

int ring_check(const smoe_ring *r, smoe_error *e) {
    int rc = usable(r, e);
    if (rc)
        return rc;
    uint32_t state = atomic_load_explicit(&r->header->state, memory_order_acquire);
    if (state != SMOE_LIVE && state != SMOE_STOPPING && state != SMOE_STALE)
        return fail(e, SMOE_EGONE, "state", 0, SMOE_LIVE, state);
    uint32_t g = atomic_load_explicit(&r->participants[r->id].generation, memory_order_acquire);
    if (g != r->generation)
        return fail(e, SMOE_ELEASE, "generation", 0, r->generation, g);
    return 0;
}

/* The same, for those who want bytes that they do not hold. */
static int serving_check(const smoe_ring *r, smoe_error *e) {
    int rc = ring_check(r, e);
    if (rc || atomic_load_explicit(&r->header->state, memory_order_acquire) != SMOE_STALE)
        return rc;
    uint32_t changed = atomic_load_explicit(&r->hot->changed, memory_order_relaxed);
    fail(e, SMOE_ECHANGED, "source file", 0, 0, changed >> 16);
    if (e)
        e->file = changed & 0xFFFFu;
    return SMOE_ECHANGED;
}

/* The same, for those who want something new. */
static int demand_check(const smoe_ring *r, smoe_error *e) {
    int rc = serving_check(r, e);
    if (rc == 0 && atomic_load_explicit(&r->header->state, memory_order_acquire) == SMOE_STOPPING)
        rc = fail(e, SMOE_ESTOPPING, "state", 0, SMOE_LIVE, SMOE_STOPPING);
    return rc;
}

/* Nothing came in time.  Is anybody there to serve? */
static int timed_out(const smoe_ring *r, smoe_error *e, uint32_t s, uint32_t expert, uint64_t limit_ms) {
    bool served = plat_lock_query(r->lock_fd, SMOE_ID_SUPERVISOR) != 0;
    int code = fail(e, served ? SMOE_ETIMEOUT : SMOE_ENOSUPERVISOR, "wait", ETIMEDOUT, limit_ms, 0);
    if (e) {
        e->layer = r->experts[expert].layer;
        e->expert = r->experts[expert].expert;
    }
    if (e && s < r->n_slots) {
        e->got = WORD_STATE(slot_word(r, s));
        e->offset = WORD_WORKER(slot_word(r, s));
    }
    return code;
}

/* --- reservations ----------------------------------------------------------------------------------- */

static uint64_t reserved_total(const smoe_ring *r) {
    uint64_t n = 0;
    for (uint32_t c = 0; c < SMOE_CLIENTS; c++)
        n += atomic_load_explicit(&r->reservations[c], memory_order_seq_cst);
    return n;
}

/* Someone may be asleep for want of space.  The flag is cleared by the waker; left behind by a killed
 * sleeper it costs one wake. */
void space_freed(smoe_ring *r) {
    if (atomic_load_explicit(&r->hot->space_wanted, memory_order_seq_cst) &&
        atomic_exchange_explicit(&r->hot->space_wanted, 0, memory_order_seq_cst)) {
        FAILPOINT("space.flag_cleared");
        atomic_fetch_add_explicit(&r->hot->space, 1, memory_order_seq_cst);
        plat_wake(&r->hot->space, 0);
    }
}

/* Take n from the own share.  With the lease that is lost as a whole, and what stands there is another's. */
static void share_less(smoe_ring *r, uint32_t n) {
    if (!lease_holds(r))
        return;
    /* Not below zero, should the lease be lost right here: an overdraft would make everybody wait for good. */
    uint32_t seen = atomic_load_explicit(&r->reservations[r->id], memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&r->reservations[r->id], &seen, seen > n ? seen - n : 0,
                                                  memory_order_seq_cst, memory_order_relaxed)) {
    }
}

static void unreserve(smoe_ring *r, uint32_t n) {
    if (n == 0)
        return;
    share_less(r, n);
    FAILPOINT("unreserve.word");
    space_freed(r);
}

static bool reserve_try(smoe_ring *r, uint32_t n) {
    atomic_fetch_add_explicit(&r->reservations[r->id], n, memory_order_seq_cst);
    FAILPOINT("reserve.added");
    if (reserved_total(r) <= r->n_slots)
        return true;
    /* No wake: this gives nothing back that was there for others before. */
    share_less(r, n);
    FAILPOINT("reserve.undone");
    return false;
}

static int busy(const smoe_ring *r, smoe_error *e, uint32_t n) {
    int code = fail(e, SMOE_EBUSY, "reserve", 0, n, 0);
    if (e) {
        uint64_t total = reserved_total(r);
        e->got = total < r->n_slots ? r->n_slots - total : 0;
        for (uint32_t c = 0; c < SMOE_CLIENTS; c++)
            if (atomic_load_explicit(&r->reservations[c], memory_order_relaxed))
                e->holders |= 1u << c;
    }
    return code;
}

/* Sleep until space may have come free.  The first naps are short and differ from client to client: two
 * that fail by each other's attempt must not go on meeting. */
static int space_nap(smoe_ring *r, uint32_t seen, unsigned tries, uint64_t deadline) {
    uint64_t now = plat_now_ns();
    uint64_t nap = (200000ull + 70000ull * (r->id % 8)) << (tries < 8 ? tries : 8);
    if (nap > SLICE_NS)
        nap = SLICE_NS;
    if (now + nap > deadline)
        nap = deadline > now ? deadline - now : 1;
    return plat_wait(&r->hot->space, seen, nap);
}

/* A time limit, and beside it what a demand is told.  When it began is asked of the clock when somebody first has to
 * wait: a hit asks none.  A call that was interrupted goes on in the next one from where it began: the error record
 * carries that. */
struct limit {
    int64_t ms;     /* below zero: the ring's read deadline */
    uint64_t began; /* 0: not asked yet */
    uint64_t waits; /* since when it waits for bytes; 0: it does not yet */
    bool cold;      /* what has to be read is cold */
};

static struct limit limit_of(const smoe_ring *r, int64_t ms, smoe_error *e) {
    struct limit l = {.ms = ms};
    if (r->interruptible && e && e->code == -EINTR) {
        l.began = e->began_ns;
        l.waits = e->waited_ns;
    }
    if (e)
        e->code = 0;
    return l;
}

/* Asked each time, as it changes when the ring is adopted.  0: none was given; above the most: written over. */
static uint64_t read_deadline_ms(const smoe_ring *r) {
    uint32_t ms = r->header->read_deadline_ms;
    return ms && ms <= READ_MOST_MS ? ms : READ_DEADLINE_MS;
}

static uint64_t limit_began(struct limit *l) {
    if (l->began == 0)
        l->began = plat_now_ns();
    return l->began;
}

static uint64_t limit_end(const smoe_ring *r, struct limit *l) {
    uint64_t ms = l->ms < 0 ? read_deadline_ms(r) : (uint64_t)l->ms;
    return limit_began(l) + (ms > 1000000000000ull ? 1000000000000ull : ms) * 1000000u;
}

/* A nap has ended, by a signal or by itself, and there is no result yet.  For a caller that has signals to
 * look after this is the moment to return; a signal that came just before a nap began is not lost so. */
static int interrupted(const smoe_ring *r, struct limit *l, const char *where, smoe_error *e) {
    if (!r->interruptible)
        return 0;
    int code = fail(e, -EINTR, where, EINTR, 0, 0);
    if (e) {
        e->began_ns = l->began;
        e->waited_ns = l->waits;
    }
    return code;
}

/* --- acquire ---------------------------------------------------------------------------------------- */

int64_t smoe_expert_index(const smoe_ring *r, int64_t layer, int64_t expert) {
    if (r->fork_generation != fork_generation())
        return SMOE_EFORKED;
    if (layer < 0 || expert < 0 || layer >= r->grid_layers || expert >= r->grid_experts)
        return SMOE_EID;
    uint64_t at = (uint64_t)layer * r->grid_experts + (uint64_t)expert;
    if (at - r->grid_first < r->grid_run)
        return (int64_t)(at - r->grid_first);
    uint32_t cell = *(const volatile uint32_t *)&r->grid[at]; /* index + 1, read once */
    return cell - 1 < r->n_experts ? (int64_t)cell - 1 : SMOE_EID;
}

/* A queued read that nobody holds: a guess, or what a client left that died or gave up waiting. */
static int unheld_queued(const smoe_ring *r, uint64_t *word) {
    for (uint32_t s = 0; s < r->n_slots; s++) {
        *word = slot_word(r, s);
        if (WORD_STATE(*word) == SMOE_QUEUED && WORD_HOLDERS(*word) == 0)
            return (int)s;
    }
    return -1;
}

/* What a batch asked for, by how it was found, and what of it was pushed on the queue. */
struct asked {
    uint64_t kinds; /* 16 bits each, as a batch has no more than a ring has slots: SMOE_C_HITS .. SMOE_C_MISSES */
    uint32_t pushed;
};
_Static_assert(SMOE_C_MISSES < 4 && SMOE_SLOTS_MAX <= 0xFFFFu, "kinds");

static void asked_as(struct asked *a, enum smoe_counter kind) {
    a->kinds += 1ull << 16 * kind;
}

static void count_phased(smoe_ring *r, uint32_t c, uint64_t n) {
    count(r, phase_word(thread_phase, c), n);
}

static void count_asked(smoe_ring *r, const struct asked *a) {
    uint64_t kinds = a->kinds;
    for (uint32_t c = SMOE_C_HITS; kinds; c++, kinds >>= 16)
        if (kinds & 0xFFFFu)
            count_phased(r, c, kinds & 0xFFFFu);
}

static void count_guess_used(smoe_ring *r, uint32_t expert) {
    count(r, SMOE_C_GUESS_USED_BYTES, r->experts[expert].bytes);
}

/* The slot that is the next to be taken, and its word as seen; -1: none is free to be. */
static int next_slot(smoe_ring *r, uint64_t *word) {
    *word = 0;
    int s = lru_find_empty(r);
    if (s < 0)
        s = lru_find_cold(r, word);
    return s < 0 ? lru_victim(r, word) : s;
}

/* What follows a slot_take, for demand and guess alike. */
static void taken(smoe_ring *r, uint32_t s, uint64_t before) {
    hint_not_cold(r, s);
    if (WORD_STATE(before) == SMOE_EMPTY) {
        hint_not_empty(r, s);
        FAILPOINT("take.hint_cleared");
        return;
    }
    if (WORD_EXPERT(before) >= r->n_experts) /* somebody wrote over the word */
        return;
    uint32_t named = s + 1;
    atomic_compare_exchange_strong_explicit(&r->homes[WORD_EXPERT(before)], &named, 0, memory_order_relaxed,
                                            memory_order_relaxed);
    FAILPOINT("take.victim_home_cleared");
    if (word_resident(before)) {
        count(r, SMOE_C_EVICTIONS, 1);
        if (before & WORD_SPECULATIVE) {
            count(r, SMOE_C_GUESS_WASTED, 1);
            count(r, SMOE_C_GUESS_WASTED_BYTES, r->experts[WORD_EXPERT(before)].bytes);
        }
    } else if (word_guess(before)) {
        guess_clear(r, s);
        count(r, SMOE_C_GUESS_DISPLACED, 1);
    }
}

/* Take a slot for a demand; the caller has a reservation.  Returns the slot or an error.  There can be
 * none for a moment: while a guess, or a read whose waiters left, is being read into the last one. */
static int take_slot(smoe_ring *r, uint32_t expert, struct limit *limit, smoe_error *e) {
    for (unsigned tries = 0, lost = 0;;) {
        uint32_t seen = atomic_load_explicit(&r->hot->space, memory_order_seq_cst);
        uint64_t word;
        int s = next_slot(r, &word);
        if (s < 0)
            s = unheld_queued(r, &word);
        if (s >= 0) {
            uint32_t held = hold_lock(r, (uint32_t)s);
            bool ok = held == 0 && slot_take(r, (uint32_t)s, word, expert, 0, r->bit);
            hold_unlock(r, (uint32_t)s, ok ? 1 : held);
            if (ok) {
                taken(r, (uint32_t)s, word);
                return s;
            }
            /* Lost to somebody else; or this handle's bits were taken from it, which ends the loop; or somebody wrote
             * over a word, and what is held here looks free: that is waited for, and in vain. */
            int rc = ring_check(r, e);
            if (rc)
                return rc;
            if (++lost % LOST_MOST)
                continue;
        }
        atomic_store_explicit(&r->hot->space_wanted, 1, memory_order_seq_cst);
        if (tries++ == 0)
            continue; /* once more with the flag up */
        int rc = demand_check(r, e);
        if (rc)
            return rc;
        uint64_t end = limit_end(r, limit), now = plat_now_ns();
        if (now >= end)
            return timed_out(r, e, r->n_slots, expert, (now - limit->began) / 1000000u);
        space_nap(r, seen, tries, end);
        rc = interrupted(r, limit, "take a slot", e);
        if (rc)
            return rc;
    }
}

static void queue_demand(smoe_ring *r, uint32_t s, struct asked *a) {
    /* A full queue undoes nothing: whoever waits for the slot pushes it again. */
    if (queue_push(demand_queue(r), s))
        a->pushed++;
}

static void set_hold(smoe_hold *h, uint32_t expert, uint32_t s, bool hit) {
    h->expert_index = expert;
    h->slot = s;
    h->hit = hit;
    h->status = hit ? SMOE_HOLD_RESIDENT : SMOE_HOLD_LOADING;
}

static void count_popularity(smoe_ring *r, uint32_t expert) {
    _Atomic uint32_t *n = &r->histogram[expert];
    if (atomic_load_explicit(n, memory_order_relaxed) != UINT32_MAX)
        atomic_fetch_add_explicit(n, 1, memory_order_relaxed);
}

/* Join the expert's home, if it is one.  True: *hold is set.  held_only: only if this process holds it
 * already, which needs no reservation; otherwise the caller has one. */
static bool join_home(smoe_ring *r, uint32_t expert, uint32_t s, bool held_only, smoe_hold *hold, struct asked *a) {
    uint64_t before;
    uint32_t held = hold_lock(r, s);
    if (held_only && !held) {
        hold_unlock(r, s, held);
        return false;
    }
    enum slot_join j = slot_join(r, s, expert, r->bit, &before);
    FAILPOINT("join.word");
    hold_unlock(r, s, j == JOIN_NO ? held : held + 1);
    if (j == JOIN_NO)
        return false;
    if (held && !held_only)
        unreserve(r, 1); /* the slot is covered already */
    lru_used(r, s);
    set_hold(hold, expert, s, j == JOIN_HIT);
    switch (j) {
    case JOIN_HIT:
        asked_as(a, SMOE_C_HITS);
        count_popularity(r, expert);
        if (before & WORD_SPECULATIVE) {
            count(r, SMOE_C_GUESS_HITS, 1);
            count_guess_used(r, expert);
        }
        break;
    case JOIN_PROMOTED:
        FAILPOINT("promote.word");
        asked_as(a, SMOE_C_PROMOTED);
        count_guess_used(r, expert);
        guess_clear(r, s);
        FAILPOINT("promote.guess_cleared");
        if (WORD_STATE(before) == SMOE_QUEUED)
            queue_demand(r, s, a); /* the guess's own entry is skipped when it is popped */
        FAILPOINT("promote.pushed");
        break;
    case JOIN_RETRY:
        FAILPOINT("retry.word");
        asked_as(a, SMOE_C_MISSES);
        queue_demand(r, s, a);
        break;
    default:
        asked_as(a, SMOE_C_JOINS);
    }
    return true;
}

static int acquire_one(smoe_ring *r, uint32_t expert, smoe_hold *hold, struct limit *limit, struct asked *a,
                       smoe_error *e) {
    for (;;) {
        uint32_t home = atomic_load_explicit(&r->homes[expert], memory_order_relaxed);
        if (home - 1 < r->n_slots && join_home(r, expert, home - 1, false, hold, a))
            return 0;
        int taken_slot = take_slot(r, expert, limit, e);
        if (taken_slot < 0)
            return taken_slot;
        uint32_t s = (uint32_t)taken_slot;
        uint32_t named = home;
        if (limit->cold)
            hint_cold(r, s);
        if (!atomic_compare_exchange_strong_explicit(&r->homes[expert], &named, s + 1, memory_order_relaxed,
                                                     memory_order_relaxed) &&
            named != s + 1) {
            /* Somebody else took a slot for this expert meanwhile.  Give ours back exactly as it was
             * taken; has anyone joined it, it stays: two slots with one expert are harmless, an emptied
             * slot under a joiner is not. */
            uint32_t held = hold_lock(r, s);
            FAILPOINT("home.lost");
            bool back = held == 1 && slot_give_back(r, s, expert, 0, r->bit);
            hold_unlock(r, s, back ? 0 : held);
            if (back) {
                hint_empty(r, s);
                continue;
            }
        }
        FAILPOINT("home.set");
        lru_stamp(r, s);
        asked_as(a, SMOE_C_MISSES);
        set_hold(hold, expert, s, false);
        queue_demand(r, s, a);
        FAILPOINT("acquire.pushed");
        return 0;
    }
}

static int no_such(smoe_error *e, int64_t layer, int64_t expert, const char *why, uint64_t at) {
    int code = fail(e, SMOE_EID, why, 0, (uint64_t)expert, at);
    if (e) {
        e->layer = (uint32_t)layer;
        e->expert = (uint32_t)expert;
    }
    return code;
}

/* Indices of the batch's experts; none named twice. */
static int resolve(const smoe_ring *r, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds,
                   smoe_error *e) {
    bool ascending = true; /* as routers' unions come: then none is named twice */
    for (uint32_t i = 0; i < n; i++) {
        int64_t index = smoe_expert_index(r, layer, experts[i]);
        bool twice = false;
        ascending = ascending && (i == 0 || experts[i] > experts[i - 1]);
        for (uint32_t k = 0; !ascending && k < i && !twice; k++)
            twice = experts[k] == experts[i];
        if (index < 0 || twice)
            return no_such(e, layer, experts[i], twice ? "named twice" : "no such expert", i);
        holds[i].expert_index = (uint32_t)index;
    }
    return 0;
}

/* Does this process hold the expert already?  A hint: another thread may let it go. */
static bool seems_held(const smoe_ring *r, uint32_t expert) {
    uint32_t s = atomic_load_explicit(&r->homes[expert], memory_order_relaxed) - 1;
    if (s >= r->n_slots || !(atomic_load_explicit(&r->private_holds[s], memory_order_relaxed) & ~LOCKED))
        return false;
    uint64_t w = slot_word(r, s); /* a home may be stale */
    return WORD_STATE(w) != SMOE_EMPTY && WORD_EXPERT(w) == expert;
}

/* Hold once more what this process holds already.  Returns how many of the batch. */
static uint32_t hold_held(smoe_ring *r, smoe_hold *holds, uint32_t n, struct asked *a) {
    uint32_t got = 0;
    for (uint32_t i = 0; i < n; i++)
        if (seems_held(r, holds[i].expert_index)) {
            uint32_t home = atomic_load_explicit(&r->homes[holds[i].expert_index], memory_order_relaxed);
            got += home - 1 < r->n_slots && join_home(r, holds[i].expert_index, home - 1, true, &holds[i], a);
        }
    if (a->pushed)
        doorbell_ring(r, (int)a->pushed);
    a->pushed = 0;
    return got;
}

/* Reserve what the batch needs, at once or not at all: then nothing of the batch is held.  What this process
 * holds already needs no reservation, so that asking for it again works in a full ring. */
static bool reserve_batch(smoe_ring *r, smoe_hold *holds, uint32_t n, struct asked *a) {
    uint32_t held = 0;
    for (uint32_t i = 0; i < n; i++)
        held += seems_held(r, holds[i].expert_index);
    if (held < n && !reserve_try(r, n - held))
        return false;
    if (held == 0 || hold_held(r, holds, n, a) == held)
        return true;
    unreserve(r, n - held); /* another thread let one go meanwhile */
    smoe_release(r, holds, n);
    a->kinds = 0;
    return false;
}

static int reserve(smoe_ring *r, smoe_hold *holds, uint32_t n, struct limit *limit, struct asked *a, smoe_error *e) {
    if (reserve_batch(r, holds, n, a))
        return 0;
    if (limit->began == 0)
        count(r, SMOE_C_BUSY_WAITS, 1);
    uint64_t end = limit_end(r, limit);
    for (unsigned tries = 0;; tries++) {
        uint32_t seen = atomic_load_explicit(&r->hot->space, memory_order_seq_cst);
        atomic_store_explicit(&r->hot->space_wanted, 1, memory_order_seq_cst);
        FAILPOINT("reserve.wanted");
        if (reserve_batch(r, holds, n, a))
            return 0;
        int rc = demand_check(r, e);
        if (rc)
            return rc;
        if (plat_now_ns() >= end)
            return busy(r, e, n);
        space_nap(r, seen, tries, end);
        rc = interrupted(r, limit, "reserve", e);
        if (rc)
            return rc;
    }
}

/* Acquire those of the batch that are not held yet; all of them are reserved. */
static int acquire_rest(smoe_ring *r, smoe_hold *holds, uint32_t n, struct limit *limit, struct asked *a,
                        smoe_error *e) {
    uint32_t left = 0;
    int hits = 0, rc = 0;
    for (uint32_t i = 0; i < n; i++)
        left += holds[i].status == SMOE_HOLD_NONE;
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        if (holds[i].status == SMOE_HOLD_NONE) {
            rc = acquire_one(r, holds[i].expert_index, &holds[i], limit, a, e);
            left -= rc == 0;
        }
        hits += rc == 0 && holds[i].hit;
    }
    if (rc) {
        unreserve(r, left);
        smoe_release(r, holds, n);
    }
    return rc ? rc : hits;
}

/* Ask for the lines that a hit will write, all at once: each is written by an atomic operation, which waits
 * for its line and lets nothing pass, so that in a large ring their misses would add up. */
static void prefetch(const smoe_ring *r, const smoe_hold *holds, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        __builtin_prefetch((const void *)&r->homes[holds[i].expert_index]);
        __builtin_prefetch((const void *)&r->histogram[holds[i].expert_index], 1);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t s = atomic_load_explicit(&r->homes[holds[i].expert_index], memory_order_relaxed) - 1;
        if (s < r->n_slots) {
            __builtin_prefetch((const void *)&r->words[s], 1);
            __builtin_prefetch((const void *)&r->private_holds[s], 1);
            __builtin_prefetch((const void *)&r->ticks[s], 1);
        }
    }
}

static int acquire(smoe_ring *r, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds, bool wait,
                   struct limit *limit, smoe_error *e) {
    for (uint32_t i = 0; i < n; i++)
        holds[i].status = SMOE_HOLD_NONE;
    int rc = demand_check(r, e);
    if (rc)
        return rc;
    if (r->id >= SMOE_CLIENTS)
        return fail(e, -EPERM, "only clients hold slots", EPERM, 0, 0);
    if (n > r->n_slots)
        return fail(e, SMOE_ETOOLARGE, "reserve", 0, n, r->n_slots);
    rc = resolve(r, layer, experts, n, holds, e);
    if (rc || n == 0)
        return rc;
    if (n > 1)
        prefetch(r, holds, n);
    struct asked asked = {0, 0};
    if (wait)
        rc = reserve(r, holds, n, limit, &asked, e);
    else
        rc = reserve_batch(r, holds, n, &asked) ? 0 : busy(r, e, n);
    if (rc == 0)
        rc = acquire_rest(r, holds, n, limit, &asked, e);
    if (rc >= 0)
        count_asked(r, &asked);
    if (asked.pushed)
        doorbell_ring(r, (int)asked.pushed);
    if (rc >= 0 && tracing(r))
        trace_holds(r, SMOE_TRACE_DEMAND, (uint32_t)layer, holds, n);
    return rc;
}

int smoe_acquire(smoe_ring *r, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds, int64_t timeout_ms,
                 smoe_error *e) {
    struct limit limit = limit_of(r, timeout_ms, e);
    return acquire(r, layer, experts, n, holds, true, &limit, e);
}

int smoe_acquire_nowait(smoe_ring *r, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds,
                        smoe_error *e) {
    struct limit limit = limit_of(r, -1, e);
    return acquire(r, layer, experts, n, holds, false, &limit, e);
}

int smoe_acquire_cold(smoe_ring *r, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds, int wait,
                      int64_t timeout_ms, smoe_error *e) {
    struct limit limit = limit_of(r, timeout_ms, e);
    limit.cold = true;
    return acquire(r, layer, experts, n, holds, wait != 0, &limit, e);
}

int smoe_claim_specific(smoe_ring *r, int64_t layer, int64_t expert, smoe_hold *hold, smoe_error *e) {
    int rc = serving_check(r, e);
    if (rc)
        return rc;
    if (r->id >= SMOE_CLIENTS)
        return fail(e, -EPERM, "only clients hold slots", EPERM, 0, 0);
    hold->status = SMOE_HOLD_NONE;
    int64_t index = smoe_expert_index(r, layer, expert);
    if (index < 0)
        return no_such(e, layer, expert, "no such expert", 0);
    uint32_t home = atomic_load_explicit(&r->homes[index], memory_order_relaxed);
    if (home - 1 >= r->n_slots)
        return 0;
    uint32_t s = home - 1;
    uint64_t before;
    uint32_t held = hold_lock(r, s);
    if (!held && !reserve_try(r, 1)) {
        hold_unlock(r, s, held);
        return 0;
    }
    bool ok = slot_claim(r, s, (uint32_t)index, r->bit, &before);
    FAILPOINT("claim.word");
    hold_unlock(r, s, ok ? held + 1 : held);
    if (!ok && !held)
        unreserve(r, 1);
    if (!ok)
        return 0;
    lru_used(r, s);
    set_hold(hold, (uint32_t)index, s, true);
    count(r, SMOE_C_CLAIMS, 1);
    count_popularity(r, (uint32_t)index);
    if (before & WORD_SPECULATIVE) {
        count(r, SMOE_C_GUESS_HITS, 1);
        count_guess_used(r, (uint32_t)index);
    }
    if (tracing(r))
        trace_holds(r, SMOE_TRACE_CLAIM, (uint32_t)layer, hold, 1);
    return 1;
}

/* --- release ---------------------------------------------------------------------------------------- */

static void release_one(smoe_ring *r, smoe_hold *h) {
    uint32_t s = h->slot;
    h->status = SMOE_HOLD_NONE;
    uint32_t held = hold_lock(r, s);
    if (held == 1)
        slot_drop(r, s, r->bit);
    FAILPOINT("release.word");
    hold_unlock(r, s, held ? held - 1 : 0);
    if (held == 1)
        unreserve(r, 1);
}

int smoe_release(smoe_ring *r, smoe_hold *holds, uint32_t n) {
    /* Not ring_check: what is held of a ring that is gone is given up all the same. */
    if (r->fork_generation != fork_generation())
        return SMOE_EFORKED;
    if (!lease_holds(r))
        return SMOE_ELEASE; /* the bits are no longer ours to clear */
    uint32_t released = 0;
    for (uint32_t i = 0; i < n; i++)
        if (holds[i].status != SMOE_HOLD_NONE && holds[i].slot < r->n_slots) {
            release_one(r, &holds[i]);
            released++;
        }
    if (released)
        count(r, SMOE_C_RELEASES, released);
    return (int)released;
}

int smoe_hold_again(smoe_ring *r, const smoe_hold *hold, smoe_hold *again) {
    again->status = SMOE_HOLD_NONE;
    int rc = usable(r, NULL);
    if (rc || hold->status == SMOE_HOLD_NONE || hold->slot >= r->n_slots)
        return rc ? rc : -EINVAL;
    if (!lease_holds(r))
        return SMOE_ELEASE; /* whatever the private count says: another expert may lie there, or be read */
    uint32_t held = hold_lock(r, hold->slot);
    hold_unlock(r, hold->slot, held ? held + 1 : 0);
    if (!held)
        return -EINVAL;
    *again = *hold;
    return 0;
}

/* --- wait ------------------------------------------------------------------------------------------- */

/* The error of a FAILED slot, if it is still that when the record has been read. */
static bool read_error(smoe_ring *r, uint32_t s, uint32_t expert, smoe_error *e) {
    smoe_error seen;
    if (!slot_error(r, s, &seen) || WORD_STATE(slot_word(r, s)) != SMOE_FAILED)
        return false; /* somebody has demanded it anew: there will be another answer */
    seen.layer = r->experts[expert].layer;
    seen.expert = r->experts[expert].expert;
    if (e)
        *e = seen;
    return true;
}

/* 1: resident; 0: not yet; SMOE_EREAD (the hold is dropped), SMOE_ELEASE. */
static int look(smoe_ring *r, smoe_hold *h, smoe_error *e) {
    uint64_t w = slot_word(r, h->slot); /* P2: the word before the bytes */
    if (!(w & r->bit) || WORD_EXPERT(w) != h->expert_index)
        return fail(e, SMOE_ELEASE, "slot word", 0, r->bit, w);
    if (word_resident(w)) {
        h->status = SMOE_HOLD_RESIDENT;
        count_popularity(r, h->expert_index);
        return 1;
    }
    if (WORD_STATE(w) == SMOE_FAILED && read_error(r, h->slot, h->expert_index, e)) {
        count(r, SMOE_C_READ_ERRORS, 1);
        release_one(r, h);
        return SMOE_EREAD;
    }
    return 0;
}

/* A waiter's duties at each slice: a slot whose entry is gone from its queue is pushed again (its taker
 * may be stopped between taking and pushing, and stopped is not dead); a wake may have gone to a worker
 * that is stopped. */
static void help(smoe_ring *r, uint32_t s) {
    if (WORD_STATE(slot_word(r, s)) != SMOE_QUEUED)
        return;
    if (queue_empty(demand_queue(r)))
        (void)queue_push(demand_queue(r), s);
    doorbell_ring(r, 1);
}

/* Has the read of this slot taken too long?  A queued one counts from the last read that ended, so that
 * a long queue on a slow disk is not taken for a dead one.  One may have ended after `now` was asked; what is
 * further ahead than the limit somebody wrote over. */
static bool overdue(const smoe_ring *r, uint32_t s, uint64_t began, uint64_t now) {
    uint64_t since = began, limit = read_deadline_ms(r) * 1000000u;
    if (WORD_STATE(slot_word(r, s)) == SMOE_READING) {
        uint64_t started = atomic_load_explicit(&r->slots[s].read_started_ns, memory_order_relaxed);
        if (started && started < now)
            since = started;
    } else {
        uint64_t landed = atomic_load_explicit(&r->hot->landed_ns, memory_order_relaxed);
        if (landed > since && landed <= now + limit)
            since = landed;
    }
    return now > since && now - since > limit;
}

/* One slice ended without the bytes: everything that can have gone wrong.  Drops the hold on a time-out. */
static int after_slice(smoe_ring *r, smoe_hold *h, uint64_t began, uint64_t deadline, smoe_error *e) {
    int rc = serving_check(r, e);
    if (rc)
        return rc;
    uint64_t now = plat_now_ns();
    if (now >= deadline || overdue(r, h->slot, began, now)) {
        rc = timed_out(r, e, h->slot, h->expert_index, (now - began) / 1000000u);
        count(r, SMOE_C_TIMEOUTS, 1);
        release_one(r, h);
        return rc;
    }
    help(r, h->slot);
    return 0;
}

/* The end of a wait's time limit.  One below zero is none of the caller's own: the ring's read deadline
 * then decides, and that counts from the last sign of progress. */
static uint64_t wait_end(struct limit *l) {
    uint64_t began = limit_began(l);
    return l->ms < 0 || l->ms > 1000000000000ll ? UINT64_MAX : began + (uint64_t)l->ms * 1000000u;
}

static uint64_t slice(uint64_t end) {
    uint64_t now = plat_now_ns();
    return now >= end ? 1 : end - now < SLICE_NS ? end - now : SLICE_NS;
}

static bool spin(smoe_ring *r, smoe_hold *h, uint64_t until, int *rc, smoe_error *e) {
    do {
        for (int i = 0; i < 16; i++)
            cpu_relax();
        *rc = look(r, h, e);
        if (*rc)
            return true;
    } while (plat_now_ns() < until);
    return false;
}

/* Returns 0 when resident. */
static int wait_one(smoe_ring *r, smoe_hold *h, struct limit *limit, smoe_error *e) {
    uint64_t began = limit_began(limit), end = wait_end(limit);
    int rc = look(r, h, e);
    if (rc || spin(r, h, began + r->spin_ns, &rc, e))
        return rc < 0 ? rc : 0;
    for (;;) {
        uint32_t low = (uint32_t)slot_word(r, h->slot);
        rc = look(r, h, e);
        if (rc)
            return rc < 0 ? rc : 0;
        (void)plat_wait(slot_futex(r, h->slot), low, slice(end));
        rc = look(r, h, e);
        if (rc)
            return rc < 0 ? rc : 0;
        rc = after_slice(r, h, began, end, e);
        if (rc == 0)
            rc = interrupted(r, limit, "wait", e);
        if (rc)
            return rc;
    }
}

/* A wait for bytes has ended, unless it was only interrupted. */
static void count_wait(smoe_ring *r, const struct limit *limit, int rc) {
    if (limit->waits == 0 || rc == -EINTR)
        return;
    uint64_t ns = plat_now_ns() - limit->waits;
    count_phased(r, SMOE_C_WAITS, 1);
    count_phased(r, SMOE_C_WAIT_NS, ns);
    count_phased(r, SMOE_BUCKET_WORD + counters_bucket(ns), 1);
}

static int wait_all(smoe_ring *r, smoe_hold *holds, uint32_t n, struct limit *limit, smoe_error *e) {
    int rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        if (holds[i].status != SMOE_HOLD_LOADING)
            continue;
        if (limit->waits == 0)
            limit->waits = plat_now_ns();
        rc = wait_one(r, &holds[i], limit, e);
    }
    count_wait(r, limit, rc);
    return rc;
}

int smoe_wait(smoe_ring *r, smoe_hold *holds, uint32_t n, int64_t timeout_ms, smoe_error *e) {
    struct limit limit = limit_of(r, timeout_ms, e);
    int rc = ring_check(r, e);
    return rc ? rc : wait_all(r, holds, n, &limit, e);
}

/* One look at every hold that is loading.  Index of one that landed, -1: none, or an error. */
static int look_any(smoe_ring *r, smoe_hold *holds, uint32_t n, bool *loading, int *index, smoe_error *e) {
    *loading = false;
    for (uint32_t i = 0; i < n; i++) {
        if (holds[i].status != SMOE_HOLD_LOADING)
            continue;
        *loading = true;
        int rc = look(r, &holds[i], e);
        if (rc) {
            *index = (int)i;
            return rc;
        }
    }
    return 0;
}

/* A slice ended without news: everything that can have gone wrong with any of them. */
static int after_slice_any(smoe_ring *r, smoe_hold *holds, uint32_t n, uint64_t began, uint64_t end, int *index,
                           smoe_error *e) {
    int rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i++)
        if (holds[i].status == SMOE_HOLD_LOADING) {
            rc = after_slice(r, &holds[i], began, end, e);
            *index = (int)i;
        }
    return rc;
}

int smoe_wait_any(smoe_ring *r, smoe_hold *holds, uint32_t n, int64_t timeout_ms, smoe_error *e) {
    struct limit limit = limit_of(r, timeout_ms, e);
    bool loading;
    int rc = ring_check(r, e), index = -1;
    if (rc)
        return rc;
    uint64_t began = limit_began(&limit), end = wait_end(&limit), entered = plat_now_ns();
    if (limit.waits == 0)
        limit.waits = entered;
    _Atomic uint32_t *bell = &r->participants[r->id].landed;
    for (;;) {
        uint32_t seen = atomic_load_explicit(bell, memory_order_acquire); /* B2, before the words */
        rc = look_any(r, holds, n, &loading, &index, e);
        if (rc || !loading)
            break;
        if (plat_now_ns() - entered < r->spin_ns) {
            cpu_relax();
            continue;
        }
        (void)plat_wait(bell, seen, slice(end));
        rc = look_any(r, holds, n, &loading, &index, e);
        if (rc == 0)
            rc = after_slice_any(r, holds, n, began, end, &index, e);
        if (rc == 0)
            rc = interrupted(r, &limit, "wait", e);
        if (rc)
            break;
    }
    if (rc == 0)
        return fail(e, -ENOENT, "nothing is loading", ENOENT, 0, 0);
    count_wait(r, &limit, rc);
    return rc > 0 ? index : rc;
}

int smoe_fetch(smoe_ring *r, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds, int64_t timeout_ms,
               smoe_error *e) {
    struct limit limit = limit_of(r, timeout_ms, e);
    int hits = acquire(r, layer, experts, n, holds, true, &limit, e);
    if (hits < 0 || hits == (int)n)
        return hits;
    int rc = wait_all(r, holds, n, &limit, e);
    if (rc == -EINTR)
        return rc;
    if (rc < 0) {
        smoe_release(r, holds, n);
        return rc;
    }
    return hits;
}

/* --- speculate --------------------------------------------------------------------------------------- */

/* Undo a guess that nobody has noticed yet. */
static void take_back_guess(smoe_ring *r, uint32_t s, uint32_t expert) {
    if (slot_give_back(r, s, expert, WORD_SPECULATIVE, 0)) {
        hint_empty(r, s);
        FAILPOINT("giveback.hinted");
        guess_clear(r, s);
    }
}

/* 1: queued; 0: there already; -1: given up. */
static int guess_one(smoe_ring *r, uint32_t expert) {
    uint32_t home = atomic_load_explicit(&r->homes[expert], memory_order_relaxed);
    if (home - 1 < r->n_slots) {
        uint64_t w = slot_word(r, home - 1);
        if (WORD_STATE(w) != SMOE_EMPTY && WORD_EXPERT(w) == expert)
            return 0;
    }
    for (int tries = 0; tries < 8; tries++) {
        uint64_t word;
        int found = next_slot(r, &word);
        if (found < 0 || !guess_admit(r, (uint32_t)found))
            return -1;
        uint32_t s = (uint32_t)found;
        FAILPOINT("guess.admitted");
        if (!slot_take(r, s, word, expert, WORD_SPECULATIVE, 0)) {
            guess_clear(r, s);
            continue;
        }
        FAILPOINT("guess.word");
        guess_mark(r, s); /* a cleaner may have cleared the bit before the word said so */
        FAILPOINT("guess.marked");
        taken(r, s, word);
        if (guess_over(r)) { /* counted once more, now that this one is one */
            take_back_guess(r, s, expert);
            return -1;
        }
        uint32_t named = home;
        if (!atomic_compare_exchange_strong_explicit(&r->homes[expert], &named, s + 1, memory_order_relaxed,
                                                     memory_order_relaxed) &&
            named != s + 1) {
            take_back_guess(r, s, expert);
            return 0;
        }
        FAILPOINT("guess.home_set");
        if (!queue_push(speculative_queue(r), s)) {
            take_back_guess(r, s, expert);
            return -1;
        }
        FAILPOINT("guess.pushed");
        return 1;
    }
    return -1;
}

int smoe_speculate(smoe_ring *r, int64_t layer, const int64_t *experts, uint32_t n, smoe_error *e) {
    int rc = demand_check(r, e), queued = 0;
    if (rc)
        return rc;
    for (uint32_t i = 0; i < n; i++)
        if (smoe_expert_index(r, layer, experts[i]) < 0)
            return no_such(e, layer, experts[i], "no such expert", i);
    uint32_t i = 0, traced = !tracing(r) ? 0 : n < SMOE_TRACE_ENTRIES ? n : SMOE_TRACE_ENTRIES;
    uint64_t at = traced ? trace_begin(r, SMOE_TRACE_GUESS, (uint32_t)layer, traced) : 0;
    for (; i < n; i++) {
        /* Asked once: there may be another answer each time, where somebody writes over the grid. */
        int64_t expert = smoe_expert_index(r, layer, experts[i]);
        int got = expert < 0 ? -1 : guess_one(r, (uint32_t)expert);
        if (got < 0)
            break;
        if (i < traced)
            trace_entry(r, at + i, (uint32_t)expert, got ? SMOE_TRACE_ASKED : SMOE_TRACE_THERE);
        queued += got;
    }
    for (uint32_t k = i; k < traced; k++)
        trace_entry(r, at + k, (uint32_t)smoe_expert_index(r, layer, experts[k]), SMOE_TRACE_DROPPED);
    if (queued) {
        count(r, SMOE_C_GUESSES, (uint64_t)queued);
        doorbell_ring(r, queued);
    }
    if (i < n)
        count(r, SMOE_C_GUESS_DROPS, n - i);
    return queued;
}

void smoe_set_interruptible(smoe_ring *r, int on) {
    r->interruptible = on;
}

void smoe_set_spin_us(smoe_ring *r, uint32_t spin_us) {
    r->spin_ns = (uint64_t)spin_us * 1000u;
}

/* --- busy, and the prewarm process's words ------------------------------------------------------------- */

void prewarm_ring(smoe_ring *r) {
    atomic_fetch_add_explicit(&r->hot->prewarm_bell, 1, memory_order_seq_cst);
    plat_wake(&r->hot->prewarm_bell, 0);
}

int smoe_busy(smoe_ring *r, int on) {
    /* Not ring_check: also the end of a request on a ring that is gone must be counted. */
    int rc = usable(r, NULL);
    if (rc || r->id >= SMOE_CLIENTS)
        return rc ? rc : -EPERM;
    if (!lease_holds(r))
        return SMOE_ELEASE; /* the bit is no longer ours */
    uint32_t held = word_lock(&r->busy_holds);
    if (on ? held == 0 : held == 1) {
        if (on)
            atomic_fetch_or_explicit(&r->hot->busy, 1u << r->id, memory_order_seq_cst);
        else
            atomic_fetch_and_explicit(&r->hot->busy, ~(1u << r->id), memory_order_seq_cst);
        FAILPOINT("busy.word");
        prewarm_ring(r);
        if (tracing(r))
            trace_begin(r, on ? SMOE_TRACE_BUSY : SMOE_TRACE_IDLE, 0, 0);
    }
    held = on ? held + 1 : held ? held - 1 : 0;
    word_unlock(&r->busy_holds, held);
    return (int)held;
}

uint32_t smoe_busy_clients(const smoe_ring *r) {
    if (r->fork_generation != fork_generation())
        return 0;
    return atomic_load_explicit(&r->hot->busy, memory_order_seq_cst);
}

static _Atomic uint32_t *prewarm_word(const smoe_ring *r, int which) {
    switch (which) {
    case SMOE_PREWARM_BELL:
        return &r->hot->prewarm_bell;
    case SMOE_PREWARM_PAUSE:
        return &r->hot->prewarm_paused;
    case SMOE_PREWARM_TRICKLE_US:
        return &r->hot->prewarm_trickle_us;
    case SMOE_PREWARM_RUN:
        return &r->hot->prewarm_runs;
    case SMOE_PREWARM_STATE:
        return &r->hot->prewarm_state;
    case SMOE_PREWARM_DONE:
        return &r->hot->prewarm_done;
    case SMOE_PREWARM_GOAL:
        return &r->hot->prewarm_goal;
    default:
        return NULL;
    }
}

int64_t smoe_prewarm_get(const smoe_ring *r, int which) {
    if (r->fork_generation != fork_generation())
        return SMOE_EFORKED;
    _Atomic uint32_t *word = prewarm_word(r, which);
    return word ? (int64_t)atomic_load_explicit(word, memory_order_seq_cst) : -EINVAL;
}

int smoe_prewarm_set(smoe_ring *r, int which, uint32_t value) {
    if (r->fork_generation != fork_generation())
        return SMOE_EFORKED;
    _Atomic uint32_t *word = prewarm_word(r, which);
    if (!word || which == SMOE_PREWARM_BELL)
        return -EINVAL;
    if (which == SMOE_PREWARM_RUN)
        atomic_fetch_add_explicit(word, 1, memory_order_seq_cst);
    else
        atomic_store_explicit(word, value, memory_order_seq_cst);
    if (which < SMOE_PREWARM_STATE)
        prewarm_ring(r);
    return 0;
}

int smoe_prewarm_sleep(smoe_ring *r, uint32_t bell, uint32_t timeout_ms) {
    int rc = ring_check(r, NULL);
    return rc ? rc : plat_wait(&r->hot->prewarm_bell, bell, (uint64_t)timeout_ms * 1000000u);
}
