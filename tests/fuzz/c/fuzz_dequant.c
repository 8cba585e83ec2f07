/* fuzz_dequant.c: blocks of every type, of any shape and size, at any address, with and without wide vectors.
 *
 * The first 8 bytes say type, target, shape and what is wrong with the sizes; the rest are blocks and scales, in
 * memory of exactly their length, so that one byte beyond is seen. */
#include "smoe.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    const uint8_t *at;
    size_t left;
};

/* Memory of `bytes` bytes, `shift` behind an aligned address, with what is left of the input, again and again. */
static uint8_t *fill(struct input *in, size_t bytes, size_t shift, uint8_t **whole) {
    *whole = malloc(bytes + shift);
    if (!*whole)
        abort();
    uint8_t *at = *whole + shift;
    size_t n = in->left < bytes ? in->left : bytes;
    memset(at, 0x5A, bytes);
    if (n)
        memcpy(at, in->at, n);
    in->at += n;
    in->left -= n;
    return at;
}

static uint64_t scales_of(const smoe_block_type *t, uint64_t rows, uint64_t columns) {
    if (!t->scale_bytes)
        return 0;
    uint64_t n =
        t->tile ? (rows + t->tile - 1) / t->tile * ((columns + t->tile - 1) / t->tile) : rows * (columns / t->elements);
    return n * t->scale_bytes;
}

/* Bit for bit, but that any NaN is as good as another: which of two a product keeps is the processor's choice. */
static bool same(const void *a, const void *b, uint64_t bytes, uint32_t to) {
    uint32_t width = to == SMOE_TO_F32 ? 4 : 2, least = to == SMOE_TO_F16    ? 0x7C00u
                                                        : to == SMOE_TO_BF16 ? 0x7F80u
                                                                             : 0x7F800000u;
    for (uint64_t i = 0; i + width <= bytes; i += width) {
        uint32_t x = 0, y = 0, sign = 1u << (8 * width - 1);
        memcpy(&x, (const uint8_t *)a + i, width);
        memcpy(&y, (const uint8_t *)b + i, width);
        if (x != y && ((x & ~sign) <= least || (y & ~sign) <= least))
            return false;
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint32_t types = 0;
    while (smoe_block_type_at(types))
        types++;
    if (size < 8)
        return 0;
    const uint8_t *p = data;
    struct input in = {data + 8, size - 8};
    const smoe_block_type *t = smoe_block_type_at(p[0] % types);
    smoe_dequant_job job = {
        .type = p[0] % types,
        .to = p[1] % 4,
        .threads = p[1] & 64 ? 2 : 1,
        .rows = p[2] % 9,
        .columns = (uint64_t)(p[3] % 5) * t->elements + (p[5] & 1),
    };
    uint64_t blocks = job.rows * (job.columns / t->elements), out_bytes = job.rows * job.columns * (job.to ? 2 : 4);
    job.data_bytes = blocks * t->bytes + (p[5] & 2 ? p[6] : 0);
    job.scales_bytes = scales_of(t, job.rows, job.columns) + (p[5] & 4 ? p[6] : 0);
    job.out_bytes = out_bytes + (p[5] & 8 ? p[6] : 0);
    if (p[5] & 16) /* numbers whose product overflows */
        job.rows = (uint64_t)p[7] << 56 | p[6];
    if (p[5] & 32)
        job.columns = (uint64_t)p[7] << 57 | p[6];
    uint8_t *kept[4];
    job.data = fill(&in, job.data_bytes, p[4] % 9, &kept[0]);
    job.scales = t->scale_bytes ? fill(&in, job.scales_bytes, p[4] / 9 % 9, &kept[1]) : NULL;
    void *out[2];
    int rc[2];
    for (uint32_t plain = 0; plain < 2; plain++) {
        out[plain] = calloc(job.out_bytes ? job.out_bytes : 1, 1);
        job.plain = plain;
        job.out = out[plain];
        rc[plain] = smoe_dequantize(&job);
    }
    if (rc[0] != rc[1] || !same(out[0], out[1], job.out_bytes, job.to))
        abort();
    free(out[0]);
    free(out[1]);
    free(kept[0]);
    if (job.scales)
        free(kept[1]);
    return 0;
}
