/* test_dequant.c: the dequantisers on memory of just the size they may touch (for AddressSanitizer), both forms
 * against each other, and the refusals.  What the numbers must be is held against the references from Python. */
#include "smoe.h"
#include "test.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 3, COLUMNS = 512, WEIGHTS = ROWS * COLUMNS };

/* A job with its memory: the input random, the output as large as `to` needs it. */
struct fixture {
    smoe_dequant_job job;
    void *data, *scales, *out;
};

static void *random_bytes(uint64_t *seed, uint64_t n) {
    uint8_t *bytes = malloc(n);
    REQUIRE(bytes);
    for (uint64_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)random_next(seed);
    return bytes;
}

static void open_fixture(struct fixture *f, uint32_t type, uint32_t to) {
    const smoe_block_type *t = smoe_block_type_at(type);
    uint64_t seed = 1 + type, scales = (WEIGHTS + t->elements - 1) / t->elements * t->scale_bytes;
    if (t->tile)
        scales = (uint64_t)(ROWS + t->tile - 1) / t->tile * ((COLUMNS + t->tile - 1) / t->tile) * t->scale_bytes;
    f->job = (smoe_dequant_job){.type = type,
                                .to = to,
                                .threads = 1,
                                .rows = ROWS,
                                .columns = COLUMNS,
                                .data_bytes = WEIGHTS / t->elements * t->bytes,
                                .scales_bytes = scales,
                                .out_bytes = WEIGHTS * (to == SMOE_TO_F32 ? 4 : 2)};
    f->data = random_bytes(&seed, f->job.data_bytes);
    f->scales = scales ? random_bytes(&seed, scales) : NULL;
    f->out = random_bytes(&seed, f->job.out_bytes);
    f->job.data = f->data;
    f->job.scales = f->scales;
    f->job.out = f->out;
}

static void close_fixture(struct fixture *f) {
    free(f->data);
    free(f->scales);
    free(f->out);
}

static void both_forms_and_threads_agree(void) {
    for (uint32_t type = 0; smoe_block_type_at(type); type++)
        for (uint32_t to = SMOE_TO_F32; to <= SMOE_TO_BF16; to++) {
            struct fixture f;
            open_fixture(&f, type, to);
            CHECK_EQ(smoe_dequantize(&f.job), 0);
            void *first = malloc(f.job.out_bytes);
            REQUIRE(first);
            memcpy(first, f.out, f.job.out_bytes);
            for (uint32_t threads = 1; threads <= 4; threads++) {
                memset(f.out, 0xA5, f.job.out_bytes);
                f.job.plain = 1;
                f.job.threads = threads;
                CHECK_EQ(smoe_dequantize(&f.job), 0);
                CHECK_EQ(memcmp(first, f.out, f.job.out_bytes), 0);
            }
            free(first);
            close_fixture(&f);
        }
}

/* Every size of a job off by one, or a product that would wrap: refused, and nothing is written. */
static void what_does_not_add_up_is_refused(void) {
    for (uint32_t type = 0; smoe_block_type_at(type); type++) {
        struct fixture f;
        open_fixture(&f, type, SMOE_TO_F32);
        memset(f.out, 0xA5, f.job.out_bytes);
        for (int fault = 0; fault < 12; fault++) {
            smoe_dequant_job job = f.job;
            job.data_bytes += (fault == 0) - (fault == 1);
            job.scales_bytes += (fault == 2) - (fault == 3);
            job.out_bytes += (fault == 4) - (fault == 5);
            job.rows = fault == 6 ? 0 : fault == 7 ? UINT64_MAX / COLUMNS + 1 + ROWS : job.rows;
            job.columns = fault == 8 ? 0 : job.columns;
            job.to = fault == 9 ? 3 : job.to;
            job.data = fault == 10 ? NULL : job.data;
            if (fault == 11)
                job.scales = f.job.scales ? NULL : f.data;
            CHECK_EQ(smoe_dequantize(&job), -EINVAL);
        }
        f.job.type = UINT32_MAX;
        CHECK_EQ(smoe_dequantize(&f.job), -EINVAL);
        for (uint64_t i = 0; i < f.job.out_bytes; i++)
            CHECK_EQ(((uint8_t *)f.out)[i], 0xA5);
        close_fixture(&f);
    }
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"both forms and threads agree", both_forms_and_threads_agree},
        {"what does not add up is refused", what_does_not_add_up_is_refused},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
