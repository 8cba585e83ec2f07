/* lru.c: exact least-recently-used order without scans of the ring, and two kinds of hint bits.
 *
 * Every acquire, claim and completed load stamps its slot with the next value of a shared tick.  The
 * victim is the evictable slot (READY or CONSUMED, no holder) with the smallest tick.  So that finding
 * it does not scan thousands of slots, each group of 64 slots has a bound: a value that none of its
 * ticks is below.  Two rules keep that exact without upkeep on the hot path; either alone fails:
 *
 *  - Ticks and bounds only ever rise (atomic maximum).  A process that drew its tick long ago cannot
 *    set a slot back under a bound.
 *  - A bound is the minimum over all slots of its group: held, loading and empty ones too.  One that
 *    left a held slot out would lie above it after its release.  Emptying leaves the tick.
 *
 * A slot that is in use and has its group's smallest tick would be met again at every search; it is
 * stamped anew, since it is in use now.  Ticks lie densely, eight a cache line, not beside the words.
 *
 * A request that is more than the ring can keep, a long prompt's, would throw out all that others use and in
 * the end itself.  The slots of what it has to read are therefore cold: they go before the smallest tick, in
 * the order of their numbers, so that such a request goes on in the few slots that it took first.  Whoever asks
 * for a cold expert again takes it into the order like any other.
 *
 * Hint bits, one word a group: `empties` finds an EMPTY slot, `colds` a cold one, `guesses` counts guesses that
 * are QUEUED or READING.  Of the first and the last the slot word decides; a bit is set after the word says so
 * and cleared after it no longer does, and whoever clears a bit looks at the word once more, so that a bit
 * cleared under somebody's fresh transition is set again.  A process killed in between leaves a bit too many,
 * which the next look corrects, or an EMPTY slot without its bit, which the search for a victim finds by its
 * tick.  That a slot is cold stands in its bit alone, and a kill may leave one wrong: then an expert is evicted
 * out of turn.
 */
#include "core.h"
#include "scan.h"

/* Ticks and bounds as they are stored: the tick, and below it which slot of its group or which group it is
 * of.  So minima alone find the smallest of many and say where it lies; no branch, no index beside. */
#define TICK_OF(stored)  ((stored) >> SMOE_SLOT_BITS)
#define BOUND_OF(stored) ((stored) >> SMOE_GROUP_BITS)
#define ROUNDS_A_SLOT    4u                    /* of a search, more than it ever takes */
#define NEVER            ((uint64_t)INT64_MAX) /* of what does not exist: never the smallest */

