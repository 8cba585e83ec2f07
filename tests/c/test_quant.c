/* test_quant.c: quantisation by whatever vector instructions there are equals that without, bit for bit; and
 * both equal the format's text, one weight after the other.  That the results are the original's is tested
 * in Python, against its own files. */
#include "core.h"
#include "test.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GROUPS 3000u
#define GROUP  64u

static float candidates[64];

static void make_weights(float *w) {
    uint64_t seed = 5;
    for (uint32_t g = 0; g < GROUPS; g++) {
        float size = ldexpf(1.0f, (int)random_below(&seed, 40) - 30);
        for (uint32_t i = 0; i < GROUP; i++) {
            float u = (float)(random_next(&seed) >> 40) / (float)(1 << 24) - 0.5f;
            w[g * GROUP + i] = g % 7 == 0 ? roundf(u * 8) * size : u * size; /* also exact halves of a step */
        }
        if (g % 11 == 0)
            memset(w + g * GROUP, 0, GROUP * sizeof *w);
        if (g % 13 == 0)
            w[g * GROUP + 5] = -0.0f;
        if (g % 17 == 0)
            w[g * GROUP + 9] = 1e-42f; /* below the normal numbers */
    }
}

static float largest(const float *w) {
    float most = 0;
    for (uint32_t i = 0; i < GROUP; i++)
        most = fmaxf(most, fabsf(w[i]));
    return most;
}

static int code_of(float w, float scale, float half) {
    float q = w / (scale == 0 ? 1 : scale);
    q = q * half;
    q = q + half;
    return (int)fminf(fmaxf(rintf(q), 0), 2 * half);
}

static void by_the_text(const float *w, int bits, int *codes, float *scale) {
    float half = bits == 4 ? 7.5f : 1.5f, most = largest(w), least = INFINITY;
    *scale = bits == 4 ? (most == 0 ? 1 : most) : 0;
    for (int c = 0; bits == 2 && c < 64; c++) {
        float s = most * candidates[c], sum[8] = {0};
        for (uint32_t i = 0; i < GROUP; i++) {
            float e = (float)code_of(w[i], s, half) - half;
            e = e / half;
            e = e * s;
            e = e - w[i];
            e = e * e;
            sum[i % 8] = sum[i % 8] + e;
        }
        float error = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
        if (error < least)
            least = error, *scale = s;
    }
    for (uint32_t i = 0; i < GROUP; i++)
        codes[i] = code_of(w[i], *scale, half);
}

static void compare(int bits) {
    float *w = malloc(GROUPS * GROUP * sizeof *w), scales[2][GROUPS];
    uint32_t bytes = GROUP * (uint32_t)bits / 8;
    unsigned char *codes[2] = {malloc(GROUPS * bytes), malloc(GROUPS * bytes)};
    REQUIRE(w && codes[0] && codes[1]);
    make_weights(w);
    CHECK_EQ(smoe_quantize(w, GROUPS, bits, candidates, codes[0], scales[0]), 0);
    CHECK_EQ(quantize_plainly(w, GROUPS, bits, candidates, codes[1], scales[1]), 0);
    CHECK(memcmp(codes[0], codes[1], GROUPS * bytes) == 0);
    CHECK(memcmp(scales[0], scales[1], sizeof scales[0]) == 0);
    uint32_t wrong = 0;
    for (uint32_t g = 0; g < GROUPS; g++) {
        int want[GROUP];
        float scale;
        by_the_text(w + g * GROUP, bits, want, &scale);
        wrong += scale != scales[0][g];
        for (uint32_t i = 0; i < GROUP; i++) {
            uint32_t bit = i * (uint32_t)bits;
            wrong += (codes[0][g * bytes + bit / 8] >> bit % 8 & ((1 << bits) - 1)) != want[i];
        }
    }
    CHECK_EQ(wrong, 0);
    free(w);
    free(codes[0]);
    free(codes[1]);
}

static void four_bits(void) {
    compare(4);
}

static void two_bits(void) {
    compare(2);
}

static void refusals(void) {
    float w[2 * GROUP] = {0}, scales[2];
    unsigned char codes[GROUP];
    const float bad[] = {INFINITY, -INFINITY, NAN, -NAN, 65520.0f, -65520.0f};
    CHECK_EQ(smoe_quantize(w, 2, 3, candidates, codes, scales), -EINVAL);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        for (int bits = 2; bits <= 4; bits += 2) {
            w[GROUP + 40] = bad[i];
            CHECK_EQ(smoe_quantize(w, 2, bits, candidates, codes, scales), -ERANGE);
            CHECK_EQ(quantize_plainly(w, 2, bits, candidates, codes, scales), -ERANGE);
        }
    w[GROUP + 40] = 65519.0f;
    CHECK_EQ(smoe_quantize(w, 2, 4, candidates, codes, scales), 0);
    CHECK(scales[1] == 65519.0f && scales[0] == 1.0f);
}

int main(int argc, char **argv) {
    static const struct test tests[] = {{"four bits", four_bits}, {"two bits", two_bits}, {"refusals", refusals}};
    for (int i = 0; i < 64; i++)
        candidates[i] = 0.1f + (float)i * (0.9f / 63);
    return run_tests(tests, 3, argc, argv);
}
