/* test_trace.c: a recorder reads exactly what was asked, in order, or learns how much it lost. */
#include "testring.h"

#include <errno.h>
#include <string.h>

static const struct shape SMALL = {.layers = 2, .experts = 12, .slots = 16, .seed = 1};

struct recorder {
    smoe_ring *ring;
    uint64_t position, lost;
    uint64_t cells[SMOE_TRACE_CELLS];
    uint32_t n;
};
static struct recorder rec;

static void start(struct testring *t) {
    rec.ring = testring_attach(t, SMOE_ROLE_TRACE, 0);
    rec.lost = rec.n = 0;
    int64_t at = smoe_trace_record(rec.ring, 1);
    CHECK(at >= 0);
    rec.position = (uint64_t)at;
}

static uint32_t drain(int pass_over) {
    int64_t got = smoe_trace_read(rec.ring, pass_over, &rec.position, &rec.lost, rec.cells, SMOE_TRACE_CELLS);
    CHECK(got >= 0);
    rec.n = got > 0 ? (uint32_t)got : 0;
    return rec.n;
}

static uint32_t kind_of(uint32_t at) {
    return rec.cells[at] >> 13 & 7;
}
static uint32_t who_of(uint32_t at) {
    return rec.cells[at] >> 16 & 0xFF;
}
static uint32_t entries_of(uint32_t at) {
    return rec.cells[at] >> 24 & 0xFFFF;
}
static uint32_t layer_of(uint32_t at) {
    return (uint32_t)(rec.cells[at] >> 40);
}
static uint32_t expert_of(uint32_t at, uint32_t i) {
    return rec.cells[at + 2 + i] >> 13 & 0x1FFFFF;
}
static uint32_t outcome_of(uint32_t at, uint32_t i) {
    return rec.cells[at + 2 + i] >> 34 & 3;
}

static void check_record(uint32_t *at, uint32_t kind, uint32_t who, uint32_t layer, uint32_t n, const uint32_t *experts,
                         const uint32_t *outcomes) {
    CHECK(*at + 2 + n <= rec.n);
    CHECK_EQ(kind_of(*at), kind);
    CHECK_EQ(who_of(*at), who);
    CHECK_EQ(layer_of(*at), layer);
    CHECK_EQ(entries_of(*at), n);
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EQ(expert_of(*at, i), layer * SMALL.experts + experts[i]);
        CHECK_EQ(outcome_of(*at, i), outcomes[i]);
    }
    *at += 2 + n;
}

