/* test.c: see test.h. */
#define _GNU_SOURCE
#include "test.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Atomic int failures;

int test_failures(void) {
    return atomic_load(&failures);
}

void test_fail(const char *file, int line, const char *what) {
    if (atomic_fetch_add(&failures, 1) < 100) /* a broken loop need not fill the log */
        printf("  %s:%d: %s\n", file, line, what);
}

void test_fail_eq(const char *file, int line, const char *what, int64_t got, int64_t want) {
    if (atomic_fetch_add(&failures, 1) < 100)
        printf("  %s:%d: %s is %" PRId64 " (0x%" PRIx64 "), not %" PRId64 "\n", file, line, what, got, (uint64_t)got,
               want);
}

void test_die(const char *file, int line, const char *what) {
    printf("  %s:%d: %s: cannot go on\n", file, line, what);
    exit(1); /* atexit removes rings and files */
}

int run_tests(const struct test *tests, int n, int argc, char **argv) {
    int passed = 0, failed = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < n; i++) {
        if (argc > 1 && !strstr(tests[i].name, argv[1]))
            continue;
        int before = test_failures();
        tests[i].run();
        bool ok = test_failures() == before;
        printf("%s %s\n", ok ? "ok    " : "FAILED", tests[i].name);
        passed += ok;
        failed += !ok;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}
