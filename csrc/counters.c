/* counters.c: what everybody counts, and that it adds up.
 *
 * Each participant has a row of counters in shared memory, and adds to no other.  A row stays when its owner
 * leaves or dies, and the next owner of the id adds to it further.  So sums over all rows hold for the ring's
 * whole life, and a reader needs no word of the dead.  What one client alone did is its row less its mark, the
 * row as it was when the client registered; the mark is what its forerunners did.
 *
 * What a call demands is counted once it has got it; a client killed inside a call leaves that call uncounted.
 *
 * A read is counted once, by whichever worker published it, also where a worker is killed between counting and
 * publishing.  The two are different words, so no order alone would do:
 *
 *   counters_add_read  the worker's mark: its row as it is without this read
 *                      publishing: the slot
 *                      the row: with this read, so that whoever sees the bytes sees it counted
 *   slot_publish       (or slot_fail)
 *   counters_confirm   publishing: none
 *
 * Who sweeps after a dead worker, and before the slot's word is touched, looks at `publishing`: is the slot READING
 * with the dead one's number still, then it was not published, and the row becomes what the mark says.  That may
 * be done twice, by a sweeper that takes over from a killed one.
 *
 * Demands and waits are counted by phase, as the calling thread says: prefill, decode, or unsaid.  The length of
 * waits and reads goes into buckets that double in width, one addition each; a hit asks no clock.
 */
#include "core.h"

#include <errno.h>
#include <string.h>

/* A worker uses the first phase's words alone, for its reads. */
#define WORKER_WORDS (SMOE_COUNTER_WORDS + SMOE_PHASE_WORDS)

_Static_assert(SMOE_PHASES == SMOE_PHASE_COUNT && SMOE_BUCKETS == SMOE_BUCKET_COUNT &&
                   SMOE_PHASED == (int)SMOE_C_PHASED,
               "");
#define ROOM(field) (sizeof(((smoe_tally *)0)->field) / sizeof(((smoe_tally *)0)->field[0]))
_Static_assert(ROOM(counters) >= SMOE_COUNTERS && ROOM(phases) >= SMOE_PHASES && ROOM(phases[0]) >= SMOE_PHASED &&
                   ROOM(waits) >= SMOE_PHASES && ROOM(waits[0]) >= SMOE_BUCKETS && ROOM(reads) >= SMOE_BUCKETS,
               "a caller's smoe_tally is not changed: docs/embedding.md");

_Thread_local uint32_t thread_phase;

int smoe_phase(int phase) {
    if (phase < 0 || phase >= SMOE_PHASES)
        return -EINVAL;
    int before = (int)thread_phase;
    thread_phase = (uint32_t)phase;
    return before;
}

static uint64_t value(const _Atomic uint64_t *row, uint32_t word) {
    return atomic_load_explicit(&row[word], memory_order_acquire); /* C2 */
}

static void copy(_Atomic uint64_t *to, const _Atomic uint64_t *from, uint32_t words) {
    for (uint32_t i = 0; i < words; i++)
        atomic_store_explicit(&to[i], value(from, i), memory_order_release); /* C1 */
}

/* Which bucket a length belongs to: the first whose bound, 2^b us, is not below it. */
uint32_t counters_bucket(uint64_t ns) {
    uint64_t us = ns / 1000 + (ns % 1000 != 0);
    uint32_t bucket = us <= 1 ? 0 : 64u - (uint32_t)__builtin_clzll(us - 1);
    return bucket < SMOE_BUCKET_COUNT ? bucket : SMOE_BUCKET_COUNT - 1;
}

/* A client registers: what stands in the row is its forerunners'. */
void counters_begin(smoe_ring *r) {
    copy(r->marks[r->id], r->counters[r->id], SMOE_COUNTER_ROW);
}

void counters_add_read(smoe_ring *r, uint32_t s, const struct counted *c, uint32_t n, uint64_t ns) {
    copy(r->marks[r->id], r->counters[r->id], WORKER_WORDS);
    atomic_store_explicit(&r->participants[r->id].publishing, s + 1, memory_order_release);
    FAILPOINT("count.marked");
    for (uint32_t i = 0; i < n; i++)
        count(r, c[i].counter, c[i].n);
    count(r, phase_word(0, SMOE_BUCKET_WORD + counters_bucket(ns)), 1);
    FAILPOINT("count.added");
}

void counters_confirm(smoe_ring *r) {
    atomic_store_explicit(&r->participants[r->id].publishing, 0, memory_order_release);
}

/* The worker is dead; its slot's word is as it left it. */
void counters_recover(smoe_ring *r, uint32_t worker) {
    uint32_t id = SMOE_ID_WORKER + worker;
    uint32_t s = atomic_load_explicit(&r->participants[id].publishing, memory_order_acquire) - 1;
    if (s >= r->n_slots)
        return;
    uint64_t w = slot_word(r, s);
    if (WORD_STATE(w) == SMOE_READING && WORD_WORKER(w) == worker)
        copy(r->counters[id], r->marks[id], WORKER_WORDS);
    FAILPOINT("recover.counted");
    atomic_store_explicit(&r->participants[id].publishing, 0, memory_order_release);
}

