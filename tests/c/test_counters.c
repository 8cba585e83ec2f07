/* test_counters.c: the sums are what was done, by kind and phase, and a client's own are its own. */
#include "testring.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

static const struct shape SMALL = {.layers = 2, .experts = 12, .slots = 8, .seed = 1};

static smoe_tally tally(const smoe_ring *r, int id, int whose) {
    smoe_tally t;
    REQUIRE(smoe_get_tally(r, id, whose, &t) == 0);
    return t;
}

static uint64_t sum(const uint64_t *buckets) {
    uint64_t n = 0;
    for (int i = 0; i < SMOE_BUCKETS; i++)
        n += buckets[i];
    return n;
}

static void check_demands(const smoe_tally *t, int phase, uint64_t hits, uint64_t joins, uint64_t promoted,
                          uint64_t misses) {
    const uint64_t wanted[] = {hits, joins, promoted, misses};
    for (int kind = 0; kind < 4; kind++)
        CHECK_EQ(phase < 0 ? t->counters[kind] : t->phases[phase][kind], wanted[kind]);
}

static void test_buckets(void) {
    static const struct {
        uint64_t ns;
        uint32_t bucket;
    } rows[] = {
        {0, 0},
        {1, 0},
        {1000, 0},
        {1001, 1},
        {2000, 1},
        {2001, 2},
        {4000, 2},
        {4001, 3},
        {67108864000, 26}, /* 2^26 us */
        {67108864001, 27},
        {UINT64_MAX, 27},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        CHECK_EQ(counters_bucket(rows[i].ns), rows[i].bucket);
}

static void *in_another_thread(void *arg) {
    smoe_ring *r = arg;
    const int64_t three[] = {0, 1, 2};
    smoe_hold holds[3];
    smoe_error e;
    CHECK_EQ(smoe_phase(SMOE_PHASE_PREFILL), SMOE_PHASE_UNSAID);
    CHECK_EQ(smoe_fetch(r, 0, three, 3, holds, -1, &e), 3);
    smoe_release(r, holds, 3);
    return NULL;
}

/* Two clients, every kind of demand, in every phase.  There is no worker but where reads are to end. */
static void test_a_script(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *one = testring_client(&t), *two = testring_client(&t);
    const int64_t four[] = {0, 1, 2, 3}, guessed[] = {4, 5};
    smoe_hold a[4], b[4], g;
    smoe_error e;
    pthread_t thread;

    CHECK_EQ(smoe_phase(-1), -EINVAL);
    CHECK_EQ(smoe_phase(SMOE_PHASES), -EINVAL);
    CHECK_EQ(smoe_phase(SMOE_PHASE_PREFILL), SMOE_PHASE_UNSAID);
    CHECK_EQ(smoe_acquire(one, 0, four, 4, a, -1, &e), 0);         /* 4 misses */
    CHECK_EQ(smoe_acquire(two, 0, four, 3, b, -1, &e), 0);         /* 3 joins */
    CHECK_EQ(smoe_speculate(one, 0, guessed, 2, &e), 2);           /* as many as may be */
    CHECK_EQ(smoe_acquire(two, 0, &guessed[0], 1, &g, -1, &e), 0); /* promoted */
    testring_start(&t, 1);
    CHECK_EQ(smoe_wait(one, a, 4, -1, &e), 0);
    CHECK_EQ(smoe_phase(SMOE_PHASE_DECODE), SMOE_PHASE_PREFILL);
    CHECK_EQ(smoe_wait(two, b, 3, -1, &e), 0);
    CHECK_EQ(smoe_wait(two, &g, 1, -1, &e), 0);
    testring_settle(&t);
    smoe_release(one, a, 4);
    smoe_release(two, b, 3);
    smoe_release(two, &g, 1);
    CHECK_EQ(smoe_fetch(one, 0, &guessed[1], 1, &g, -1, &e), 1); /* a guess comes true */
    smoe_release(one, &g, 1);
    CHECK_EQ(smoe_fetch(one, 0, four, 4, a, -1, &e), 4);
    smoe_release(one, a, 4);
    REQUIRE(pthread_create(&thread, NULL, in_another_thread, two) == 0); /* a phase is a thread's */
    pthread_join(thread, NULL);
    CHECK_EQ(smoe_phase(SMOE_PHASE_UNSAID), SMOE_PHASE_DECODE);

    smoe_tally all = tally(one, -1, SMOE_OF_ALL), first = tally(one, (int)one->id, SMOE_OF_PRESENT),
               second = tally(one, (int)two->id, SMOE_OF_PRESENT);
    check_demands(&all, -1, 8, 3, 1, 4);
    check_demands(&first, -1, 5, 0, 0, 4);
    check_demands(&first, SMOE_PHASE_PREFILL, 0, 0, 0, 4);
    check_demands(&first, SMOE_PHASE_DECODE, 5, 0, 0, 0);
    check_demands(&first, SMOE_PHASE_UNSAID, 0, 0, 0, 0);
    check_demands(&second, SMOE_PHASE_PREFILL, 3, 3, 1, 0);
    check_demands(&second, SMOE_PHASE_DECODE, 0, 0, 0, 0);
    CHECK_EQ(first.phases[SMOE_PHASE_PREFILL][SMOE_C_WAITS], 1);
    CHECK_EQ(sum(first.waits[SMOE_PHASE_PREFILL]), 1);
    CHECK_EQ(second.phases[SMOE_PHASE_DECODE][SMOE_C_WAITS], 2);
    CHECK_EQ(sum(second.waits[SMOE_PHASE_DECODE]), 2);
    CHECK_EQ(sum(all.waits[SMOE_PHASE_UNSAID]) + sum(first.reads) + sum(second.reads), 0);
    CHECK_EQ(all.counters[SMOE_C_WAITS], 3);
    CHECK_EQ(all.counters[SMOE_C_READS], 6);
    CHECK_EQ(sum(all.reads), 6);
    CHECK_EQ(all.counters[SMOE_C_GUESS_HITS], 1);
    CHECK_EQ(first.counters[SMOE_C_GUESS_USED_BYTES], t.experts[5].bytes);
    CHECK_EQ(second.counters[SMOE_C_GUESS_USED_BYTES], t.experts[4].bytes);
    uint64_t wanted = 0;
    for (int x = 0; x < 6; x++)
        wanted += t.experts[x].bytes;
    CHECK_EQ(all.counters[SMOE_C_WANTED_BYTES], wanted);
    CHECK_EQ(all.counters[SMOE_C_RELEASES], 16);
    CHECK_EQ(all.counters[SMOE_C_WAIT_NS],
             first.phases[SMOE_PHASE_PREFILL][SMOE_C_WAIT_NS] + second.phases[SMOE_PHASE_DECODE][SMOE_C_WAIT_NS]);
    testring_close(&t);
}

/* What became of guesses that nobody wanted. */
static void test_wasted_guesses(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *r = testring_client(&t);
    const int64_t guessed[] = {0, 1}, all[] = {0, 1, 2, 3, 4, 5, 6, 7};
    smoe_hold holds[8], g;
    smoe_error e;
    CHECK_EQ(smoe_speculate(r, 0, guessed, 2, &e), 2);
    testring_start(&t, 1);
    testring_settle(&t);
    CHECK_EQ(smoe_claim_specific(r, 0, 0, &g, &e), 1);
    smoe_release(r, &g, 1);
    CHECK_EQ(smoe_fetch(r, 1, all, 8, holds, -1, &e), 0); /* evicts both */
    smoe_release(r, holds, 8);
    testring_stop(&t);
    smoe_tally got = tally(r, -1, SMOE_OF_ALL);
    CHECK_EQ(got.counters[SMOE_C_EVICTIONS], 2);
    CHECK_EQ(got.counters[SMOE_C_GUESS_HITS], 1);
    CHECK_EQ(got.counters[SMOE_C_GUESS_USED_BYTES], t.experts[0].bytes);
    CHECK_EQ(got.counters[SMOE_C_GUESS_WASTED], 1);
    CHECK_EQ(got.counters[SMOE_C_GUESS_WASTED_BYTES], t.experts[1].bytes);
    CHECK_EQ(smoe_speculate(r, 0, guessed, 2, &e), 2); /* and now no worker reads them */
    CHECK_EQ(smoe_acquire(r, 0, &all[2], 6, holds, -1, &e), 0);
    CHECK_EQ(smoe_acquire(r, 1, all, 2, &holds[6], -1, &e), 0);
    got = tally(r, -1, SMOE_OF_ALL);
    CHECK_EQ(got.counters[SMOE_C_GUESS_DISPLACED], 2);
    CHECK_EQ(got.counters[SMOE_C_GUESSES], got.counters[SMOE_C_GUESS_HITS] + got.counters[SMOE_C_GUESS_WASTED] +
                                               got.counters[SMOE_C_GUESS_DISPLACED]);
    testring_close(&t);
}

/* The next owner of an id begins at nought; the sums, and the id's, go on. */
static void test_an_id_that_is_used_again(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    testring_start(&t, 1);
    smoe_ring *eye = testring_attach(&t, SMOE_ROLE_OBSERVER, 0);
    const int64_t two[] = {3, 4};
    smoe_hold holds[2];
    smoe_error e;
    smoe_tally none;
    CHECK_EQ(smoe_get_tally(eye, 0, SMOE_OF_PRESENT, &none), -ENOENT);
    for (uint64_t turn = 1; turn <= 3; turn++) {
        smoe_ring *r = testring_client(&t);
        CHECK_EQ(r->id, 0);
        CHECK(smoe_fetch(r, 0, two, 2, holds, -1, &e) >= 0);
        smoe_tally own = tally(eye, 0, SMOE_OF_PRESENT), row = tally(eye, 0, SMOE_OF_ALL),
                   all = tally(eye, -1, SMOE_OF_ALL);
        smoe_tally before = tally(eye, 0, SMOE_OF_FORMER);
        uint64_t first = turn == 1 ? 2 : 0;
        check_demands(&own, SMOE_PHASE_UNSAID, 2 - first, 0, 0, first);
        check_demands(&row, -1, 2 * turn - 2, 0, 0, 2);
        check_demands(&all, -1, 2 * turn - 2, 0, 0, 2);
        check_demands(&before, -1, turn == 1 ? 0 : 2 * turn - 4, 0, 0, 2 - first);
        CHECK_EQ(sum(own.waits[SMOE_PHASE_UNSAID]), first / 2);
        CHECK_EQ(sum(row.waits[SMOE_PHASE_UNSAID]), 1);
        testring_detach(&t, r);
        CHECK_EQ(smoe_get_tally(eye, 0, SMOE_OF_PRESENT, &none), -ENOENT);
        before = tally(eye, 0, SMOE_OF_FORMER);
        check_demands(&before, -1, 2 * turn - 2, 0, 0, 2);
    }
    CHECK_EQ(smoe_get_tally(eye, SMOE_ID_WORKER, SMOE_OF_PRESENT, &none), -EINVAL);
    CHECK_EQ(smoe_get_tally(eye, -1, SMOE_OF_FORMER, &none), -EINVAL);
    CHECK_EQ(smoe_get_tally(eye, SMOE_PARTICIPANTS, SMOE_OF_ALL, &none), -EINVAL);
    testring_close(&t);
}

/* A wait that is interrupted and taken up again is one wait, as long as all of it. */
static void test_an_interrupted_wait(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *r = testring_client(&t);
    const int64_t one = 3;
    smoe_hold h[1];
    smoe_error e = {0};
    smoe_set_interruptible(r, 1);
    CHECK_EQ(smoe_fetch(r, 0, &one, 1, h, -1, &e), -EINTR);
    uint64_t between = smoe_now_ns();
    CHECK_EQ(smoe_wait(r, h, 1, -1, &e), -EINTR);
    uint64_t second_ns = smoe_now_ns() - between;
    CHECK_EQ(tally(r, -1, SMOE_OF_ALL).counters[SMOE_C_WAITS], 0);
    uint64_t since = e.waited_ns;
    testring_start(&t, 1);
    int rc;
    while ((rc = smoe_wait(r, h, 1, -1, &e)) == -EINTR) {
    }
    uint64_t end = smoe_now_ns();
    smoe_tally got = tally(r, -1, SMOE_OF_ALL);
    CHECK_EQ(rc, 0);
    CHECK_EQ(got.counters[SMOE_C_MISSES], 1);
    CHECK_EQ(got.counters[SMOE_C_WAITS], 1);
    CHECK_EQ(sum(got.waits[SMOE_PHASE_UNSAID]), 1);
    CHECK_EQ(got.waits[SMOE_PHASE_UNSAID][counters_bucket(got.counters[SMOE_C_WAIT_NS])], 1);
    CHECK(got.counters[SMOE_C_WAIT_NS] >= second_ns && got.counters[SMOE_C_WAIT_NS] <= end - since);
    testring_close(&t);
}

/* What is not got is not counted, and what is tried again is counted once. */
static void test_a_demand_that_is_given_back(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    testring_start(&t, 1);
    smoe_ring *one = testring_client(&t), *two = testring_client(&t);
    const int64_t six[] = {0, 1, 2, 3, 4, 5}, more[] = {0, 6, 7, 8};
    smoe_hold a[6], b[4];
    smoe_error e;
    CHECK_EQ(smoe_fetch(one, 0, six, 6, a, -1, &e), 0);
    CHECK_EQ(smoe_fetch(two, 0, six, 1, b, -1, &e), 1);
    CHECK_EQ(smoe_acquire_nowait(two, 0, &more[1], 3, &b[1], &e), SMOE_EBUSY);
    CHECK_EQ(smoe_acquire(two, 0, more, 4, &b[0], 1, &e), SMOE_EBUSY);
    smoe_tally got = tally(two, (int)two->id, SMOE_OF_PRESENT);
    check_demands(&got, -1, 1, 0, 0, 0);
    CHECK_EQ(got.counters[SMOE_C_BUSY_WAITS], 1);
    testring_close(&t);
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"a length's bucket", test_buckets},
        {"a script of every kind in every phase", test_a_script},
        {"guesses that nobody wanted", test_wasted_guesses},
        {"an id that is used again", test_an_id_that_is_used_again},
        {"an interrupted wait", test_an_interrupted_wait},
        {"a demand that is given back", test_a_demand_that_is_given_back},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
