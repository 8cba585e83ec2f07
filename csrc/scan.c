/* scan.c: see scan.h. */
#include "scan.h"

#if SMOE_SCAN_AVX2
#include <immintrin.h>
#endif

static uint64_t load(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static uint64_t lesser(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Four minima side by side: no comparison waits for the one before it. */
uint64_t least_of_64_plain(const _Atomic uint64_t *w) {
    uint64_t m[4] = {load(w), load(w + 1), load(w + 2), load(w + 3)};
    for (uint32_t i = 4; i < 64; i += 4)
        for (uint32_t k = 0; k < 4; k++)
            m[k] = lesser(m[k], load(w + i + k));
    return lesser(lesser(m[0], m[1]), lesser(m[2], m[3]));
}

bool any_of_64_plain(const _Atomic uint64_t *w) {
    uint64_t any[4] = {0, 0, 0, 0};
    for (uint32_t i = 0; i < 64; i += 4)
        for (uint32_t k = 0; k < 4; k++)
            any[k] |= load(w + i + k);
    return any[0] | any[1] | any[2] | any[3];
}

#if SMOE_SCAN_AVX2

#define AVX2 __attribute__((target("avx2")))

AVX2 static __m256i four(const _Atomic uint64_t *w, uint32_t at) {
    return _mm256_loadu_si256((const __m256i *)(const void *)(w + at));
}

AVX2 static __m256i lesser_of_four(__m256i a, __m256i b) {
    return _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(a, b));
}

AVX2 static uint64_t least_of_64_avx2(const _Atomic uint64_t *w) {
    __m256i m[4] = {four(w, 0), four(w, 4), four(w, 8), four(w, 12)};
    for (uint32_t i = 16; i < 64; i += 16)
        for (uint32_t k = 0; k < 4; k++)
            m[k] = lesser_of_four(m[k], four(w, i + 4 * k));
    uint64_t out[4];
    __m256i least = lesser_of_four(lesser_of_four(m[0], m[1]), lesser_of_four(m[2], m[3]));
    _mm256_storeu_si256((__m256i *)(void *)out, least);
    return lesser(lesser(out[0], out[1]), lesser(out[2], out[3]));
}

AVX2 static bool any_of_64_avx2(const _Atomic uint64_t *w) {
    __m256i any[4] = {four(w, 0), four(w, 4), four(w, 8), four(w, 12)};
    for (uint32_t i = 16; i < 64; i += 16)
        for (uint32_t k = 0; k < 4; k++)
            any[k] = _mm256_or_si256(any[k], four(w, i + 4 * k));
    __m256i all = _mm256_or_si256(_mm256_or_si256(any[0], any[1]), _mm256_or_si256(any[2], any[3]));
    return !_mm256_testz_si256(all, all);
}

#define AVX512 __attribute__((target("avx512f")))

AVX512 static __m512i eight(const _Atomic uint64_t *w, uint32_t at) {
    return _mm512_loadu_si512((const void *)(w + at));
}

AVX512 static uint64_t least_of_64_avx512(const _Atomic uint64_t *w) {
    __m512i m[4] = {eight(w, 0), eight(w, 8), eight(w, 16), eight(w, 24)};
    for (uint32_t k = 0; k < 4; k++)
        m[k] = _mm512_min_epu64(m[k], eight(w, 32 + 8 * k));
    return _mm512_reduce_min_epu64(_mm512_min_epu64(_mm512_min_epu64(m[0], m[1]), _mm512_min_epu64(m[2], m[3])));
}

uint64_t least_of_64(const _Atomic uint64_t *w) {
    if (__builtin_cpu_supports("avx512f"))
        return least_of_64_avx512(w);
    return __builtin_cpu_supports("avx2") ? least_of_64_avx2(w) : least_of_64_plain(w);
}

bool any_of_64(const _Atomic uint64_t *w) {
    return __builtin_cpu_supports("avx2") ? any_of_64_avx2(w) : any_of_64_plain(w);
}

#else

uint64_t least_of_64(const _Atomic uint64_t *w) {
    return least_of_64_plain(w);
}

bool any_of_64(const _Atomic uint64_t *w) {
    return any_of_64_plain(w);
}

#endif