static void test_a_script(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    testring_start(&t, 1);
    smoe_ring *one = testring_client(&t), *two = testring_client(&t);
    smoe_hold holds[3] = {0}, more[2] = {0}, claimed = {0};
    smoe_error e;
    const int64_t demand[] = {3, 1, 7}, guess[] = {9, 3}, again[] = {1, 9}, ranks[] = {11, 10, 2};

    CHECK_EQ(smoe_fetch(one, 1, demand, 3, holds, -1, &e), 0); /* before: not written down */
    smoe_release(one, holds, 3);
    start(&t);
    CHECK_EQ(smoe_busy(one, 1), 1);
    CHECK_EQ(smoe_busy(one, 1), 2); /* no edge */
    CHECK_EQ(smoe_fetch(one, 1, demand, 3, holds, -1, &e), 3);
    CHECK_EQ(smoe_trace_ranks(one, 1, ranks, 3, &e), 0);
    CHECK_EQ(smoe_speculate(one, 1, guess, 2, &e), 1);
    testring_settle(&t);
    CHECK_EQ(smoe_fetch(two, 1, again, 2, more, -1, &e), 2);
    CHECK_EQ(smoe_claim_specific(two, 1, 7, &claimed, &e), 1);
    CHECK_EQ(smoe_claim_specific(two, 0, 7, &claimed, &e), 0); /* not there: nothing */
    smoe_release(one, holds, 3);
    smoe_release(two, more, 2);
    const int64_t twice[] = {4, 4};
    CHECK_EQ(smoe_acquire(two, 0, twice, 2, more, -1, &e), SMOE_EID); /* nothing was demanded */
    CHECK_EQ(smoe_busy(one, 0), 1);
    CHECK_EQ(smoe_busy(one, 0), 0);

    uint32_t at = 0;
    drain(0);
    check_record(&at, SMOE_TRACE_BUSY, 0, 0, 0, NULL, NULL);
    check_record(&at, SMOE_TRACE_DEMAND, 0, 1, 3, (uint32_t[]){3, 1, 7}, (uint32_t[]){1, 1, 1});
    check_record(&at, SMOE_TRACE_RANKS, 0, 1, 3, (uint32_t[]){11, 10, 2}, (uint32_t[]){0, 0, 0});
    check_record(&at, SMOE_TRACE_GUESS, 0, 1, 2, (uint32_t[]){9, 3}, (uint32_t[]){0, 1});
    check_record(&at, SMOE_TRACE_DEMAND, 1, 1, 2, (uint32_t[]){1, 9}, (uint32_t[]){1, 1});
    check_record(&at, SMOE_TRACE_CLAIM, 1, 1, 1, (uint32_t[]){7}, (uint32_t[]){1});
    check_record(&at, SMOE_TRACE_IDLE, 0, 0, 0, NULL, NULL);
    CHECK_EQ(at, rec.n);
    CHECK_EQ(rec.lost, 0);

    CHECK(smoe_trace_record(rec.ring, 0) >= 0);
    CHECK_EQ(*smoe_tracing(one), 0);
    CHECK_EQ(smoe_fetch(one, 1, demand, 3, holds, -1, &e), 3);
    CHECK_EQ(drain(0), 0);
    smoe_release(one, holds, 3);
    smoe_release(two, &claimed, 1);
    testring_close(&t);
}

static void test_dropped_guesses(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *one = testring_client(&t);
    smoe_error e;
    const int64_t guess[] = {0, 1, 2, 3, 4, 5};
    start(&t);
    CHECK_EQ(smoe_speculate(one, 0, guess, 6, &e), 4); /* a quarter of 16 slots */
    uint32_t at = 0;
    drain(0);
    check_record(&at, SMOE_TRACE_GUESS, 0, 0, 6, (uint32_t[]){0, 1, 2, 3, 4, 5}, (uint32_t[]){0, 0, 0, 0, 2, 2});
    testring_close(&t);
}

static void demand_many(smoe_ring *r, uint32_t times) {
    smoe_hold h = {0};
    smoe_error e;
    for (uint32_t i = 0; i < times; i++) {
        int64_t expert = i % 4;
        CHECK(smoe_acquire(r, 0, &expert, 1, &h, -1, &e) >= 0);
        smoe_release(r, &h, 1);
    }
}

/* The recorder slept through more than a lap: what is left is whole and in order, and the rest is counted. */
static void test_overtaken(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    testring_start(&t, 1);
    smoe_ring *one = testring_client(&t);
    const uint32_t times = SMOE_TRACE_CELLS / 3 * 2; /* a demand of one is 3 cells */
    demand_many(one, 4);
    testring_settle(&t);
    start(&t);
    demand_many(one, times);
    drain(0);
    CHECK(rec.n > SMOE_TRACE_CELLS - 3);
    CHECK_EQ(rec.n % 3, 0);
    CHECK_EQ(rec.lost + rec.n, 3ull * times);
    uint32_t next = (times - rec.n / 3) % 4;
    for (uint32_t at = 0; at < rec.n; next = (next + 1) % 4)
        check_record(&at, SMOE_TRACE_DEMAND, 0, 0, 1, &next, (uint32_t[]){1});
    CHECK_EQ(drain(0), 0);
    testring_close(&t);
}

