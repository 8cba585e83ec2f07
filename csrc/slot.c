/* slot.c: the slot's state machine.  No other file writes a slot word.
 *
 *            demand / speculate          worker pops           bytes are in
 *     EMPTY ──────────────────► QUEUED ─────────────► READING ─────────────► READY ──claim──► CONSUMED
 *       ▲                        ▲ ▲ ▲                 │   │                   │                 │
 *       │                        │ │ └─ worker died ◄──┘   │ read failed       │ released: retained,
 *       │ last holder has        │ │                       ▼                   │ still claimable
 *       └─ seen the error ───────┼─┼──── next demand ◄── FAILED                │                 │
 *                                │ └───────────────────────────────────────────┴─────────────────┘
 *                                │     evicted: idle (no holder) and least recently used
 *                                └──── a queued read that nobody holds gives its slot to a demand
 *
 *   function         from                      to                         who
 *   slot_join        QUEUED, READING           same + bit, not a guess    client
 *                    READY, CONSUMED           CONSUMED + bit             client
 *                    FAILED                    QUEUED + bit               client
 *   slot_claim       READY, CONSUMED           CONSUMED + bit             client
 *   slot_take        EMPTY, idle READY or      QUEUED, new expert, own    client, prewarm
 *                    CONSUMED, unheld QUEUED   bit or speculative
 *   slot_give_back   QUEUED exactly as taken   EMPTY                      its taker
 *   slot_drop        any + bit                 same - bit                 client, recovery
 *                    FAILED + bit alone        EMPTY                      client, recovery
 *   slot_start       QUEUED                    READING + worker           worker
 *   slot_publish     READING + worker          READY, or CONSUMED if held worker
 *   slot_fail        READING + worker          FAILED if held, else EMPTY worker, recovery
 *   slot_requeue     READING + dead worker     QUEUED                     recovery
 *   slot_give_up     QUEUED                    FAILED if held, else EMPTY recovery, with no worker left
 *
 * All that decides who may touch a slot is in the one word, so each transition is one compare-exchange
 * and a process killed at any instruction leaves no half of one.  The low half is the futex word; every
 * change of state alters it.  Wakes are unconditional: a count of sleepers would leak at a kill.
 */
#include "core.h"

static bool cas(smoe_ring *r, uint32_t s, uint64_t *seen, uint64_t next) {
    /* T1, T2; also P1, since a release is part of it. */
    return atomic_compare_exchange_strong_explicit(&r->words[s], seen, next, memory_order_acq_rel,
                                                   memory_order_acquire);
}

/* Add the holder bit if the slot is the expert's.  *before: the word that was replaced. */
enum slot_join slot_join(smoe_ring *r, uint32_t s, uint32_t expert, uint64_t bit, uint64_t *before) {
    uint64_t w = slot_word(r, s);
    for (;;) {
        *before = w;
        if (WORD_STATE(w) == SMOE_EMPTY || WORD_EXPERT(w) != expert)
            return JOIN_NO;
        uint64_t holders = WORD_HOLDERS(w) | bit;
        switch (WORD_STATE(w)) {
        case SMOE_QUEUED:
        case SMOE_READING:
            if (cas(r, s, &w, (w & ~WORD_SPECULATIVE) | bit))
                return *before & WORD_SPECULATIVE ? JOIN_PROMOTED : JOIN_LOADING;
            break;
        case SMOE_READY:
        case SMOE_CONSUMED:
            if (cas(r, s, &w, word_make(SMOE_CONSUMED, 0, 0, expert, holders)))
                return JOIN_HIT;
            break;
        case SMOE_FAILED:
            if (cas(r, s, &w, word_make(SMOE_QUEUED, 0, 0, expert, holders)))
                return JOIN_RETRY;
            break;
        default:
            return JOIN_NO;
        }
    }
}

