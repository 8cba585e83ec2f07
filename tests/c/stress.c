/* stress.c: many clients and workers on the smallest ring that serves them.
 *
 *     stress [rounds [seed]]            (or SMOE_STRESS_ROUNDS)
 *
 * Every byte of every held expert is checked, twice with a pause between, while other threads demand,
 * evict, guess and read.  In the last run a thread keeps changing a file's mtime, so that reads fail now
 * and then.  At the end nothing is held, loading or reserved.
 */
#define _GNU_SOURCE
#include "testring.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define BATCH    3
#define LIMIT_MS 120000 /* the program's alarm comes first or not at all */

struct plan {
    const char *name;
    uint32_t clients, threads, workers, slots; /* threads: of each client */
    bool failing;
};

struct stress {
    struct testring ring;
    const struct plan *plan;
    uint32_t rounds;
    _Atomic bool ended;
    _Atomic uint64_t checked, failed, busy;
};

struct actor {
    struct stress *s;
    smoe_ring *r;
    uint64_t seed;
    pthread_t thread;
};

/* Did the call do what it was to?  Reads may fail where files are made to. */
static bool fine(struct actor *a, int rc, const smoe_error *e) {
    if (rc >= 0)
        return true;
    if (rc == SMOE_EREAD && a->s->plan->failing) {
        CHECK_EQ(e->os_error, SMOE_READ_CHANGED);
        atomic_fetch_add(&a->s->failed, 1);
        return false;
    }
    CHECK_EQ(rc, 0);
    printf("  %s: %s (wanted %" PRIu64 ", got %" PRIu64 ")\n", smoe_strerror(rc), e->call, e->wanted, e->got);
    return false;
}

static void check_bytes(struct actor *a, const smoe_hold *h) {
    uint64_t word = slot_word(a->r, h->slot);
    CHECK(word & a->r->bit);
    CHECK(WORD_EXPERT(word) == h->expert_index && word_resident(word));
    CHECK(testring_bytes_ok(&a->s->ring, a->r, h));
    atomic_fetch_add_explicit(&a->s->checked, 1, memory_order_relaxed);
}

static void pause_a_little(struct actor *a) {
    for (uint32_t i = random_below(&a->seed, 3); i > 0; i--)
        sched_yield();
}

/* Experts of one layer, each once; half of the time from the few popular ones. */
static uint32_t pick(struct actor *a, int64_t *layer, int64_t *experts) {
    uint32_t n = 1 + random_below(&a->seed, BATCH), of = a->s->ring.shape.experts;
    if (random_below(&a->seed, 2))
        of = BATCH + 1;
    *layer = random_below(&a->seed, a->s->ring.shape.layers);
    uint32_t first = random_below(&a->seed, of);
    for (uint32_t i = 0; i < n; i++)
        experts[i] = (first + i) % of;
    if (n > 1 && random_below(&a->seed, 2)) {
        int64_t swap = experts[0];
        experts[0] = experts[n - 1];
        experts[n - 1] = swap;
    }
    return n;
}

static void release_in_any_order(struct actor *a, smoe_hold *holds, uint32_t n) {
    uint32_t from = random_below(&a->seed, n);
    for (uint32_t i = 0; i < n; i++) {
        smoe_hold *h = &holds[(from + i) % n];
        if (h->status == SMOE_HOLD_NONE)
            continue;
        if (h->status == SMOE_HOLD_RESIDENT)
            check_bytes(a, h);
        CHECK_EQ(smoe_release(a->r, h, 1), 1);
        pause_a_little(a);
    }
}