static uint64_t load(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void raise_to(_Atomic uint64_t *word, uint64_t value) {
    uint64_t seen = load(word);
    while (seen < value &&
           !atomic_compare_exchange_weak_explicit(word, &seen, value, memory_order_relaxed, memory_order_relaxed)) {
    }
}

void lru_init(smoe_ring *r) {
    for (uint32_t s = 0; s < r->n_groups * SMOE_GROUP; s++)
        atomic_store_explicit(&r->ticks[s], s < r->n_slots ? s % SMOE_GROUP : NEVER, memory_order_relaxed);
    for (uint32_t g = 0; g < SMOE_SPANS(r->n_groups) * SMOE_SPAN; g++)
        atomic_store_explicit(&r->bounds[g], g < r->n_groups ? g : NEVER, memory_order_relaxed);
    for (uint32_t s = 0; s < r->n_slots; s++)
        hint_empty(r, s);
}

uint64_t lru_tick(const smoe_ring *r, uint32_t s) {
    return TICK_OF(load(&r->ticks[s]));
}

uint64_t lru_bound(const smoe_ring *r, uint32_t group) {
    return BOUND_OF(load(&r->bounds[group]));
}

void lru_stamp(smoe_ring *r, uint32_t s) {
    uint64_t tick = atomic_fetch_add_explicit(&r->hot->tick, 1, memory_order_relaxed) + 1;
    FAILPOINT("stamp.drawn");
    raise_to(&r->ticks[s], tick << SMOE_SLOT_BITS | s % SMOE_GROUP);
}

/* Somebody asked for what the slot holds already. */
void lru_used(smoe_ring *r, uint32_t s) {
    hint_not_cold(r, s);
    lru_stamp(r, s);
}

/* The smallest tick of a group, as stored; refreshes the bound. */
static uint64_t oldest_of(smoe_ring *r, uint32_t group) {
    uint64_t oldest = least_of_64(&r->ticks[group * SMOE_GROUP]);
    raise_to(&r->bounds[group], TICK_OF(oldest) << SMOE_GROUP_BITS | group);
    return oldest;
}

static uint32_t smallest_span(const uint64_t *least, uint32_t n) {
    uint32_t span = 0;
    for (uint32_t i = 1; i < n; i++)
        span = least[i] < least[span] ? i : span;
    return span;
}

/* The evictable (or EMPTY) slot with the smallest tick, and its word as seen; -1: there is none.
 *
 * `least` is the search's own summary of the bounds, the smallest of each span.  Bounds only rise, so it may
 * lag.  Ends: each round either settles a group's minimum or stamps a slot in use above `start`, and a
 * bound above `start` means that everything older is in use.  With ticks and bounds that somebody wrote over neither
 * need be so: then it ends by counting. */
int lru_victim(smoe_ring *r, uint64_t *word) {
    uint64_t start = load(&r->hot->tick), best_tick = UINT64_MAX, least[SMOE_SPANS_MAX];
    uint32_t spans = SMOE_SPANS(r->n_groups);
    int best = -1;
    for (uint32_t i = 0; i < spans; i++)
        least[i] = least_of_64(&r->bounds[i * SMOE_SPAN]);
    for (uint32_t rounds = 0; rounds < ROUNDS_A_SLOT * (r->n_slots + r->n_groups); rounds++) {
        uint32_t span = smallest_span(least, spans);
        uint64_t bound = BOUND_OF(least[span]);
        uint32_t group = (uint32_t)(least[span] % (1u << SMOE_GROUP_BITS));
        if (bound >= best_tick || bound > start || group >= r->n_groups)
            return best;
        uint64_t oldest = oldest_of(r, group), tick = TICK_OF(oldest);
        if (tick <= start && tick < best_tick) {
            uint32_t s = group * SMOE_GROUP + (uint32_t)(oldest % SMOE_GROUP);
            if (s >= r->n_slots)
                return best;
            uint64_t w = slot_word(r, s);
            if (word_evictable(w) || WORD_STATE(w) == SMOE_EMPTY) {
                best = (int)s;
                best_tick = tick;
                *word = w;
            } else {
                lru_stamp(r, s);
            }
        }
        least[span] = least_of_64(&r->bounds[span * SMOE_SPAN]);
    }
    return best;
}

static void hint_set(_Atomic uint64_t *bits, uint32_t s) {
    atomic_fetch_or_explicit(&bits[s / SMOE_GROUP], 1ull << (s % SMOE_GROUP), memory_order_seq_cst);
}

static void hint_clear(_Atomic uint64_t *bits, uint32_t s) {
    atomic_fetch_and_explicit(&bits[s / SMOE_GROUP], ~(1ull << (s % SMOE_GROUP)), memory_order_seq_cst);
}

static bool hint_of(const _Atomic uint64_t *bits, uint32_t s) {
    return atomic_load_explicit(&bits[s / SMOE_GROUP], memory_order_relaxed) >> (s % SMOE_GROUP) & 1;
}

void hint_empty(smoe_ring *r, uint32_t s) {
    hint_set(r->empties, s);
}

void hint_not_empty(smoe_ring *r, uint32_t s) {
    if (!hint_of(r->empties, s))
        return;
    hint_clear(r->empties, s);
    FAILPOINT("hint.empty_cleared");
    if (WORD_STATE(slot_word(r, s)) == SMOE_EMPTY)
        hint_set(r->empties, s);
}

/* By who has taken the slot, before anybody can find its expert. */
void hint_cold(smoe_ring *r, uint32_t s) {
    hint_set(r->colds, s);
    FAILPOINT("hint.cold_set");
}

void hint_not_cold(smoe_ring *r, uint32_t s) {
    if (hint_of(r->colds, s))
        hint_clear(r->colds, s);
}

/* Is the slot what its hint says, and free to be taken?  *word: as seen. */
static bool is_empty(smoe_ring *r, uint32_t s, uint64_t *word) {
    *word = slot_word(r, s);
    if (WORD_STATE(*word) == SMOE_EMPTY)
        return true;
    hint_not_empty(r, s); /* it lies */
    return false;
}

static bool is_cold(smoe_ring *r, uint32_t s, uint64_t *word) {
    *word = slot_word(r, s);
    return word_evictable(*word);
}

/* The first slot that has a hint and `is` so, with its word; -1: there is none. */
static int first_of(smoe_ring *r, const _Atomic uint64_t *hints, bool (*is)(smoe_ring *, uint32_t, uint64_t *),
                    uint64_t *word) {
    for (uint32_t first = 0; first < r->n_groups; first += SMOE_SPAN) {
        if (!any_of_64(&hints[first])) /* most often there is none */
            continue;
        for (uint32_t g = first; g < first + SMOE_SPAN && g < r->n_groups; g++)
            for (uint64_t bits = atomic_load_explicit(&hints[g], memory_order_relaxed); bits; bits &= bits - 1) {
                uint32_t s = g * SMOE_GROUP + (uint32_t)__builtin_ctzll(bits);
                if (s < r->n_slots && is(r, s, word))
                    return (int)s;
            }
    }
    return -1;
}

/* An EMPTY slot, or -1. */
int lru_find_empty(smoe_ring *r) {
    uint64_t word;
    return first_of(r, r->empties, is_empty, &word);
}

/* A cold slot that is evictable, and its word as seen; or -1. */
int lru_find_cold(smoe_ring *r, uint64_t *word) {
    return first_of(r, r->colds, is_cold, word);
}

uint32_t guess_count(const smoe_ring *r) {
    uint32_t n = 0;
    for (uint32_t g = 0; g < r->n_groups; g++)
        n += (uint32_t)__builtin_popcountll(atomic_load_explicit(&r->guesses[g], memory_order_seq_cst));
    return n;
}

void guess_mark(smoe_ring *r, uint32_t s) {
    hint_set(r->guesses, s);
}

void guess_clear(smoe_ring *r, uint32_t s) {
    if (!hint_of(r->guesses, s))
        return;
    hint_clear(r->guesses, s);
    FAILPOINT("hint.guess_cleared");
    if (word_guess(slot_word(r, s)))
        hint_set(r->guesses, s);
}

/* May slot s become one more guess?  The bit is set first and counted with all others, so that of two
 * that would overstep the limit together at least one sees it.  On false the bit is cleared again. */
bool guess_admit(smoe_ring *r, uint32_t s) {
    hint_set(r->guesses, s);
    if (guess_count(r) <= r->guess_limit)
        return true;
    /* Bits of guesses that were promoted, taken or published by a process killed before it cleared them. */
    for (uint32_t g = 0; g < r->n_groups; g++)
        for (uint64_t bits = atomic_load_explicit(&r->guesses[g], memory_order_relaxed); bits; bits &= bits - 1) {
            uint32_t other = g * SMOE_GROUP + (uint32_t)__builtin_ctzll(bits);
            if (other != s && other < r->n_slots && !word_guess(slot_word(r, other)))
                guess_clear(r, other);
        }
    if (guess_count(r) <= r->guess_limit)
        return true;
    guess_clear(r, s);
    return false;
}

/* Are there more guesses than may be?  Asked by one whose slot's word says guess already.  The bits can miss
 * a guess for a moment (guess_clear puts a live one's back), or one that was admitted and had not yet taken
 * its slot; so near the limit the words are counted.  All who ask meet at one word after their own
 * compare-exchange, so that of two that overstep together at least one sees the other. */
bool guess_over(smoe_ring *r) {
    uint32_t n = 0;
    if (guess_count(r) + SMOE_CLIENTS <= r->guess_limit)
        return false;
    atomic_fetch_or_explicit(&r->guesses[0], 0, memory_order_seq_cst);
    for (uint32_t s = 0; s < r->n_slots; s++)
        n += word_guess(slot_word(r, s));
    return n > r->guess_limit;
}
