/* test_lru.c: the search for a victim against brute force, its two rules, and the hint bits. */
#include "core.h"
#include "scan.h"
#include "test.h"

#include <stdlib.h>
#include <string.h>

/* A ring of nothing but words, ticks and hints. */
struct fixture {
    smoe_ring r;
    void *lines; /* of hot and slots, which want their alignment */
};

static const uint64_t RESIDENT = SMOE_READY, HELD = SMOE_CONSUMED | 1ull << 32;

static void open_fixture(struct fixture *f, uint32_t slots) {
    memset(f, 0, sizeof *f);
    smoe_ring *r = &f->r;
    size_t bytes = sizeof(struct smoe_hot) + slots * sizeof(struct smoe_slot);
    bytes = (bytes + SMOE_LINE - 1) / SMOE_LINE * SMOE_LINE;
    f->lines = aligned_alloc(SMOE_LINE, bytes);
    memset(f->lines, 0, bytes);
    r->hot = f->lines;
    r->slots = (struct smoe_slot *)((char *)f->lines + sizeof(struct smoe_hot));
    r->n_slots = slots;
    r->n_groups = (slots + SMOE_GROUP - 1) / SMOE_GROUP;
    r->guess_limit = slots / 4;
    r->words = calloc(slots, sizeof *r->words);
    r->ticks = calloc(r->n_groups * SMOE_GROUP, sizeof *r->ticks);
    uint32_t words = SMOE_SPANS(r->n_groups) * SMOE_SPAN;
    r->bounds = calloc(words, sizeof *r->bounds);
    r->empties = calloc(words, sizeof *r->empties);
    r->guesses = calloc(words, sizeof *r->guesses);
    r->colds = calloc(words, sizeof *r->colds);
    lru_init(r);
    for (uint32_t g = 0; g < words; g++)
        r->empties[g] = 0; /* as if killed before they were set: the search finds such slots by their ticks */
}

static void close_fixture(struct fixture *f) {
    free(f->lines);
    free((void *)f->r.words);
    free((void *)f->r.ticks);
    free((void *)f->r.bounds);
    free((void *)f->r.empties);
    free((void *)f->r.guesses);
    free((void *)f->r.colds);
}

static void set_word(smoe_ring *r, uint32_t s, uint64_t word) {
    atomic_store(&r->words[s], word);
}

static bool may_go(uint64_t w) {
    return WORD_HOLDERS(w) == 0 &&
           (WORD_STATE(w) == SMOE_READY || WORD_STATE(w) == SMOE_CONSUMED || WORD_STATE(w) == SMOE_EMPTY);
}

/* Smallest tick among the slots that may be taken; UINT64_MAX: there is none. */
static uint64_t brute_force(const smoe_ring *r) {
    uint64_t least = UINT64_MAX;
    for (uint32_t s = 0; s < r->n_slots; s++)
        if (may_go(slot_word(r, s)) && lru_tick(r, s) < least)
            least = lru_tick(r, s);
    return least;
}

/* The search's answer, checked. */
static int victim(smoe_ring *r) {
    uint64_t least = brute_force(r), word = 0;
    int s = lru_victim(r, &word);
    if (least == UINT64_MAX) {
        CHECK_EQ(s, -1);
    } else if (s < 0 || s >= (int)r->n_slots) {
        CHECK(!"a victim");
    } else {
        CHECK_EQ(lru_tick(r, s), least);
        CHECK_EQ(word, slot_word(r, (uint32_t)s));
    }
    return s;
}

static void random_step(smoe_ring *r, uint64_t *seed) {
    static const uint64_t words[] = {
        0,
        SMOE_READY,
        SMOE_READY | WORD_SPECULATIVE,
        SMOE_CONSUMED,
        SMOE_CONSUMED | 1ull << 32,
        SMOE_CONSUMED | 9ull << 40,
        SMOE_QUEUED | WORD_SPECULATIVE,
        SMOE_QUEUED | 1ull << 63,
        SMOE_READING | 1ull << 32,
        SMOE_FAILED | 1ull << 32,
    };
    uint32_t s = random_below(seed, r->n_slots);
    if (random_below(seed, 2))
        set_word(r, s, words[random_below(seed, sizeof words / sizeof *words)]);
    else
        lru_stamp(r, s);
    if (random_below(seed, 4) == 0) {
        int gone = victim(r);
        if (gone >= 0 && random_below(seed, 2)) { /* taken for something new */
            set_word(r, (uint32_t)gone, SMOE_QUEUED | 1ull << 32);
            lru_stamp(r, (uint32_t)gone);
        }
    }
}