/* More holds on what is held already, and one on what may be there. */
static void nest(struct actor *a, int64_t layer, const int64_t *experts, const smoe_hold *holds, uint32_t n) {
    smoe_hold again, claimed, more;
    smoe_error e;
    uint32_t i = random_below(&a->seed, n);
    CHECK_EQ(smoe_hold_again(a->r, &holds[i], &again), 0);
    int rc = smoe_claim_specific(a->r, layer, experts[i], &claimed, &e);
    CHECK(rc >= 0);
    if (rc == 1)
        check_bytes(a, &claimed);
    rc = smoe_acquire_nowait(a->r, layer, &experts[i], 1, &more, &e);
    if (rc == SMOE_EBUSY)
        atomic_fetch_add(&a->s->busy, 1);
    else if (rc >= 0 && more.slot == holds[i].slot) /* mostly: its home may have moved */
        CHECK_EQ(more.hit, 1);
    check_bytes(a, &again);
    smoe_release(a->r, &claimed, 1);
    pause_a_little(a);
    smoe_release(a->r, &again, 1);
    smoe_release(a->r, &more, 1);
}

static void do_fetch(struct actor *a) {
    int64_t layer, experts[BATCH];
    smoe_hold holds[BATCH];
    smoe_error e;
    uint32_t n = pick(a, &layer, experts);
    if (!fine(a, smoe_fetch(a->r, layer, experts, n, holds, LIMIT_MS, &e), &e))
        return;
    for (uint32_t i = 0; i < n; i++)
        check_bytes(a, &holds[i]);
    if (random_below(&a->seed, 3) == 0)
        nest(a, layer, experts, holds, n);
    pause_a_little(a);
    release_in_any_order(a, holds, n);
}

static void do_as_ready(struct actor *a) {
    int64_t layer, experts[BATCH];
    smoe_hold holds[BATCH];
    smoe_error e;
    uint32_t n = pick(a, &layer, experts);
    int rc = random_below(&a->seed, 2) ? smoe_acquire(a->r, layer, experts, n, holds, LIMIT_MS, &e)
                                       : smoe_acquire_cold(a->r, layer, experts, n, holds, 1, LIMIT_MS, &e);
    if (!fine(a, rc, &e))
        return;
    for (uint32_t i = 0; i < n; i++)
        if (holds[i].status == SMOE_HOLD_RESIDENT)
            check_bytes(a, &holds[i]);
    for (;;) {
        rc = smoe_wait_any(a->r, holds, n, LIMIT_MS, &e);
        if (rc == -ENOENT)
            break;
        if (!fine(a, rc, &e))
            continue; /* that hold is gone, the others are not */
        check_bytes(a, &holds[rc]);
        if (random_below(&a->seed, 2))
            CHECK_EQ(smoe_release(a->r, &holds[rc], 1), 1);
    }
    release_in_any_order(a, holds, n);
}

/* Demanded, and given up while it is still loading. */
static void do_give_up(struct actor *a) {
    int64_t layer, experts[BATCH];
    smoe_hold holds[BATCH];
    smoe_error e;
    uint32_t n = pick(a, &layer, experts);
    if (!fine(a, smoe_acquire(a->r, layer, experts, n, holds, LIMIT_MS, &e), &e))
        return;
    pause_a_little(a);
    release_in_any_order(a, holds, n);
}

static void do_claim(struct actor *a) {
    int64_t layer, experts[BATCH];
    smoe_hold h;
    smoe_error e;
    pick(a, &layer, experts);
    int rc = smoe_claim_specific(a->r, layer, experts[0], &h, &e);
    CHECK(rc == 0 || rc == 1);
    if (rc != 1)
        return;
    check_bytes(a, &h);
    pause_a_little(a);
    check_bytes(a, &h);
    CHECK_EQ(smoe_release(a->r, &h, 1), 1);
}

static void do_speculate(struct actor *a) {
    int64_t layer, experts[BATCH];
    smoe_error e;
    uint32_t n = pick(a, &layer, experts);
    CHECK(smoe_speculate(a->r, layer, experts, n, &e) >= 0);
}