/* The non-blocking poll's half of slot_join: only a resident slot is taken. */
bool slot_claim(smoe_ring *r, uint32_t s, uint32_t expert, uint64_t bit, uint64_t *before) {
    uint64_t w = slot_word(r, s);
    for (;;) {
        *before = w;
        if (!word_resident(w) || WORD_EXPERT(w) != expert)
            return false;
        if (cas(r, s, &w, word_make(SMOE_CONSUMED, 0, 0, expert, WORD_HOLDERS(w) | bit)))
            return true;
    }
}

/* Take the slot, seen as `seen`, for another expert.  The caller has seen that it may be taken. */
bool slot_take(smoe_ring *r, uint32_t s, uint64_t seen, uint32_t expert, uint64_t speculative, uint64_t bit) {
    if (!cas(r, s, &seen, word_make(SMOE_QUEUED, speculative, 0, expert, bit)))
        return false;
    FAILPOINT("take.word");
    atomic_store_explicit(&r->slots[s].kills, 0, memory_order_relaxed);
    return true;
}

/* Undo slot_take, if nobody has joined, popped or promoted it since. */
bool slot_give_back(smoe_ring *r, uint32_t s, uint32_t expert, uint64_t speculative, uint64_t bit) {
    uint64_t w = word_make(SMOE_QUEUED, speculative, 0, expert, bit);
    if (!cas(r, s, &w, 0))
        return false;
    FAILPOINT("giveback.word");
    plat_wake(slot_futex(r, s), 0);
    return true;
}

/* Clear a holder bit; the last one of a FAILED slot empties it. */
void slot_drop(smoe_ring *r, uint32_t s, uint64_t bit) {
    uint64_t w = slot_word(r, s);
    while (w & bit) {
        if (WORD_STATE(w) == SMOE_FAILED && WORD_HOLDERS(w) == bit) {
            if (cas(r, s, &w, 0)) {
                FAILPOINT("drop.emptied");
                plat_wake(slot_futex(r, s), 0);
                hint_empty(r, s);
                return;
            }
        } else if (cas(r, s, &w, w & ~bit)) {
            return;
        }
    }
}

/* A worker takes a popped slot.  False: the entry was a stale hint.  *word: as it is now. */
bool slot_start(smoe_ring *r, uint32_t s, uint32_t worker, uint64_t *word) {
    uint64_t w = slot_word(r, s);
    while (WORD_STATE(w) == SMOE_QUEUED) {
        *word = word_make(SMOE_READING, w & WORD_SPECULATIVE, worker, WORD_EXPERT(w), WORD_HOLDERS(w));
        if (cas(r, s, &w, *word))
            return true;
    }
    return false;
}

/* Tell the holders, as seen in the word that was replaced.  A client that joins after that CAS finds
 * the new state by itself, so nobody is missed. */
static void wake_holders(smoe_ring *r, uint32_t s, uint64_t before) {
    plat_wake(slot_futex(r, s), 0);
    FAILPOINT("wake.slot");
    for (uint32_t c = 0; c < SMOE_CLIENTS; c++)
        if (before & HOLDER_BIT(c)) {
            atomic_fetch_add_explicit(&r->participants[c].landed, 1, memory_order_release);
            plat_wake(&r->participants[c].landed, 0);
        }
}

/* The bytes are in.  A slot that is READING with this worker's number changes under nobody else's hand
 * but in its holders and its guess bit. */
void slot_publish(smoe_ring *r, uint32_t s, uint32_t worker) {
    uint64_t w = slot_word(r, s), next;
    do {
        if (WORD_STATE(w) != SMOE_READING || WORD_WORKER(w) != worker)
            return;
        uint64_t holders = WORD_HOLDERS(w);
        next = word_make(holders ? SMOE_CONSUMED : SMOE_READY, w & WORD_SPECULATIVE, 0, WORD_EXPERT(w), holders);
    } while (!cas(r, s, &w, next)); /* P1 */
    FAILPOINT("publish.word");
    wake_holders(r, s, w);
}

