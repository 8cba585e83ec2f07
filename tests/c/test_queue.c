/* test_queue.c: order, bounds, wrap-around, killed processes and contention of the slot queues. */
#include "core.h"
#include "test.h"

#include <pthread.h>
#include <string.h>

#define MOST      64u
#define NEAR_WRAP ((1ull << 48) - 5)

struct fixture {
    struct smoe_queue_pos pos;
    _Atomic uint64_t cells[MOST];
    struct queue q;
};

/* What the queue has to be like. */
struct model {
    uint32_t items[MOST];
    uint32_t n, capacity;
};

static uint64_t cell(uint64_t sequence, uint32_t slot) {
    return sequence << 16 | slot;
}

/* A queue as it is when positions have come to head and tail; item i is (first + i). */
static void fixture_at(struct fixture *f, struct model *m, uint32_t capacity, uint64_t head, uint64_t tail) {
    f->q = (struct queue){&f->pos, f->cells, capacity};
    atomic_store(&f->pos.head, head);
    atomic_store(&f->pos.tail, tail);
    *m = (struct model){.capacity = capacity};
    for (uint64_t p = head; p < head + capacity; p++) {
        uint32_t slot = (uint32_t)(p * 7 % 1000);
        atomic_store(&f->cells[p % capacity], p < tail ? cell(p + 1, slot) : cell(p, 0));
        if (p < tail)
            m->items[m->n++] = slot;
    }
}

static void both_push(struct fixture *f, struct model *m, uint32_t slot) {
    bool room = m->n < m->capacity;
    CHECK_EQ(queue_push(f->q, slot), room);
    if (room)
        m->items[m->n++] = slot;
}

static void both_pop(struct fixture *f, struct model *m) {
    CHECK_EQ(queue_pop(f->q), m->n ? (int)m->items[0] : -1);
    if (m->n)
        memmove(m->items, m->items + 1, --m->n * sizeof *m->items);
}

static void test_fifo(void) {
    struct fixture f;
    memset(&f, 0, sizeof f);
    f.q = (struct queue){&f.pos, f.cells, 8};
    queue_init(f.cells, 8);
    CHECK(queue_empty(f.q));
    CHECK_EQ(queue_pop(f.q), -1);
    const uint32_t slots[] = {0, 65535, 7, 7, 1};
    for (int i = 0; i < 5; i++)
        CHECK(queue_push(f.q, slots[i]));
    CHECK(!queue_empty(f.q));
    CHECK_EQ(queue_length(f.q), 5);
    for (int i = 0; i < 5; i++)
        CHECK_EQ(queue_pop(f.q), slots[i]);
    CHECK_EQ(queue_pop(f.q), -1);
    CHECK(queue_empty(f.q));
}

static void test_full(void) {
    struct fixture f;
    struct model m;
    for (uint32_t capacity = 2; capacity <= MOST; capacity *= 2) {
        fixture_at(&f, &m, capacity, 0, 0);
        for (uint32_t i = 0; i < capacity + 2; i++)
            both_push(&f, &m, i);
        CHECK_EQ(queue_length(f.q), capacity);
        both_pop(&f, &m);
        both_push(&f, &m, 99);
        both_push(&f, &m, 100);
        for (uint32_t i = 0; i < capacity + 2; i++)
            both_pop(&f, &m);
    }
}

static void run_laps(uint64_t from) {
    struct fixture f;
    struct model m;
    for (uint32_t capacity = 2; capacity <= MOST; capacity *= 2) {
        uint64_t seed = capacity;
        fixture_at(&f, &m, capacity, from, from);
        for (int i = 0; i < 20000; i++) {
            if (random_below(&seed, 2))
                both_push(&f, &m, random_below(&seed, 65536));
            else
                both_pop(&f, &m);
            CHECK_EQ(queue_empty(f.q), m.n == 0);
            CHECK_EQ(queue_length(f.q), m.n);
        }
    }
}

static void test_laps(void) {
    run_laps(0);
}

static void test_sequence_wrap(void) {
    run_laps(NEAR_WRAP);
}

/* Six operations, in every order, on a queue left behind by a pusher that was killed before it moved the
 * tail, or a popper before it moved the head, or both. */
static void after_kill(uint32_t capacity, uint64_t head, uint64_t tail, bool tail_lags, bool head_lags) {
    struct fixture f;
    struct model m;
    for (uint32_t order = 0; order < 64; order++) {
        fixture_at(&f, &m, capacity, head, tail);
        atomic_fetch_sub(&f.pos.tail, tail_lags);
        atomic_fetch_sub(&f.pos.head, head_lags);
        if (m.n)
            CHECK(!queue_empty(f.q)); /* workers would sleep on it */
        for (uint32_t i = 0; i < 6; i++) {
            if (order >> i & 1)
                both_push(&f, &m, 1000 + i);
            else
                both_pop(&f, &m);
        }
        while (m.n)
            both_pop(&f, &m);
        both_pop(&f, &m);
        CHECK(queue_empty(f.q));
        both_push(&f, &m, 5);
        both_pop(&f, &m);
    }
}