/* A writer that has drawn its cells and is not done, or was killed. */
static void test_unfinished(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    testring_start(&t, 1);
    smoe_ring *one = testring_client(&t), *two = testring_client(&t);
    start(&t);
    uint64_t slow = trace_begin(one, SMOE_TRACE_DEMAND, 1, 2);
    trace_entry(one, slow, 12, SMOE_TRACE_ASKED);
    demand_many(two, 1);
    CHECK_EQ(drain(0), 0); /* it waits */
    trace_entry(one, slow + 1, 13, SMOE_TRACE_THERE);
    CHECK_EQ(drain(0), 4 + 3);
    uint32_t at = 0;
    check_record(&at, SMOE_TRACE_DEMAND, 0, 1, 2, (uint32_t[]){0, 1}, (uint32_t[]){0, 1});
    CHECK_EQ(rec.lost, 0);

    trace_begin(one, SMOE_TRACE_DEMAND, 1, 2); /* and dies */
    demand_many(two, 2);
    CHECK_EQ(drain(0), 0);
    CHECK_EQ(drain(1), 6);
    CHECK_EQ(rec.lost, 4);
    testring_close(&t);
}

static void test_room_and_rights(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *one = testring_client(&t);
    smoe_error e;
    CHECK_EQ(smoe_trace_record(one, 1), -EPERM);
    CHECK_EQ(smoe_trace_read(one, 0, &rec.position, &rec.lost, rec.cells, 8), -EPERM);
    start(&t);
    smoe_ring *second;
    CHECK_EQ(testring_try_attach(&t, SMOE_ROLE_TRACE, 0, &second, &e), SMOE_ETAKEN);
    demand_many(one, 2);
    CHECK_EQ(smoe_trace_read(rec.ring, 0, &rec.position, &rec.lost, rec.cells, 2), -ENOBUFS);
    CHECK_EQ(smoe_trace_read(rec.ring, 0, &rec.position, &rec.lost, rec.cells, 5), 3);
    CHECK_EQ(smoe_trace_read(rec.ring, 0, &rec.position, &rec.lost, rec.cells, 5), 3);
    testring_detach(&t, rec.ring); /* and nobody records any more */
    CHECK_EQ(*smoe_tracing(one), 0);
    testring_close(&t);
}

/* Threads of clients write while it is read: each client's demands come in its own order, none is missing. */
enum { WRITERS = 4, TIMES = 3000 };

static void *write_sequence(void *arg) {
    smoe_ring *r = arg;
    smoe_hold h[2] = {0};
    smoe_error e;
    for (uint32_t i = 0; i < TIMES; i++) {
        int64_t experts[2] = {i % 6, (i + 1 + i / 6 % 5) % 6}; /* twelve in all: they fit the ring */
        CHECK(smoe_acquire(r, i % 2, experts, 2, h, -1, &e) >= 0);
        smoe_release(r, h, 2);
    }
    return NULL;
}

static void test_writers_race(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    testring_start(&t, 2);
    smoe_ring *clients[WRITERS];
    pthread_t threads[WRITERS];
    uint32_t seen[WRITERS] = {0}, done = 0;
    start(&t);
    for (uint32_t i = 0; i < WRITERS; i++) {
        clients[i] = testring_client(&t);
        REQUIRE(pthread_create(&threads[i], NULL, write_sequence, clients[i]) == 0);
    }
    while (done < WRITERS * TIMES) {
        if (drain(0) == 0)
            sched_yield();
        for (uint32_t at = 0; at < rec.n; at += 2 + entries_of(at), done++) {
            uint32_t i = seen[who_of(at)]++;
            CHECK_EQ(kind_of(at), SMOE_TRACE_DEMAND);
            CHECK_EQ(layer_of(at), i % 2);
            CHECK_EQ(expert_of(at, 0), i % 2 * 12 + i % 6);
            CHECK_EQ(expert_of(at, 1), i % 2 * 12 + (i + 1 + i / 6 % 5) % 6);
        }
    }
    for (uint32_t i = 0; i < WRITERS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(seen[i], TIMES);
    }
    CHECK_EQ(rec.lost, 0);
    testring_settle(&t);
    testring_close(&t);
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"a script of two clients", test_a_script},
        {"guesses that are dropped", test_dropped_guesses},
        {"a recorder that is overtaken", test_overtaken},
        {"a writer that does not finish", test_unfinished},
        {"room, rights, one recorder at a time", test_room_and_rights},
        {"writers race", test_writers_race},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