static void *act(void *arg) {
    static void (*const deeds[])(struct actor *) = {do_fetch,   do_fetch, do_as_ready,
                                                    do_give_up, do_claim, do_speculate};
    struct actor *a = arg;
    for (uint32_t i = 0; i < a->s->rounds && test_failures() == 0; i++)
        deeds[random_below(&a->seed, sizeof deeds / sizeof *deeds)](a);
    return NULL;
}

static void *spoil(void *arg) {
    struct stress *s = arg;
    for (uint64_t i = 0; !atomic_load(&s->ended); i++) {
        testring_touch(&s->ring, 1, i % 8 == 0);
        sched_yield();
    }
    testring_touch(&s->ring, 1, false);
    return NULL;
}

static void run_actors(struct stress *s, uint64_t seed) {
    const struct plan *p = s->plan;
    struct actor actors[64];
    uint32_t n = p->clients * p->threads;
    pthread_t spoiler;
    REQUIRE(n <= 64);
    for (uint32_t i = 0; i < n; i++)
        actors[i] = (struct actor){
            .s = s,
            .r = i % p->threads ? actors[i - 1].r : testring_client(&s->ring),
            .seed = seed * 1000 + i,
        };
    if (p->failing)
        REQUIRE(pthread_create(&spoiler, NULL, spoil, s) == 0);
    for (uint32_t i = 0; i < n; i++)
        REQUIRE(pthread_create(&actors[i].thread, NULL, act, &actors[i]) == 0);
    for (uint32_t i = 0; i < n; i++)
        pthread_join(actors[i].thread, NULL);
    atomic_store(&s->ended, true);
    if (p->failing)
        pthread_join(spoiler, NULL);
}

static bool run(const struct plan *p, uint32_t rounds, uint64_t seed) {
    static struct stress s;
    struct shape shape = {.layers = 3, .experts = 16, .slots = p->slots, .part_bytes = 6000, .seed = (uint32_t)seed};
    int before = test_failures();
    s = (struct stress){.plan = p, .rounds = rounds};
    testring_open(&s.ring, &shape);
    testring_start(&s.ring, p->workers);
    run_actors(&s, seed);
    testring_settle(&s.ring); /* the last guesses */
    testring_stop(&s.ring);
    testring_check_quiet(&s.ring);
    bool ok = test_failures() == before;
    printf("%s %s: %" PRIu64 " checks, %" PRIu64 " hits, %" PRIu64 " reads, %" PRIu64 " promoted, %" PRIu64
           " read errors, %" PRIu64 " busy\n",
           ok ? "ok    " : "FAILED", p->name, atomic_load(&s.checked), testring_counter(&s.ring, SMOE_C_HITS),
           testring_counter(&s.ring, SMOE_C_READS), testring_counter(&s.ring, SMOE_C_PROMOTED), atomic_load(&s.failed),
           testring_counter(&s.ring, SMOE_C_BUSY_WAITS) + atomic_load(&s.busy));
    testring_close(&s.ring);
    return ok;
}

int main(int argc, char **argv) {
    static const struct plan plans[] = {
        {"one client, 3 slots", 1, 1, 1, BATCH, false},
        {"4 clients, 3 slots: one batch at a time", 4, 1, 2, BATCH, false},
        {"4 clients, 12 slots: just enough", 4, 1, 3, 4 * BATCH, false},
        {"3 clients of 3 threads, 12 slots", 3, 3, 3, 12, false},
        {"8 clients, 70 slots: more than all experts", 8, 1, 4, 70, false},
        {"4 clients of 2 threads, 8 slots, reads fail", 4, 2, 3, 8, true},
    };
    const char *env = getenv("SMOE_STRESS_ROUNDS");
    long rounds = argc > 1 ? atol(argv[1]) : env ? atol(env) : 600;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    int passed = 0, n = sizeof plans / sizeof *plans;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < n; i++)
        passed += run(&plans[i], (uint32_t)rounds, seed);
    printf("%d passed, %d failed\n", passed, n - passed);
    return passed == n ? 0 : 1;
}
