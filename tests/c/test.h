/* test.h: checks, a runner, and a random number generator with a seed. */
#ifndef TEST_H
#define TEST_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

struct test {
    const char *name;
    void (*run)(void);
};

/* Run those whose name contains argv[1], or all; one line each.  The program's exit status. */
int run_tests(const struct test *tests, int n, int argc, char **argv);

void test_fail(const char *file, int line, const char *what);
void test_fail_eq(const char *file, int line, const char *what, int64_t got, int64_t want);
_Noreturn void test_die(const char *file, int line, const char *what);
int test_failures(void);

/* A check that fails is counted, and the test goes on.  May be used by any thread. */
#define CHECK(condition)    ((condition) ? (void)0 : test_fail(__FILE__, __LINE__, #condition))
#define CHECK_EQ(got, want) check_eq((int64_t)(got), (int64_t)(want), #got, __FILE__, __LINE__)
/* For what the rest of the program stands on. */
#define REQUIRE(condition) ((condition) ? (void)0 : test_die(__FILE__, __LINE__, #condition))

/* Wait for what another thread is about to do.  No limit of its own: the program's alarm is one. */
#define UNTIL(condition)                                                                                               \
    do {                                                                                                               \
        while (!(condition))                                                                                           \
            sched_yield();                                                                                             \
    } while (0)

static inline void check_eq(int64_t got, int64_t want, const char *what, const char *file, int line) {
    if (got != want)
        test_fail_eq(file, line, what, got, want);
}

/* splitmix64: all of its state is the seed. */
static inline uint64_t random_next(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}
static inline uint32_t random_below(uint64_t *state, uint32_t n) {
    return (uint32_t)(random_next(state) >> 32) % n;
}

#endif
