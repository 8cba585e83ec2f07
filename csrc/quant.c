/* quant.c: the two quantisations of `.smoe` vaults, from float32 weights to codes and scales.
 *
 * The format is told in smoe_mp/quant.py.  The result must be the original's to the bit, and the original
 * computes in float32, one operation after the other; so does this file, which is therefore compiled
 * without contraction (a fused multiply and add rounds once where the original rounds twice).  Two things
 * are not as they read there, and give the same numbers:
 *   - a code of Q2 is 0, 1, 2 or 3 by comparing with 0.5, 1.5 and 2.5, which is rounding half to even and
 *     clipping at once, and its four possible weights are worked out once a scale
 *   - the sum of 64 squares goes over eight partial sums, joined in pairs, as numpy's reduction of a
 *     contiguous row does
 *
 * A group is a loop of 64 without branches, which compilers turn into vector instructions; for x86-64 it is
 * compiled a second time for AVX2, chosen when the processor has it.
 */
#include "core.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define GROUP         64
#define Q2_CANDIDATES 64
/* Halfway between the largest float16 and the next step: from here on a float16 is infinite. */
#define TOO_LARGE 65520.0f
/* Added and taken away again, it leaves a number of at most 2^22 rounded half to even. */
#define ROUNDER 12582912.0f

#define INLINE static inline __attribute__((always_inline))

/* The largest absolute value, or a NaN or infinity where there is one. */
INLINE float largest(const float *w) {
    uint32_t most = 0;
    for (int i = 0; i < GROUP; i++) { /* without its sign a float orders as its bits do, NaN last */
        uint32_t bits;
        memcpy(&bits, &w[i], sizeof bits);
        bits &= 0x7FFFFFFFu;
        most = bits > most ? bits : most;
    }
    float f;
    memcpy(&f, &most, sizeof f);
    return f;
}

INLINE int q4_group(const float *w, unsigned char *codes, float *scale) {
    float s = largest(w);
    if (!(s < TOO_LARGE))
        return -ERANGE;
    if (s == 0)
        s = 1;
    int32_t code[GROUP];
    for (int i = 0; i < GROUP; i++) /* w / s is in [-1, 1], so nothing needs clipping */
        code[i] = (int32_t)(w[i] / s * 7.5f + 7.5f + ROUNDER - ROUNDER);
    for (int i = 0; i < GROUP / 2; i++)
        codes[i] = (unsigned char)(code[2 * i] | code[2 * i + 1] << 4);
    *scale = s;
    return 0;
}

/* The weights that codes 0 to 3 stand for. */
INLINE void q2_levels(float scale, float level[4]) {
    for (int code = 0; code < 4; code++)
        level[code] = ((float)code - 1.5f) / 1.5f * scale;
}

INLINE float q2_error(const float *w, float scale) {
    float level[4], sum[8] = {0}, divisor = scale == 0 ? 1 : scale;
    q2_levels(scale, level);
    for (int i = 0; i < GROUP; i += 8)
        for (int k = 0; k < 8; k++) {
            float q = w[i + k] / divisor * 1.5f + 1.5f;
            float low = q > 0.5f ? level[1] : level[0], high = q > 2.5f ? level[3] : level[2];
            float e = (q >= 1.5f ? high : low) - w[i + k];
            sum[k] += e * e;
        }
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

INLINE int q2_group(const float *w, const float *candidates, unsigned char *codes, float *scale) {
    float most = largest(w), best = 0, least = INFINITY;
    if (!(most < TOO_LARGE))
        return -ERANGE;
    for (int c = 0; c < Q2_CANDIDATES; c++) {
        float s = most * candidates[c], error = q2_error(w, s);
        if (error < least) {
            least = error;
            best = s;
        }
    }
    float divisor = best == 0 ? 1 : best;
    int32_t code[GROUP];
    for (int i = 0; i < GROUP; i++) {
        float q = w[i] / divisor * 1.5f + 1.5f;
        code[i] = (q > 0.5f) + (q >= 1.5f) + (q > 2.5f);
    }
    for (int i = 0; i < GROUP / 4; i++)
        codes[i] = (unsigned char)(code[4 * i] | code[4 * i + 1] << 2 | code[4 * i + 2] << 4 | code[4 * i + 3] << 6);
    *scale = best;
    return 0;
}

INLINE int all_groups(const float *w, uint64_t groups, int bits, const float *candidates, unsigned char *codes,
                      float *scales) {
    int rc = 0;
    for (uint64_t g = 0; g < groups && rc == 0; g++) {
        unsigned char *to = codes + g * (GROUP * (unsigned)bits / 8);
        rc = bits == 4 ? q4_group(w + g * GROUP, to, &scales[g]) : q2_group(w + g * GROUP, candidates, to, &scales[g]);
    }
    return rc;
}

int quantize_plainly(const float *weights, uint64_t groups, int bits, const float *candidates, unsigned char *codes,
                     float *scales) {
    return all_groups(weights, groups, bits, candidates, codes, scales);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static int all_groups_avx2(const float *w, uint64_t groups, int bits,
                                                           const float *candidates, unsigned char *codes,
                                                           float *scales) {
    return all_groups(w, groups, bits, candidates, codes, scales);
}
static bool have_avx2(void) {
    return __builtin_cpu_supports("avx2");
}
#else
#define all_groups_avx2 all_groups
static bool have_avx2(void) {
    return false;
}
#endif

int smoe_quantize(const float *weights, uint64_t groups, int bits, const float *candidates, unsigned char *codes,
                  float *scales) {
    if (bits != 4 && bits != 2)
        return -EINVAL;
    return (have_avx2() ? all_groups_avx2 : quantize_plainly)(weights, groups, bits, candidates, codes, scales);
}
