/* test_ring.c: demand, claim, release, speculate and wait, step by step and under races.
 *
 * Most tests have no worker: then a slot stays in the state that the test wants to look at.  Two functions
 * are wrapped at link time, so that a test can act in the middle of a demand or a guess: slot_take, when
 * the slot is chosen and not yet taken, and hint_not_empty, which is called when an EMPTY slot has been
 * taken and its home is not yet set.
 */
#include "testring.h"

#include <errno.h>
#include <string.h>

static const struct shape SMALL = {.layers = 2, .experts = 12, .slots = 16, .seed = 1};

typedef void hook(smoe_ring *r, uint32_t s, uint32_t expert);
static hook *before_take, *after_take; /* each acts once */

bool __real_slot_take(smoe_ring *r, uint32_t s, uint64_t seen, uint32_t expert, uint64_t speculative, uint64_t bit);
bool __wrap_slot_take(smoe_ring *r, uint32_t s, uint64_t seen, uint32_t expert, uint64_t speculative, uint64_t bit);
void __real_hint_not_empty(smoe_ring *r, uint32_t s);
void __wrap_hint_not_empty(smoe_ring *r, uint32_t s);

static void act_once(hook **which, smoe_ring *r, uint32_t s, uint32_t expert) {
    hook *act = *which;
    if (!act)
        return;
    *which = NULL;
    act(r, s, expert);
}

bool __wrap_slot_take(smoe_ring *r, uint32_t s, uint64_t seen, uint32_t expert, uint64_t speculative, uint64_t bit) {
    act_once(&before_take, r, s, expert);
    return __real_slot_take(r, s, seen, expert, speculative, bit);
}

void __wrap_hint_not_empty(smoe_ring *r, uint32_t s) {
    __real_hint_not_empty(r, s);
    act_once(&after_take, r, s, WORD_EXPERT(slot_word(r, s)));
}

/* --- small steps ------------------------------------------------------------------------------------ */

static smoe_hold acquire_ok(smoe_ring *r, int64_t layer, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e;
    int rc = smoe_acquire(r, layer, &expert, 1, &h, 60000, &e);
    CHECK(rc == 0 || rc == 1);
    return h;
}

static smoe_hold fetch_ok(struct testring *t, smoe_ring *r, int64_t layer, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e;
    CHECK(smoe_fetch(r, layer, &expert, 1, &h, 60000, &e) >= 0);
    CHECK_EQ(h.status, SMOE_HOLD_RESIDENT);
    CHECK(testring_bytes_ok(t, r, &h));
    return h;
}

static void release_ok(smoe_ring *r, smoe_hold *h) {
    CHECK_EQ(smoe_release(r, h, 1), 1);
    CHECK_EQ(h->status, SMOE_HOLD_NONE);
}

static void guess_ok(smoe_ring *r, int64_t layer, int64_t expert, int queued) {
    smoe_error e;
    CHECK_EQ(smoe_speculate(r, layer, &expert, 1, &e), queued);
}

/* A read by hand: what a worker does, without the bytes. */
static void start_by_hand(smoe_ring *r, uint32_t s) {
    uint64_t word;
    CHECK(slot_start(r, s, 126, &word));
}

static void land_by_hand(smoe_ring *r, uint32_t s) {
    lru_stamp(r, s);
    slot_publish(r, s, 126);
    guess_clear(r, s);
    space_freed(r);
}

static void read_by_hand(smoe_ring *r, uint32_t s) {
    start_by_hand(r, s);
    land_by_hand(r, s);
}

static uint32_t reserved(const struct testring *t) {
    uint32_t n[9];
    smoe_census(t->supervisor, n);
    return n[8];
}

static uint32_t state_of(const smoe_ring *r, uint32_t s) {
    return WORD_STATE(slot_word(r, s));
}

static void drain(struct testring *t) {
    while (queue_pop(demand_queue(t->supervisor)) >= 0) {
    }
    while (queue_pop(speculative_queue(t->supervisor)) >= 0) {
    }
}

/* --- demand ----------------------------------------------------------------------------------------- */