/* What waiters will be told; written by whoever owns the slot, before the word says FAILED.
 *
 * The record is a sequence lock, since a waiter may still read it when the next demand has had the read
 * tried again.  No fences: each field is stored with release and loaded with acquire, so whoever sees a new
 * field sees the odd sequence before it. */
void slot_error_set(smoe_ring *r, uint32_t s, int error, uint32_t file, uint64_t offset, uint64_t wanted,
                    uint64_t got) {
    struct smoe_slot *slot = &r->slots[s];
    uint32_t sequence = atomic_load_explicit(&slot->error_sequence, memory_order_relaxed) | 1;
    atomic_store_explicit(&slot->error_sequence, sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->error, error, memory_order_release);
    FAILPOINT("error.begun");
    atomic_store_explicit(&slot->error_file, file, memory_order_release);
    atomic_store_explicit(&slot->error_offset, offset, memory_order_release);
    atomic_store_explicit(&slot->error_wanted, wanted, memory_order_release);
    atomic_store_explicit(&slot->error_got, got, memory_order_release);
    atomic_store_explicit(&slot->error_sequence, sequence + 1, memory_order_release);
}

/* Read the record; false: it is being written anew. */
bool slot_error(const smoe_ring *r, uint32_t s, smoe_error *e) {
    const struct smoe_slot *slot = &r->slots[s];
    uint32_t sequence = atomic_load_explicit(&slot->error_sequence, memory_order_acquire);
    fail(e, SMOE_EREAD, "read", atomic_load_explicit(&slot->error, memory_order_acquire),
         atomic_load_explicit(&slot->error_wanted, memory_order_acquire),
         atomic_load_explicit(&slot->error_got, memory_order_acquire));
    e->file = atomic_load_explicit(&slot->error_file, memory_order_acquire);
    e->offset = atomic_load_explicit(&slot->error_offset, memory_order_acquire);
    return !(sequence & 1) && atomic_load_explicit(&slot->error_sequence, memory_order_relaxed) == sequence;
}

/* The read failed; the error stands in the slot.  Its holders have to see it; without any the slot is
 * free at once. */
void slot_fail(smoe_ring *r, uint32_t s, uint32_t worker) {
    uint64_t w = slot_word(r, s), next;
    do {
        if (WORD_STATE(w) != SMOE_READING || WORD_WORKER(w) != worker)
            return;
        next = WORD_HOLDERS(w) ? word_make(SMOE_FAILED, 0, 0, WORD_EXPERT(w), WORD_HOLDERS(w)) : 0;
    } while (!cas(r, s, &w, next)); /* P1 */
    FAILPOINT("fail.word");
    if (next == 0)
        hint_empty(r, s);
    wake_holders(r, s, w);
}

/* The slot's worker died: its read is to be done again. */
bool slot_requeue(smoe_ring *r, uint32_t s, uint32_t worker) {
    uint64_t w = slot_word(r, s);
    while (WORD_STATE(w) == SMOE_READING && WORD_WORKER(w) == worker)
        if (cas(r, s, &w, word_make(SMOE_QUEUED, w & WORD_SPECULATIVE, 0, WORD_EXPERT(w), WORD_HOLDERS(w))))
            return true;
    return false;
}

/* Nobody will read the slot; the error stands in it.  Only while no worker lives. */
bool slot_give_up(smoe_ring *r, uint32_t s) {
    uint64_t w = slot_word(r, s);
    while (WORD_STATE(w) == SMOE_QUEUED) {
        uint64_t next = WORD_HOLDERS(w) ? word_make(SMOE_FAILED, 0, 0, WORD_EXPERT(w), WORD_HOLDERS(w)) : 0;
        uint64_t before = w;
        if (!cas(r, s, &w, next)) /* P1 */
            continue;
        FAILPOINT("giveup.word");
        if (next == 0)
            hint_empty(r, s);
        wake_holders(r, s, before);
        return true;
    }
    return false;
}