/* --- reading ------------------------------------------------------------------------------------------ */

/* Add a row to what is there; with sign -1 take it away. */
static void add_row(smoe_tally *t, const _Atomic uint64_t *row, bool worker, uint64_t sign) {
    for (uint32_t c = SMOE_C_PHASED; c < SMOE_COUNTERS; c++)
        t->counters[c] += sign * value(row, c);
    for (uint32_t p = 0; p < SMOE_PHASES; p++) {
        for (uint32_t c = 0; c < SMOE_C_PHASED; c++) {
            t->phases[p][c] += sign * value(row, phase_word(p, c));
            t->counters[c] += sign * value(row, phase_word(p, c));
        }
        for (uint32_t b = 0; b < SMOE_BUCKETS && (p == 0 || !worker); b++)
            (worker ? t->reads : t->waits[p])[b] += sign * value(row, phase_word(p, SMOE_BUCKET_WORD + b));
    }
}

static bool is_worker(uint32_t id) {
    return id >= SMOE_ID_WORKER && id < SMOE_ID_SUPERVISOR;
}

static int add_id(const smoe_ring *r, uint32_t id, int whose, smoe_tally *t) {
    const _Atomic uint32_t *generation = &r->participants[id].generation;
    uint32_t seen = atomic_load_explicit(generation, memory_order_acquire);
    bool present = seen & 1;
    if (whose == SMOE_OF_PRESENT && !present)
        return -ENOENT;
    add_row(t, r->counters[id], is_worker(id), whose == SMOE_OF_FORMER && present ? 0 : 1);
    if (whose != SMOE_OF_ALL && present)
        add_row(t, r->marks[id], false, whose == SMOE_OF_FORMER ? 1 : UINT64_MAX);
    /* C1/C2: who has seen a word of the next owner's mark sees its generation, too. */
    return whose == SMOE_OF_ALL || atomic_load_explicit(generation, memory_order_relaxed) == seen ? 0 : -ENOENT;
}

int smoe_get_tally(const smoe_ring *r, int id, int whose, smoe_tally *out) {
    if (r->fork_generation != fork_generation())
        return SMOE_EFORKED;
    if (whose == SMOE_OF_ALL ? id < -1 || id >= (int)SMOE_PARTICIPANTS : id < 0 || id >= (int)SMOE_CLIENTS)
        return -EINVAL;
    memset(out, 0, sizeof *out);
    if (id >= 0)
        return add_id(r, (uint32_t)id, whose, out);
    for (uint32_t i = 0; i < SMOE_PARTICIPANTS; i++)
        add_id(r, i, SMOE_OF_ALL, out);
    return 0;
}

uint64_t smoe_counter_value(const smoe_ring *r, uint32_t counter, int id) {
    smoe_tally t;
    return counter < SMOE_COUNTERS && smoe_get_tally(r, id, 0, &t) == 0 ? t.counters[counter] : 0;
}

const char *smoe_counter_name(uint32_t counter) {
    static const char *const names[SMOE_COUNTERS] = {
        [SMOE_C_HITS] = "hits",
        [SMOE_C_JOINS] = "joins",
        [SMOE_C_PROMOTED] = "promoted",
        [SMOE_C_MISSES] = "misses",
        [SMOE_C_WAITS] = "waits",
        [SMOE_C_WAIT_NS] = "wait_ns",
        [SMOE_C_GUESS_HITS] = "guess_hits",
        [SMOE_C_GUESS_USED_BYTES] = "guess_used_bytes",
        [SMOE_C_GUESSES] = "guesses",
        [SMOE_C_GUESS_DROPS] = "guess_drops",
        [SMOE_C_GUESS_DISPLACED] = "guess_displaced",
        [SMOE_C_EVICTIONS] = "evictions",
        [SMOE_C_GUESS_WASTED] = "guess_wasted",
        [SMOE_C_GUESS_WASTED_BYTES] = "guess_wasted_bytes",
        [SMOE_C_CLAIMS] = "claims",
        [SMOE_C_RELEASES] = "releases",
        [SMOE_C_BUSY_WAITS] = "busy_waits",
        [SMOE_C_READ_ERRORS] = "read_errors",
        [SMOE_C_TIMEOUTS] = "timeouts",
        [SMOE_C_READS] = "reads",
        [SMOE_C_WANTED_BYTES] = "wanted_bytes",
        [SMOE_C_DEVICE_BYTES] = "device_bytes",
        [SMOE_C_READ_NS] = "read_ns",
        [SMOE_C_SKIPS] = "skips",
        [SMOE_C_POPS_DEMAND] = "pops_demand",
        [SMOE_C_POPS_SPECULATIVE] = "pops_speculative",
        [SMOE_C_SHORT_READS] = "short_reads",
        [SMOE_C_FAILED_READS] = "failed_reads",
        [SMOE_C_FALLBACKS] = "fallbacks",
        [SMOE_C_CHECKED] = "checked_reads",
        [SMOE_C_BAD_SUMS] = "checksum_errors",
        [SMOE_C_REQUEUED] = "requeued",
    };
    return counter < SMOE_COUNTERS ? names[counter] : NULL;
}