static void test_hit_and_join(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    smoe_error e;
    smoe_hold x = acquire_ok(a, 0, 3), y = acquire_ok(b, 0, 3);
    CHECK_EQ(x.slot, y.slot);
    CHECK_EQ(slot_word(a, x.slot), word_make(SMOE_QUEUED, 0, 0, 3, a->bit | b->bit));
    CHECK_EQ(x.status, SMOE_HOLD_LOADING);
    CHECK_EQ(testring_counter(&t, SMOE_C_MISSES), 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_JOINS), 1);
    testring_start(&t, 1);
    CHECK_EQ(smoe_wait(a, &x, 1, 60000, &e), 0);
    CHECK_EQ(smoe_wait(b, &y, 1, 60000, &e), 0);
    CHECK(testring_bytes_ok(&t, a, &x) && testring_bytes_ok(&t, b, &y));
    release_ok(a, &x);
    release_ok(b, &y);
    CHECK_EQ(slot_word(a, 0), word_make(SMOE_CONSUMED, 0, 0, 3, 0)); /* retained */
    x = fetch_ok(&t, a, 0, 3);
    CHECK_EQ(x.hit, 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_HITS), 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_READS), 1);
    CHECK_EQ(smoe_histogram_count(a, 3), 3);
    release_ok(a, &x);
    for (uint32_t i = 0; i < t.geometry.n_experts; i++) /* experts of one layout have as many parts */
        CHECK_EQ(smoe_expert_layout(a, i), smoe_expert_parts(a, i, NULL, 0) - 1);
    CHECK_EQ(smoe_expert_layout(a, t.geometry.n_experts), SMOE_EID);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_every_expert(void) {
    struct testring t;
    struct shape shape = {.layers = 5, .experts = 20, .slots = 7, .seed = 2};
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    testring_start(&t, 3);
    for (int round = 0; round < 2; round++)
        for (int64_t x = 0; x < 100; x++) {
            smoe_hold h = fetch_ok(&t, a, x / 20, x % 20);
            release_ok(a, &h);
        }
    CHECK_EQ(testring_counter(&t, SMOE_C_READS), 200); /* a cycle longer than the ring: LRU finds nothing */
    CHECK_EQ(testring_counter(&t, SMOE_C_EVICTIONS), 193);
    for (uint32_t f = 0; f < t.geometry.n_files; f++)
        CHECK(smoe_file_mode(a, f) != SMOE_MODE_UNKNOWN);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_ids(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_hold h[3];
    smoe_error e;
    const struct {
        int64_t layer, experts[3];
    } bad[] = {{0, {1, 2, 1}},  {0, {5, 4, 12}}, {2, {0, 1, 2}},
               {-1, {0, 1, 2}}, {0, {0, -1, 2}}, {1ll << 40, {0, 1, 2}}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_EQ(smoe_acquire(a, bad[i].layer, bad[i].experts, 3, h, 0, &e), SMOE_EID);
        CHECK_EQ(e.code, SMOE_EID);
    }
    int64_t many[17] = {0};
    smoe_hold holds[17];
    CHECK_EQ(smoe_acquire(a, 0, many, 17, holds, 0, &e), SMOE_ETOOLARGE);
    CHECK_EQ(smoe_acquire(a, 0, many, 0, holds, 0, &e), 0);
    CHECK_EQ(smoe_acquire(t.supervisor, 0, many, 1, holds, 0, &e), -EPERM);
    CHECK_EQ(reserved(&t), 0);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_nested_holds(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    smoe_hold x = acquire_ok(a, 0, 3), y = acquire_ok(a, 0, 3), z, other = acquire_ok(b, 0, 3);
    CHECK_EQ(x.slot, y.slot);
    CHECK_EQ(reserved(&t), 2); /* one a client and slot */
    CHECK_EQ(smoe_hold_again(a, &x, &z), 0);
    read_by_hand(a, x.slot);
    smoe_hold claimed;
    smoe_error e;
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &claimed, &e), 1);
    CHECK_EQ(reserved(&t), 2);
    release_ok(a, &x);
    release_ok(a, &z);
    release_ok(a, &claimed);
    CHECK_EQ(WORD_HOLDERS(slot_word(a, y.slot)), a->bit | b->bit);
    release_ok(a, &y);
    CHECK_EQ(WORD_HOLDERS(slot_word(a, other.slot)), b->bit);
    CHECK_EQ(reserved(&t), 1);
    CHECK_EQ(smoe_hold_again(a, &x, &z), -EINVAL);
    smoe_hold stale = other;
    CHECK_EQ(smoe_hold_again(a, &stale, &z), -EINVAL); /* b's, not a's */
    release_ok(b, &other);
    drain(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* --- homes ------------------------------------------------------------------------------------------ */

static void test_stale_homes(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    testring_start(&t, 1);
    smoe_hold x = fetch_ok(&t, a, 0, 3), y;
    atomic_store(&a->homes[4], x.slot + 1); /* another expert's slot */
    atomic_store(&a->homes[5], 16);         /* an EMPTY slot */
    atomic_store(&a->homes[6], 17);         /* no slot */
    atomic_store(&a->homes[7], UINT32_MAX);
    for (int64_t i = 4; i < 8; i++) {
        y = fetch_ok(&t, a, 0, i);
        CHECK(y.slot != x.slot);
        CHECK_EQ(smoe_home(a, (uint32_t)i), y.slot + 1);
        release_ok(a, &y);
    }
    atomic_store(&a->homes[0], 1); /* the slot of expert 0 is EMPTY, its word is 0 as well */
    atomic_store(&a->words[15], 0);
    atomic_store(&a->homes[0], 16);
    smoe_error e;
    CHECK_EQ(smoe_claim_specific(a, 0, 0, &y, &e), 0);
    y = fetch_ok(&t, a, 0, 0);
    release_ok(a, &y);
    atomic_store(&a->homes[3], 0); /* forgotten: read once more, into a second slot */
    y = fetch_ok(&t, a, 0, 3);
    CHECK(y.slot != x.slot);
    CHECK(testring_bytes_ok(&t, a, &x)); /* two slots with one expert are harmless */
    release_ok(a, &x);
    release_ok(a, &y);
    testring_check_quiet(&t);
    testring_close(&t);
}

static smoe_ring *intruder;
static smoe_hold intruders_hold;

/* Another client takes another slot for the same expert and sets the home first. */
static void win_the_home(smoe_ring *r, uint32_t s, uint32_t expert) {
    (void)r, (void)s;
    intruders_hold = acquire_ok(intruder, 0, expert);
}

static void test_home_lost(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    intruder = testring_client(&t);
    after_take = win_the_home;
    smoe_hold h = acquire_ok(a, 0, 3);
    CHECK_EQ(h.slot, intruders_hold.slot); /* joined; its own slot was given back */
    CHECK_EQ(h.slot, 1);
    CHECK_EQ(slot_word(a, 0), 0);
    CHECK_EQ(lru_find_empty(a), 0);
    CHECK_EQ(reserved(&t), 2);
    CHECK_EQ(WORD_HOLDERS(slot_word(a, 1)), a->bit | intruder->bit);
    CHECK_EQ(queue_length(demand_queue(a)), 1);
    read_by_hand(a, h.slot);
    release_ok(a, &h);
    release_ok(intruder, &intruders_hold);
    drain(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* The same, but the slot has been joined before the home is lost: it must stay. */
static void join_then_win(smoe_ring *r, uint32_t s, uint32_t expert) {
    atomic_store(&r->homes[expert], s + 1);
    intruders_hold = acquire_ok(intruder, 0, expert);
    CHECK_EQ(intruders_hold.slot, s);
    atomic_store(&r->homes[expert], s + 2);
}

static void test_home_lost_but_joined(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    intruder = testring_client(&t);
    after_take = join_then_win;
    smoe_hold h = acquire_ok(a, 0, 3);
    smoe_error e;
    CHECK_EQ(h.slot, intruders_hold.slot);
    CHECK_EQ(WORD_HOLDERS(slot_word(a, h.slot)), a->bit | intruder->bit);
    testring_start(&t, 1);
    CHECK_EQ(smoe_wait(a, &h, 1, 60000, &e), 0);
    CHECK_EQ(smoe_wait(intruder, &intruders_hold, 1, 60000, &e), 0);
    CHECK(testring_bytes_ok(&t, a, &h));
    release_ok(a, &h);
    release_ok(intruder, &intruders_hold);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* A second thread of the same client joins: the bit is the same, only the private count tells. */
static void test_home_lost_own_thread_joined(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    intruder = a;
    after_take = join_then_win;
    smoe_hold h = acquire_ok(a, 0, 3);
    CHECK_EQ(h.slot, intruders_hold.slot);
    CHECK_EQ(state_of(a, h.slot), SMOE_QUEUED);
    CHECK_EQ(reserved(&t), 1);
    read_by_hand(a, h.slot);
    release_ok(a, &h);
    CHECK_EQ(WORD_HOLDERS(slot_word(a, intruders_hold.slot)), a->bit);
    release_ok(a, &intruders_hold);
    drain(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* --- speculation ------------------------------------------------------------------------------------ */

static void test_promotion_queued(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    guess_ok(a, 0, 3, 1);
    guess_ok(a, 0, 3, 0);
    CHECK_EQ(slot_word(a, 0), word_make(SMOE_QUEUED, WORD_SPECULATIVE, 0, 3, 0));
    CHECK_EQ(guess_count(a), 1);
    smoe_hold h = acquire_ok(a, 0, 3);
    smoe_error e;
    CHECK_EQ(slot_word(a, 0), word_make(SMOE_QUEUED, 0, 0, 3, a->bit));
    CHECK_EQ(guess_count(a), 0);
    CHECK_EQ(queue_length(demand_queue(a)), 1);
    CHECK_EQ(queue_length(speculative_queue(a)), 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_PROMOTED), 1);
    testring_start(&t, 1);
    CHECK_EQ(smoe_wait(a, &h, 1, 60000, &e), 0);
    CHECK(testring_bytes_ok(&t, a, &h));
    UNTIL(testring_counter(&t, SMOE_C_SKIPS) == 1); /* the older entry */
    CHECK_EQ(testring_counter(&t, SMOE_C_READS), 1);
    release_ok(a, &h);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_promotion_reading(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    guess_ok(a, 0, 3, 1);
    start_by_hand(a, 0);
    smoe_hold h = acquire_ok(a, 0, 3);
    CHECK_EQ(slot_word(a, 0), word_make(SMOE_READING, 0, 126, 3, a->bit));
    CHECK_EQ(guess_count(a), 0);
    CHECK_EQ(queue_length(demand_queue(a)), 0); /* it is being read: nothing to push */
    land_by_hand(a, 0);
    CHECK_EQ(slot_word(a, 0), word_make(SMOE_CONSUMED, 0, 0, 3, a->bit));
    CHECK_EQ(smoe_wait(a, &h, 1, 60000, &e), 0);
    release_ok(a, &h);
    drain(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_guess_hit_and_waste(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 4;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    testring_start(&t, 1);
    guess_ok(a, 0, 3, 1);
    UNTIL(testring_counter(&t, SMOE_C_READS) == 1);
    smoe_hold h = fetch_ok(&t, a, 0, 3);
    CHECK_EQ(h.hit, 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_GUESS_HITS), 1);
    release_ok(a, &h);
    UNTIL(guess_count(a) == 0);
    guess_ok(a, 0, 4, 1);
    UNTIL(testring_counter(&t, SMOE_C_READS) == 2);
    for (int64_t x = 5; x < 9; x++) {
        h = fetch_ok(&t, a, 0, x);
        release_ok(a, &h);
    }
    CHECK_EQ(testring_counter(&t, SMOE_C_GUESS_WASTED), 1); /* 4, which nobody wanted; not 3 */
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_guess_limit(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    const int64_t experts[] = {0, 1, 2, 3, 4, 5};
    CHECK_EQ(smoe_speculate(a, 0, experts, 6, &e), 4); /* a quarter of 16 */
    CHECK_EQ(testring_counter(&t, SMOE_C_GUESSES), 4);
    CHECK_EQ(testring_counter(&t, SMOE_C_GUESS_DROPS), 2);
    start_by_hand(a, 0);
    guess_ok(a, 1, 0, 0); /* READING counts as well */
    land_by_hand(a, 0);
    guess_ok(a, 1, 0, 1);
    smoe_hold h = acquire_ok(a, 0, 1); /* promoted: no guess any more */
    guess_ok(a, 1, 1, 1);
    guess_ok(a, 1, 2, 0);
    uint32_t n[9];
    smoe_census(a, n);
    CHECK_EQ(n[7], 4);
    const int64_t nobody[] = {12};
    CHECK_EQ(smoe_speculate(a, 0, nobody, 1, &e), SMOE_EID);
    release_ok(a, &h);
    testring_close(&t);
}

static void test_guess_gives_up(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_hold holds[16];
    smoe_error e;
    uint32_t before[9], after[9];
    while (queue_push(speculative_queue(a), 9)) {
    }
    smoe_census(a, before);
    guess_ok(a, 0, 3, 0); /* the queue is full */
    smoe_census(a, after);
    CHECK(memcmp(before, after, sizeof before) == 0);
    CHECK_EQ(guess_count(a), 0);
    CHECK(lru_find_empty(a) >= 0);
    drain(&t);
    const int64_t all[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, four[] = {0, 1, 2, 3};
    CHECK_EQ(smoe_acquire(a, 0, all, 12, holds, 0, &e), 0);
    CHECK_EQ(smoe_acquire(a, 1, four, 4, holds + 12, 0, &e), 0);
    guess_ok(a, 1, 9, 0); /* no idle slot */
    CHECK_EQ(guess_count(a), 0);
    CHECK_EQ(smoe_release(a, holds, 16), 16);
    guess_ok(a, 1, 9, 0); /* QUEUED for nobody now, but not idle */
    testring_close(&t);
}

static void test_guess_races(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    intruder = testring_client(&t);
    after_take = win_the_home;
    guess_ok(a, 0, 3, 0);
    CHECK_EQ(slot_word(a, 0), 0); /* given back */
    CHECK_EQ(intruders_hold.slot, 1);
    CHECK_EQ(guess_count(a), 0);
    read_by_hand(a, 1);
    release_ok(intruder, &intruders_hold);
    drain(&t);
    after_take = join_then_win;
    guess_ok(a, 0, 5, 0);
    CHECK_EQ(WORD_HOLDERS(slot_word(a, intruders_hold.slot)), intruder->bit);
    CHECK_EQ(queue_pop(demand_queue(a)), (int)intruders_hold.slot); /* the joiner has pushed it */
    read_by_hand(a, intruders_hold.slot);
    release_ok(intruder, &intruders_hold);
    drain(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* At the limit less one, another guesser comes between a guess's admission and its taking the slot. */
static void guess_in_between(smoe_ring *r, uint32_t s, uint32_t expert) {
    (void)expert;
    atomic_fetch_and(&r->empties[0], ~(1ull << s)); /* so that it looks at another slot */
    const int64_t five = 5;
    smoe_error e;
    CHECK(smoe_speculate(intruder, 1, &five, 1, &e) >= 0);
}

static void test_guess_limit_in_between(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 4; /* one guess at a time */
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    intruder = testring_client(&t);
    const int64_t three = 3;
    smoe_error e;
    uint32_t n[9];
    before_take = guess_in_between;
    CHECK(smoe_speculate(a, 0, &three, 1, &e) >= 0);
    smoe_census(a, n);
    CHECK(n[7] <= 1);
    testring_close(&t);
}

#define GUESSERS     4
#define GUESS_ROUNDS 300

struct guessers {
    smoe_ring *rings[GUESSERS];
    _Atomic int ready, done;
    _Atomic uint32_t next;
};

static void *guess_rounds(void *arg) {
    struct guessers *g = arg;
    int64_t me = atomic_fetch_add(&g->next, 1);
    const int64_t experts[] = {me * 3, me * 3 + 1, me * 3 + 2};
    smoe_error e;
    for (int round = 1; round <= GUESS_ROUNDS; round++) {
        UNTIL(atomic_load(&g->ready) >= round);
        CHECK(smoe_speculate(g->rings[me], 0, experts, 3, &e) >= 0);
        atomic_fetch_add(&g->done, 1);
    }
    return NULL;
}

/* Nobody reads them, so that at the end of a round all guesses can be counted. */
static void test_guess_limit_threads(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    struct guessers g = {.next = 0};
    pthread_t threads[GUESSERS];
    smoe_ring *r = t.supervisor;
    for (int i = 0; i < GUESSERS; i++)
        g.rings[i] = testring_client(&t);
    for (int i = 0; i < GUESSERS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, guess_rounds, &g) == 0);
    for (int round = 1; round <= GUESS_ROUNDS; round++) {
        atomic_store(&g.ready, round);
        UNTIL(atomic_load(&g.done) == round * GUESSERS);
        uint32_t n[9];
        smoe_census(r, n);
        CHECK(n[7] <= r->guess_limit);
        for (uint32_t s = 0; s < r->n_slots; s++)
            if (word_guess(slot_word(r, s))) {
                CHECK(slot_give_back(r, s, WORD_EXPERT(slot_word(r, s)), WORD_SPECULATIVE, 0));
                hint_empty(r, s);
                guess_clear(r, s);
            }
        drain(&t);
    }
    for (int i = 0; i < GUESSERS; i++)
        pthread_join(threads[i], NULL);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* No EMPTY slot, no victim: a queued guess that nobody holds gives its slot to a demand. */
static void test_demand_takes_guess(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 4;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    smoe_hold holds[3], h;
    smoe_error e;
    const int64_t three[] = {0, 1, 2};
    guess_ok(a, 1, 7, 1);
    CHECK_EQ(smoe_acquire(a, 0, three, 3, holds, 0, &e), 0);
    uint32_t guessed = smoe_home(a, 12 + 7);
    CHECK(guessed > 0);
    h = acquire_ok(a, 1, 1);
    CHECK_EQ(h.slot, guessed - 1);
    CHECK_EQ(smoe_home(a, 12 + 7), 0);
    CHECK_EQ(guess_count(a), 0);
    CHECK_EQ(testring_counter(&t, SMOE_C_EVICTIONS), 0);
    testring_start(&t, 2);
    CHECK_EQ(smoe_wait(a, &h, 1, 60000, &e), 0);
    CHECK(testring_bytes_ok(&t, a, &h));
    release_ok(a, &h);
    CHECK_EQ(smoe_wait(a, holds, 3, 60000, &e), 0);
    CHECK_EQ(smoe_release(a, holds, 3), 3);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* Guesses were there first; with one worker the ticks at landing show the order. */
static void test_demand_first(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_hold holds[6];
    smoe_error e;
    const int64_t guesses[] = {0, 1, 2, 3}, demands[] = {4, 5, 6, 7, 8, 9};
    CHECK_EQ(smoe_speculate(a, 0, guesses, 4, &e), 4);
    CHECK_EQ(smoe_acquire(a, 0, demands, 6, holds, 0, &e), 0);
    testring_start(&t, 1);
    CHECK_EQ(smoe_wait(a, holds, 6, 60000, &e), 0);
    UNTIL(testring_counter(&t, SMOE_C_READS) == 10 && guess_count(a) == 0);
    uint64_t last_demand = 0, first_guess = UINT64_MAX;
    for (uint32_t x = 0; x < 10; x++) {
        uint64_t tick = smoe_slot_tick(a, smoe_home(a, x) - 1);
        if (x < 4 && tick < first_guess)
            first_guess = tick;
        if (x >= 4 && tick > last_demand)
            last_demand = tick;
    }
    CHECK(last_demand < first_guess);
    CHECK_EQ(testring_counter(&t, SMOE_C_POPS_DEMAND), 6);
    CHECK_EQ(testring_counter(&t, SMOE_C_POPS_SPECULATIVE), 4);
    CHECK_EQ(smoe_release(a, holds, 6), 6);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* --- claims ----------------------------------------------------------------------------------------- */

static void test_claim(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_hold h, other;
    smoe_error e;
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &h, &e), 0);
    CHECK_EQ(smoe_claim_specific(a, 0, 12, &h, &e), SMOE_EID);
    guess_ok(a, 0, 3, 1);
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &h, &e), 0); /* queued: not there, and no promotion */
    start_by_hand(a, 0);
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &h, &e), 0);
    land_by_hand(a, 0);
    CHECK_EQ(slot_word(a, 0), word_make(SMOE_READY, WORD_SPECULATIVE, 0, 3, 0));
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &h, &e), 1);
    CHECK_EQ(slot_word(a, 0), word_make(SMOE_CONSUMED, 0, 0, 3, a->bit));
    CHECK_EQ(h.status, SMOE_HOLD_RESIDENT);
    CHECK_EQ(reserved(&t), 1);
    CHECK_EQ(smoe_claim_specific(a, 0, 4, &other, &e), 0);
    CHECK_EQ(reserved(&t), 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_CLAIMS), 1);
    CHECK_EQ(smoe_histogram_count(a, 3), 1);
    release_ok(a, &h);
    drain(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* Held and claimed slots outlive any number of demands; idle ones go in the order of their last use. */
static void test_eviction_order(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 3;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    testring_start(&t, 1);
    smoe_hold x = fetch_ok(&t, a, 0, 0), y = fetch_ok(&t, a, 0, 1), z = fetch_ok(&t, a, 0, 2), again;
    smoe_error e;
    release_ok(a, &y);
    release_ok(a, &z);
    CHECK_EQ(smoe_claim_specific(a, 0, 1, &again, &e), 1); /* 1 is younger than 2 now */
    release_ok(a, &again);
    y = fetch_ok(&t, a, 0, 5); /* takes 2's slot */
    CHECK_EQ(smoe_home(a, 2), 0);
    CHECK_EQ(smoe_claim_specific(a, 0, 1, &again, &e), 1);
    release_ok(a, &again);
    release_ok(a, &y);
    for (int64_t i = 6; i < 12; i++) {
        y = fetch_ok(&t, a, 0, i);
        release_ok(a, &y);
        CHECK(testring_bytes_ok(&t, a, &x));
    }
    release_ok(a, &x);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* --- cold slots ------------------------------------------------------------------------------------- */

static uint32_t fetched(smoe_ring *r, int64_t layer, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e;
    CHECK(smoe_fetch(r, layer, &expert, 1, &h, 60000, &e) >= 0);
    uint32_t s = h.slot;
    release_ok(r, &h);
    return s;
}

/* As much as the ring cannot keep, two experts at a time; then who is evicted for what is demanded otherwise. */
static void test_cold(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 8;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    testring_start(&t, 1);
    smoe_hold holds[2];
    smoe_error e;
    for (uint32_t i = 0; i < 4; i++)
        CHECK_EQ(fetched(b, 1, i), i);
    const int64_t pairs[][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {2, 11}};
    const uint32_t slots[][2] = {{4, 5}, {6, 7}, {4, 5}, {4, 5}, {4, 5}, {4, 5}, {6, 5}};
    for (int i = 0; i < 7; i++) {
        CHECK_EQ(smoe_acquire_cold(a, 0, pairs[i], 2, holds, 1, 60000, &e), i == 6 ? 2 : 0);
        CHECK_EQ(smoe_wait(a, holds, 2, 60000, &e), 0);
        CHECK(testring_bytes_ok(&t, a, &holds[0]) && testring_bytes_ok(&t, a, &holds[1]));
        CHECK(holds[0].slot == slots[i][0] && holds[1].slot == slots[i][1]);
        CHECK_EQ(smoe_release(a, holds, 2), 2);
    }
    CHECK_EQ(testring_counter(&t, SMOE_C_MISSES), 16);
    CHECK_EQ(testring_counter(&t, SMOE_C_EVICTIONS), 8);
    /* 10 and 3 are cold, in slots 4 and 7; 2 and 11 have been asked for again.  Layer 1's are the oldest. */
    smoe_hold held = acquire_ok(b, 0, 10);
    CHECK_EQ(held.slot, 4);
    release_ok(b, &held);
    CHECK_EQ(fetched(b, 1, 4), 7);
    for (uint32_t i = 0; i < 4; i++)
        CHECK_EQ(fetched(b, 1, 5 + i), i);
    CHECK_EQ(fetched(b, 1, 9), 6);
    CHECK_EQ(fetched(b, 1, 10), 5);
    CHECK_EQ(fetched(b, 1, 11), 4);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* Without a wait for the reservation; and who joins a read under way has asked for it, too. */
static void test_cold_joined(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 2;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    smoe_hold holds[2], more;
    smoe_error e;
    const int64_t both[] = {0, 1}, two = 2;
    CHECK_EQ(smoe_acquire_cold(a, 0, both, 2, holds, 1, 60000, &e), 0);
    CHECK_EQ(smoe_acquire_cold(b, 0, &two, 1, &more, 0, 60000, &e), SMOE_EBUSY);
    smoe_release(a, holds, 2);
    drain(&t);
    more = acquire_ok(b, 0, 0);
    for (uint32_t s = 0; s < 2; s++)
        read_by_hand(a, s);
    release_ok(b, &more);
    smoe_hold x = acquire_ok(b, 0, 2);
    CHECK_EQ(x.slot, 1); /* the younger read, and nobody asked for it but the large request */
    drain(&t);
    read_by_hand(a, 1);
    release_ok(b, &x);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* --- reservations ----------------------------------------------------------------------------------- */

static void test_busy(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 4;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    smoe_hold holds[4], more[4];
    smoe_error e;
    const int64_t experts[] = {0, 1, 2, 3};
    CHECK_EQ(smoe_acquire(b, 0, experts, 3, holds, 0, &e), 0);
    CHECK_EQ(smoe_acquire(a, 1, experts, 2, more, 0, &e), SMOE_EBUSY);
    CHECK_EQ(e.holders, 1u << b->id);
    CHECK_EQ(e.wanted, 2);
    CHECK_EQ(e.got, 1);
    CHECK_EQ(smoe_acquire_nowait(a, 1, experts, 2, more, &e), SMOE_EBUSY);
    CHECK_EQ(more[0].status, SMOE_HOLD_NONE);
    CHECK_EQ(reserved(&t), 3);
    CHECK_EQ(smoe_acquire_nowait(a, 1, experts, 1, more, &e), 0);
    CHECK_EQ(smoe_release(a, more, 1), 1);
    CHECK_EQ(smoe_release(b, holds, 3), 3);
    CHECK_EQ(smoe_release(b, holds, 3), 0); /* released holds are passed over */
    CHECK_EQ(reserved(&t), 0);
    CHECK_EQ(smoe_acquire_nowait(a, 1, experts, 4, more, &e), 0); /* slots QUEUED for nobody give way */
    CHECK_EQ(smoe_release(a, more, 4), 4);
    CHECK_EQ(reserved(&t), 0);
    testring_close(&t);
}

struct waiter {
    struct testring *t;
    smoe_ring *ring;
    int64_t experts[3];
    uint32_t n;
    int rc;
    smoe_hold holds[3];
    smoe_error error;
    pthread_t thread;
};

static void *fetch_in_thread(void *arg) {
    struct waiter *w = arg;
    w->rc = smoe_fetch(w->ring, 0, w->experts, w->n, w->holds, 60000, &w->error);
    return NULL;
}

/* One that sleeps for a reservation is woken by the release that makes room. */
static void test_busy_then_free(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 3;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    smoe_hold holds[3];
    smoe_error e;
    const int64_t experts[] = {0, 1, 2};
    testring_start(&t, 1);
    CHECK_EQ(smoe_fetch(a, 0, experts, 3, holds, 60000, &e), 0);
    struct waiter w = {.t = &t, .ring = b, .experts = {3, 4, 5}, .n = 3};
    REQUIRE(pthread_create(&w.thread, NULL, fetch_in_thread, &w) == 0);
    UNTIL(testring_counter(&t, SMOE_C_BUSY_WAITS) == 1);
    for (int i = 0; i < 3; i++)
        release_ok(a, &holds[i]);
    pthread_join(w.thread, NULL);
    CHECK_EQ(w.rc, 0);
    for (int i = 0; i < 3; i++)
        CHECK(testring_bytes_ok(&t, b, &w.holds[i]));
    CHECK_EQ(smoe_release(b, w.holds, 3), 3);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* --- waiting ---------------------------------------------------------------------------------------- */

static void test_wait_any(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_hold holds[3];
    smoe_error e;
    const int64_t experts[] = {0, 1, 2};
    CHECK_EQ(smoe_acquire(a, 0, experts, 3, holds, 0, &e), 0);
    read_by_hand(a, holds[1].slot);
    CHECK_EQ(smoe_wait_any(a, holds, 3, 60000, &e), 1);
    CHECK_EQ(holds[1].status, SMOE_HOLD_RESIDENT);
    testring_start(&t, 1);
    bool seen[3] = {false, true, false};
    for (int i = 0; i < 2; i++) {
        int k = smoe_wait_any(a, holds, 3, 60000, &e);
        REQUIRE(k >= 0 && k < 3);
        CHECK(!seen[k]);
        seen[k] = true;
        CHECK(testring_bytes_ok(&t, a, &holds[k]));
    }
    CHECK_EQ(smoe_wait_any(a, holds, 3, 60000, &e), -ENOENT);
    CHECK_EQ(smoe_release(a, holds, 3), 3);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* Its entry is gone from the queue, as when the taker was stopped before it pushed: a waiter pushes it. */
static void test_lost_entry(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    testring_start(&t, 1);
    for (int64_t x = 0; x < 2; x++) {
        smoe_hold h;
        /* As an acquire leaves it that is stopped before it pushes. */
        atomic_store(&a->words[x], word_make(SMOE_QUEUED, 0, 0, (uint32_t)x, 0));
        atomic_store(&a->homes[x], (uint32_t)x + 1);
        CHECK_EQ(smoe_acquire(a, 0, &x, 1, &h, 0, &e), 0);
        CHECK_EQ(testring_counter(&t, SMOE_C_JOINS), (uint64_t)x + 1); /* joined, so not pushed */
        CHECK_EQ(x ? smoe_wait_any(a, &h, 1, 60000, &e) : smoe_wait(a, &h, 1, 60000, &e), 0);
        CHECK(testring_bytes_ok(&t, a, &h));
        release_ok(a, &h);
    }
    testring_check_quiet(&t);
    testring_close(&t);
}

/* Entries that are no hints of anything: numbers out of range, slots that are not QUEUED. */
static void test_foreign_entries(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    queue_push(demand_queue(a), 65535);
    queue_push(demand_queue(a), 16);
    queue_push(demand_queue(a), 2);
    queue_push(speculative_queue(a), 65535);
    testring_start(&t, 1);
    smoe_hold h = fetch_ok(&t, a, 0, 3);
    UNTIL(testring_counter(&t, SMOE_C_SKIPS) == 4);
    release_ok(a, &h);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* --- races ------------------------------------------------------------------------------------------ */

#define RACERS 4
#define RACES  60

struct race {
    struct testring *t;
    smoe_ring *rings[RACERS];
    _Atomic int ready, done;
    _Atomic uint32_t next; /* racer number */
};

/* All demand the same few experts at the same moment: homes are lost, slots given back and joined. */
static void *race(void *arg) {
    struct race *g = arg;
    uint32_t me = atomic_fetch_add(&g->next, 1);
    for (int round = 0; round < RACES; round++) {
        atomic_fetch_add(&g->ready, 1);
        UNTIL(atomic_load(&g->ready) >= RACERS * (round + 1));
        smoe_hold h[2];
        smoe_error e;
        const int64_t experts[2] = {(round * 2) % 12, (round * 2 + 1) % 12};
        CHECK(smoe_fetch(g->rings[me], round / 6 % 2, experts, 2, h, 60000, &e) >= 0);
        CHECK(testring_bytes_ok(g->t, g->rings[me], &h[0]) && testring_bytes_ok(g->t, g->rings[me], &h[1]));
        CHECK_EQ(smoe_release(g->rings[me], h, 2), 2);
        atomic_fetch_add(&g->done, 1);
        UNTIL(atomic_load(&g->done) >= RACERS * (round + 1));
    }
    return NULL;
}

static void run_race(bool one_client) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 2 * RACERS;
    testring_open(&t, &shape);
    struct race g = {.t = &t};
    pthread_t threads[RACERS];
    for (int i = 0; i < RACERS; i++)
        g.rings[i] = one_client && i ? g.rings[0] : testring_client(&t);
    testring_start(&t, 2);
    for (int i = 0; i < RACERS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, race, &g) == 0);
    for (int i = 0; i < RACERS; i++)
        pthread_join(threads[i], NULL);
    testring_stop(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_race_clients(void) {
    run_race(false);
}

static void test_race_threads(void) {
    run_race(true);
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"hit and join", test_hit_and_join},
        {"every expert, every byte", test_every_expert},
        {"ids that are none", test_ids},
        {"nested holds", test_nested_holds},
        {"homes that are stale", test_stale_homes},
        {"a home is lost: slot given back", test_home_lost},
        {"a home is lost, but the slot was joined", test_home_lost_but_joined},
        {"a home is lost, but an own thread joined", test_home_lost_own_thread_joined},
        {"promotion of a queued guess", test_promotion_queued},
        {"promotion of a guess being read", test_promotion_reading},
        {"guesses that hit and guesses wasted", test_guess_hit_and_waste},
        {"cold slots go first", test_cold},
        {"a cold slot that is joined", test_cold_joined},
        {"guesses are a quarter at most", test_guess_limit},
        {"guesses give up", test_guess_gives_up},
        {"guesses that lose races", test_guess_races},
        {"limit of guesses: one comes in between", test_guess_limit_in_between},
        {"limit of guesses: many at once", test_guess_limit_threads},
        {"a demand takes a queued guess's slot", test_demand_takes_guess},
        {"demand before speculation", test_demand_first},
        {"claim_specific", test_claim},
        {"eviction in the order of last use", test_eviction_order},
        {"busy names the holders", test_busy},
        {"busy until somebody releases", test_busy_then_free},
        {"wait_any", test_wait_any},
        {"a waiter pushes a lost entry again", test_lost_entry},
        {"foreign queue entries are skipped", test_foreign_entries},
        {"clients race for the same experts", test_race_clients},
        {"threads of one client race", test_race_threads},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