static void test_killed(void) {
    const uint64_t starts[] = {1, NEAR_WRAP};
    for (uint32_t capacity = 2; capacity <= 8; capacity *= 2)
        for (int from = 0; from < 2; from++)
            for (uint64_t head = starts[from]; head < starts[from] + 2 * capacity; head++)
                for (uint64_t tail = head; tail <= head + capacity; tail++)
                    for (int lag = 0; lag < 4; lag++)
                        after_kill(capacity, head, tail, lag & 1, lag >> 1);
}

/* --- contention ------------------------------------------------------------------------------------- */

#define SIDES  4
#define VALUES 1024u /* different payloads of one pusher */
#define LAPS   20u

static struct fixture shared;
static _Atomic uint32_t popped[SIDES * VALUES];
static _Atomic uint32_t popped_total;

static void *push_all(void *arg) {
    uint32_t base = *(const uint32_t *)arg * VALUES;
    for (uint32_t i = 0; i < VALUES * LAPS; i++)
        UNTIL(queue_push(shared.q, base + i % VALUES));
    return NULL;
}

static void *pop_all(void *arg) {
    (void)arg;
    while (atomic_load(&popped_total) < SIDES * VALUES * LAPS) {
        int slot = queue_pop(shared.q);
        if (slot < 0) {
            sched_yield();
            continue;
        }
        REQUIRE((uint32_t)slot < SIDES * VALUES);
        atomic_fetch_add(&popped[slot], 1);
        atomic_fetch_add(&popped_total, 1);
    }
    return NULL;
}

/* Nothing is lost, nothing comes twice. */
static void test_contention(void) {
    pthread_t threads[2 * SIDES];
    uint32_t numbers[SIDES];
    struct model m;
    fixture_at(&shared, &m, 16, NEAR_WRAP - 1000, NEAR_WRAP - 1000);
    for (uint32_t i = 0; i < SIDES; i++) {
        numbers[i] = i;
        REQUIRE(pthread_create(&threads[i], NULL, push_all, &numbers[i]) == 0);
        REQUIRE(pthread_create(&threads[SIDES + i], NULL, pop_all, NULL) == 0);
    }
    for (uint32_t i = 0; i < 2 * SIDES; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < SIDES * VALUES; i++)
        CHECK_EQ(atomic_load(&popped[i]), LAPS);
    CHECK_EQ(queue_pop(shared.q), -1);
}

/* One pusher, one popper: the order is kept while both run. */
static void *push_in_order(void *arg) {
    (void)arg;
    for (uint32_t i = 0; i < 100000; i++)
        UNTIL(queue_push(shared.q, i & 0xFFFF));
    return NULL;
}

static void test_order_between_two(void) {
    pthread_t thread;
    struct model m;
    fixture_at(&shared, &m, 4, 0, 0);
    REQUIRE(pthread_create(&thread, NULL, push_in_order, NULL) == 0);
    for (uint32_t i = 0; i < 100000; i++) {
        int slot;
        UNTIL((slot = queue_pop(shared.q)) >= 0);
        CHECK_EQ(slot, i & 0xFFFF);
    }
    pthread_join(thread, NULL);
}

/* Whatever stands in cells and positions: a call ends, and what it pops is a number of 16 bits. */
static void test_written_over(void) {
    static const uint64_t far[] = {0,          1,         2,         1ull << 20, 1ull << 46, (1ull << 47) - 1,
                                   1ull << 47, NEAR_WRAP, UINT64_MAX};
    uint64_t seed = 5;
    for (uint32_t turn = 0; turn < 2000; turn++) {
        struct fixture f;
        struct model m;
        fixture_at(&f, &m, 1u << (1 + turn % 6), 0, 0);
        for (uint32_t i = 0; i < f.q.capacity; i++)
            if (turn % 3 == 0 || random_below(&seed, 2)) /* all of them, or some */
                atomic_store(&f.cells[i], cell(far[turn % 9] + random_below(&seed, 2) * i, i));
        if (turn % 2)
            atomic_store(&f.pos.head, far[random_below(&seed, 9)]);
        if (turn % 5)
            atomic_store(&f.pos.tail, far[random_below(&seed, 9)]);
        for (uint32_t i = 0; i < 4; i++) {
            CHECK(queue_pop(f.q) <= 0xFFFF);
            (void)queue_push(f.q, i);
        }
    }
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"first in, first out", test_fifo},
        {"full and empty at every capacity", test_full},
        {"many laps against a model", test_laps},
        {"the 48-bit sequence wraps", test_sequence_wrap},
        {"killed pusher and popper, all combinations", test_killed},
        {"four pushers and four poppers", test_contention},
        {"cells and positions that somebody wrote over", test_written_over},
        {"order between one pusher and one popper", test_order_between_two},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