static void test_brute_force(void) {
    static const uint32_t sizes[] = {1, 2, 63, 64, 65, 1000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (uint64_t seed = 1; seed < 6; seed++) {
            struct fixture f;
            uint64_t state = seed * 1000 + i;
            open_fixture(&f, sizes[i]);
            for (int step = 0; step < 4000; step++)
                random_step(&f.r, &state);
            close_fixture(&f);
        }
}

static void test_nothing_to_take(void) {
    struct fixture f;
    open_fixture(&f, 130);
    for (uint32_t s = 0; s < 130; s++) {
        set_word(&f.r, s, HELD);
        lru_stamp(&f.r, s);
    }
    for (int i = 0; i < 3; i++)
        CHECK_EQ(victim(&f.r), -1);
    set_word(&f.r, 77, SMOE_CONSUMED); /* released: found at once, whatever the bounds have become */
    CHECK_EQ(victim(&f.r), 77);
    close_fixture(&f);
}

/* Rule: a bound is the minimum over held slots too.  Slot 1 is held and old while its group's bound is
 * refreshed; released, it has to be found again.  Slot 64 is of another group and in between. */
static void test_held_slot_released_later(void) {
    struct fixture f;
    open_fixture(&f, 128);
    smoe_ring *r = &f.r;
    for (uint32_t s = 0; s < 128; s++)
        set_word(r, s, HELD);
    const uint32_t order[] = {0, 1, 64, 2, 65};
    for (int i = 0; i < 5; i++)
        lru_stamp(r, order[i]);
    for (uint32_t s = 0; s < 128; s++)
        if (lru_tick(r, s) == 0)
            lru_stamp(r, s);
    set_word(r, 0, RESIDENT);
    set_word(r, 64, RESIDENT);
    set_word(r, 2, RESIDENT);
    CHECK_EQ(victim(r), 0);
    set_word(r, 0, HELD);
    lru_stamp(r, 0);
    CHECK_EQ(victim(r), 64); /* refreshes the bound of slot 1's group, while slot 1 is held */
    set_word(r, 1, RESIDENT);
    for (int round = 0; round < 4; round++) { /* compares with brute force */
        int s = victim(r);
        REQUIRE(s >= 0);
        lru_stamp(r, (uint32_t)s);
    }
    close_fixture(&f);
}

/* The same where the held slot is the minimum: it is stamped anew, and its bound must not pass it. */
static void test_held_minimum(void) {
    struct fixture f;
    open_fixture(&f, 128);
    smoe_ring *r = &f.r;
    for (uint32_t s = 0; s < 128; s++) {
        set_word(r, s, s == 0 ? HELD : RESIDENT);
        lru_stamp(r, s);
    }
    for (int round = 0; round < 300; round++) {
        int s = victim(r); /* compares with brute force */
        REQUIRE(s > 0);
        lru_stamp(r, (uint32_t)s);
    }
    set_word(r, 0, RESIDENT);
    for (int round = 0; round < 300; round++) {
        int s = victim(r);
        REQUIRE(s >= 0);
        lru_stamp(r, (uint32_t)s);
    }
    close_fixture(&f);
}

/* Rule: ticks only rise.  A process that drew its tick long ago stamps now; its slot must not fall below
 * the bound that has been refreshed since. */
static void test_late_stamp(void) {
    struct fixture f;
    open_fixture(&f, 128);
    smoe_ring *r = &f.r;
    for (uint32_t s = 0; s < 128; s++) {
        set_word(r, s, RESIDENT);
        lru_stamp(r, s);
    }
    uint64_t drawn = 3; /* by a process that is stopped before it stamps slot 5 */
    for (uint32_t s = 0; s < 64; s++)
        lru_stamp(r, s);
    set_word(r, 64, HELD);
    CHECK_EQ(victim(r), 65);
    for (uint32_t s = 64; s < 128; s++)
        lru_stamp(r, s);
    CHECK_EQ(victim(r), 0); /* both bounds are fresh */
    uint64_t now = atomic_load(&r->hot->tick), before = lru_tick(r, 5);
    atomic_store(&r->hot->tick, drawn - 1);
    lru_stamp(r, 5);
    atomic_store(&r->hot->tick, now);
    CHECK_EQ(lru_tick(r, 5), before);
    for (int round = 0; round < 200; round++) {
        int s = victim(r);
        REQUIRE(s >= 0);
        lru_stamp(r, (uint32_t)s);
    }
    close_fixture(&f);
}

static void test_bounds_are_bounds(void) {
    struct fixture f;
    uint64_t seed = 42;
    open_fixture(&f, 200);
    for (int step = 0; step < 20000; step++) {
        random_step(&f.r, &seed);
        for (uint32_t s = 0; s < 200; s++)
            CHECK(lru_bound(&f.r, s / SMOE_GROUP) <= lru_tick(&f.r, s));
    }
    close_fixture(&f);
}

/* --- hint bits -------------------------------------------------------------------------------------- */

static bool empty_bit(const smoe_ring *r, uint32_t s) {
    return atomic_load(&r->empties[s / SMOE_GROUP]) >> (s % SMOE_GROUP) & 1;
}

static void test_find_empty(void) {
    struct fixture f;
    open_fixture(&f, 70);
    smoe_ring *r = &f.r;
    for (uint32_t s = 0; s < 70; s++) {
        set_word(r, s, RESIDENT);
        lru_stamp(r, s);
    }
    CHECK_EQ(lru_find_empty(r), -1);
    set_word(r, 66, 0);
    hint_empty(r, 66);
    CHECK_EQ(lru_find_empty(r), 66);
    hint_not_empty(r, 66); /* the word says otherwise: the bit has to come back */
    CHECK(empty_bit(r, 66));
    hint_empty(r, 3); /* a bit too many, as a killed process leaves it: skipped and cleared */
    CHECK_EQ(lru_find_empty(r), 66);
    CHECK(!empty_bit(r, 3));
    set_word(r, 66, RESIDENT);
    hint_not_empty(r, 66);
    CHECK(!empty_bit(r, 66));
    hint_empty(r, 100); /* no such slot */
    CHECK_EQ(lru_find_empty(r), -1);
    set_word(r, 7, 0); /* a bit too few: the search for a victim finds it when it is oldest */
    for (uint32_t s = 0; s < 70; s++)
        if (s != 7)
            lru_stamp(r, s);
    CHECK_EQ(lru_find_empty(r), -1);
    CHECK_EQ(victim(r), 7);
    close_fixture(&f);
}

static void test_find_cold(void) {
    struct fixture f;
    uint64_t word;
    open_fixture(&f, 200);
    smoe_ring *r = &f.r;
    for (uint32_t s = 0; s < 200; s++) {
        set_word(r, s, RESIDENT);
        lru_stamp(r, s);
    }
    CHECK_EQ(lru_find_cold(r, &word), -1);
    hint_cold(r, 150);
    hint_cold(r, 70);
    hint_cold(r, 69);
    CHECK_EQ(lru_find_cold(r, &word), 69);
    CHECK_EQ(word, RESIDENT);
    set_word(r, 69, HELD); /* passed over, and found again when it is released */
    set_word(r, 70, SMOE_QUEUED | 1ull << 32);
    CHECK_EQ(lru_find_cold(r, &word), 150);
    set_word(r, 150, 0); /* emptied: there are others for that */
    CHECK_EQ(lru_find_cold(r, &word), -1);
    set_word(r, 69, SMOE_CONSUMED);
    CHECK_EQ(lru_find_cold(r, &word), 69);
    CHECK_EQ(word, SMOE_CONSUMED);
    uint64_t before = lru_tick(r, 69);
    lru_used(r, 69);
    CHECK_EQ(lru_find_cold(r, &word), -1);
    CHECK(lru_tick(r, 69) > before);
    CHECK_EQ(victim(r), 0); /* the order of the ticks is as it was */
    close_fixture(&f);
}

static void test_guess_limit(void) {
    struct fixture f;
    open_fixture(&f, 130); /* limit 32 */
    smoe_ring *r = &f.r;
    for (uint32_t s = 0; s < 32; s++) {
        CHECK(guess_admit(r, s));
        set_word(r, s, (s % 2 ? SMOE_QUEUED : SMOE_READING) | WORD_SPECULATIVE);
    }
    CHECK(!guess_admit(r, 100));
    CHECK_EQ(guess_count(r), 32);
    set_word(r, 9, SMOE_READY | WORD_SPECULATIVE); /* landed; its worker was killed before it cleared the bit */
    CHECK(guess_admit(r, 100));
    set_word(r, 100, SMOE_QUEUED | WORD_SPECULATIVE);
    CHECK_EQ(guess_count(r), 32);
    guess_clear(r, 100); /* the word says otherwise: the bit has to come back */
    CHECK_EQ(guess_count(r), 32);
    CHECK(!guess_admit(r, 101));
    close_fixture(&f);
}

/* Vectors and single words see the same, wherever the smallest or the only one lies. */
static void test_scans(void) {
    _Atomic uint64_t *words = aligned_alloc(SMOE_LINE, 64 * sizeof *words);
    uint64_t seed = 7;
    for (uint32_t at = 0; at < 64; at++) {
        for (uint32_t i = 0; i < 64; i++)
            atomic_store(&words[i], INT64_MAX - random_below(&seed, 1000));
        atomic_store(&words[at], (uint64_t)at << (at % 57));
        CHECK_EQ(least_of_64(words), (uint64_t)at << (at % 57));
        CHECK_EQ(least_of_64_plain(words), (uint64_t)at << (at % 57));
        for (uint32_t i = 0; i < 64; i++)
            atomic_store(&words[i], 0);
        CHECK(!any_of_64(words) && !any_of_64_plain(words));
        atomic_store(&words[at], 1ull << at);
        CHECK(any_of_64(words) && any_of_64_plain(words));
    }
    for (uint32_t i = 0; i < 64; i++)
        atomic_store(&words[i], (uint64_t)INT64_MAX);
    CHECK_EQ(least_of_64(words), (uint64_t)INT64_MAX);
    CHECK_EQ(least_of_64_plain(words), (uint64_t)INT64_MAX);
    free((void *)words);
}

/* Ticks and bounds that name other slots and groups than their own: the search ends, and finds a slot or none. */
static void test_written_over(void) {
    struct fixture f;
    uint64_t seed = 9;
    open_fixture(&f, 200);
    for (uint32_t turn = 0; turn < 500; turn++) {
        uint64_t word = 0;
        for (uint32_t s = 0; s < 200; s++)
            set_word(&f.r, s, random_below(&seed, 2) ? RESIDENT : HELD);
        for (uint32_t i = 0; i < f.r.n_groups * SMOE_GROUP; i++)
            atomic_store(&f.r.ticks[i], turn % 2 ? random_next(&seed) >> random_below(&seed, 64) : 5);
        for (uint32_t g = 0; g < SMOE_SPAN; g++)
            atomic_store(&f.r.bounds[g], turn % 3 ? random_next(&seed) >> random_below(&seed, 64) : 1);
        atomic_store(&f.r.hot->tick, turn % 4 ? UINT64_MAX : random_next(&seed));
        int s = lru_victim(&f.r, &word);
        CHECK(s >= -1 && s < 200);
    }
    close_fixture(&f);
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"victim against brute force", test_brute_force},
        {"nothing to take", test_nothing_to_take},
        {"a held slot is released later", test_held_slot_released_later},
        {"a held slot is the minimum", test_held_minimum},
        {"a late stamp with an old tick", test_late_stamp},
        {"bounds are bounds", test_bounds_are_bounds},
        {"empty slots and their hints", test_find_empty},
        {"cold slots and their hints", test_find_cold},
        {"limit of guesses", test_guess_limit},
        {"ticks and bounds that somebody wrote over", test_written_over},
        {"scans of 64 words", test_scans},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
