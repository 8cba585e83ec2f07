/* dequant_kernels.h: the decoders of dequant.c, once for each set of instructions.
 *
 * dequant.c includes this file with KERNEL(name), the name's form for the set, TARGET, the attribute that
 * allows the set, and WIDE, 1 where the set is AVX2 with F16C.  Both forms are the same text but for the few
 * primitives at the top, so they hardly can differ in what they compute.
 *
 * A decoder turns `blocks` blocks at `data` (and their scales at `scales`, where these lie apart) into float32 at
 * `out`.  It works on 16 codes at a time, as a vector of bytes (the vectors of gcc and clang, which they make of
 * whatever the machine has), and then PUTs what they stand for.  The operations are the reference's, in its
 * order, each rounded once: the file is compiled with -ffp-contract=off. */

#define INLINE TARGET static inline __attribute__((always_inline))

/* ---- primitives ------------------------------------------------------------------------------------------ */

INLINE float KERNEL(half_at)(const uint8_t *at) {
#if WIDE
    uint16_t h;
    memcpy(&h, at, sizeof h);
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    __fp16 h;
    memcpy(&h, at, sizeof h);
    return h;
#else
    uint16_t h;
    memcpy(&h, at, sizeof h);
    return half_to_float(h);
#endif
}

/* PUT(out, x, q, expression): the expression for each of the 16 codes q as a float x, to out[0..15].
 * PUT2: with y of the codes p beside.  What is said of x is said of a vector or of a number alike. */
#if WIDE
INLINE floats KERNEL(eight)(codes q, int from) {
    __m128i half = from ? _mm_unpackhi_epi64((__m128i)q, (__m128i)q) : (__m128i)q;
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(half));
}
#define PUT2(out, x, q, y, p, expression)                                                                              \
    for (int i_ = 0; i_ < 16; i_ += 8) {                                                                               \
        floats x = KERNEL(eight)(q, i_), y = KERNEL(eight)(p, i_), of_ = (expression);                                 \
        memcpy((out) + i_, &of_, sizeof of_);                                                                          \
        (void)y;                                                                                                       \
    }
#else
#define PUT2(out, x, q, y, p, expression)                                                                              \
    do {                                                                                                               \
        codes both_[2] = {q, p};                                                                                       \
        int8_t q_[32];                                                                                                 \
        memcpy(q_, both_, sizeof q_);                                                                                  \
        for (int i_ = 0; i_ < 16; i_++) {                                                                              \
            float x = q_[i_], y = q_[16 + i_];                                                                         \
            (out)[i_] = (expression);                                                                                  \
            (void)y;                                                                                                   \
        }                                                                                                              \
    } while (0)
#endif
#define PUT(out, x, q, expression) PUT2(out, x, q, x##_same, q, expression)

/* table[code] for 16 codes below 16. */
INLINE codes KERNEL(look_up)(const int8_t *table, codes c) {
#if WIDE
    return (codes)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)table), (__m128i)c);
#elif defined(__aarch64__)
    return (codes)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)c);
#else
    uint8_t b[16];
    memcpy(b, &c, sizeof b);
    for (int i = 0; i < 16; i++)
        b[i] = (uint8_t)table[b[i]];
    memcpy(&c, b, sizeof b);
    return c;
#endif
}

/* Sixteen float16, as they lie, as float32.  A signalling NaN stays one. */
INLINE void KERNEL(put_halves)(const uint16_t *h, float *out) {
#if WIDE
    for (int i = 0; i < 16; i += 8) {
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(h + i));
        __m256 wide = _mm256_cvtph_ps(x);
        _mm256_storeu_ps(out + i, wide);
        if (_mm256_movemask_ps(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q)))
            for (int k = i; k < i + 8; k++)
                out[k] = half_to_float(h[k]);
    }
#else
    for (int i = 0; i < 16; i++)
        out[i] = half_to_float(h[i]);
#endif
}

/* ---- blocks of 32 weights: the low halves of 16 bytes, then the high halves --------------------------------- */

TARGET static void KERNEL(q4_0)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 18, out += 32) {
        float d = KERNEL(half_at)(data);
        codes c = codes_at(data + 2);
        PUT(out, x, low_half(c) - 8, x * d);
        PUT(out + 16, x, high_half(c) - 8, x * d);
    }
}

TARGET static void KERNEL(q4_1)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 20, out += 32) {
        float d = KERNEL(half_at)(data), m = beside(d, KERNEL(half_at)(data + 2));
        codes c = codes_at(data + 4);
        PUT(out, x, low_half(c), x * d + m);
        PUT(out + 16, x, high_half(c), x * d + m);
    }
}

TARGET static void KERNEL(q5_0)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 22, out += 32) {
        float d = KERNEL(half_at)(data);
        codes c = codes_at(data + 6);
        PUT(out, x, (low_half(c) | fifth_bits(data + 2)) - 16, x * d);
        PUT(out + 16, x, (high_half(c) | fifth_bits(data + 4)) - 16, x * d);
    }
}

TARGET static void KERNEL(q5_1)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 24, out += 32) {
        float d = KERNEL(half_at)(data), m = beside(d, KERNEL(half_at)(data + 2));
        codes c = codes_at(data + 8);
        PUT(out, x, low_half(c) | fifth_bits(data + 4), x * d + m);
        PUT(out + 16, x, high_half(c) | fifth_bits(data + 6), x * d + m);
    }
}

TARGET static void KERNEL(q8_0)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 34, out += 32) {
        float d = KERNEL(half_at)(data);
        PUT(out, x, codes_at(data + 2), x * d);
        PUT(out + 16, x, codes_at(data + 18), x * d);
    }
}

/* 32 weights with a table of their 16 values. */
INLINE void KERNEL(put_by_table)(const int8_t *table, const uint8_t *data, float d, float *out) {
    codes c = codes_at(data);
    PUT(out, x, KERNEL(look_up)(table, low_half(c)), x * d);
    PUT(out + 16, x, KERNEL(look_up)(table, high_half(c)), x * d);
}

TARGET static void KERNEL(iq4_nl)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 18, out += 32)
        KERNEL(put_by_table)(iq4_values, data + 2, KERNEL(half_at)(data), out);
}

TARGET static void KERNEL(mxfp4)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 17, out += 32)
        KERNEL(put_by_table)(e2m1_doubled, data + 1, half_of_e8m0(data[0]), out);
}

/* Neighbours share a byte, code 8 is a zero with a sign, and scale 255 is infinity. */
TARGET static void KERNEL(mxfp4_apart)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, data += 16, out += 32) {
        float d = scales[b] == 255 ? INFINITY : half_of_e8m0(scales[b]);
        codes c = codes_at(data), low = low_half(c), high = high_half(c);
        UNROLL
        for (int i = 0; i < 2; i++) {
            codes in_turn = i ? later_in_turn(low, high) : first_in_turn(low, high);
            codes sign = (codes)(in_turn > 7) | 1, size = KERNEL(look_up)(e2m1_doubled, in_turn & 7);
            PUT2(out + 16 * i, x, size, y, sign, x * (y * d));
        }
    }
}

/* ---- blocks of 256 weights ------------------------------------------------------------------------------- */

TARGET static void KERNEL(q2_k)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 84, out += 256) {
        float d = KERNEL(half_at)(data + 80), dmin = KERNEL(half_at)(data + 82);
        UNROLL
        for (int g = 0; g < 16; g++) {
            float dl = d * (float)(data[g] & 15), ml = dmin * (float)(data[g] >> 4);
            codes c = codes_at(data + 16 + g / 8 * 32 + g % 2 * 16);
            PUT(out + 16 * g, x, bits_from(c, g % 8 / 2 * 2, 3), x * dl - ml);
        }
    }
}

TARGET static void KERNEL(q3_k)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 110, out += 256) {
        const uint8_t *packed = data + 96;
        float d = KERNEL(half_at)(data + 108);
        UNROLL
        for (int g = 0; g < 16; g++) {
            int low = packed[g % 8] >> g / 8 * 4 & 15, high = packed[8 + g % 4] >> g / 4 * 2 & 3;
            float dl = d * (float)((low | high << 4) - 32);
            codes c = codes_at(data + 32 + g / 8 * 32 + g % 2 * 16), mask = codes_at(data + g % 2 * 16);
            codes away = (codes)((mask & (uint8_t)(1 << g / 2)) == 0) & 4;
            PUT(out + 16 * g, x, bits_from(c, g % 8 / 2 * 2, 3) - away, x * dl);
        }
    }
}

/* Eight scales and eight minima of 6 bits in 12 bytes, as Q4_K and Q5_K have them, times d and dmin. */
INLINE void KERNEL(scales_of_6)(const uint8_t *data, float *dl, float *ml) {
    float d = KERNEL(half_at)(data), dmin = KERNEL(half_at)(data + 2);
    const uint8_t *s = data + 4;
    for (int i = 0; i < 4; i++) {
        dl[i] = d * (float)(s[i] & 63);
        ml[i] = dmin * (float)(s[4 + i] & 63);
        dl[4 + i] = d * (float)((s[8 + i] & 15) | (s[i] >> 6) << 4);
        ml[4 + i] = dmin * (float)(s[8 + i] >> 4 | (s[4 + i] >> 6) << 4);
    }
}

TARGET static void KERNEL(q4_k)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 144, out += 256) {
        float dl[8], ml[8];
        KERNEL(scales_of_6)(data, dl, ml);
        UNROLL
        for (int g = 0; g < 8; g++) {
            float d = dl[g], m = ml[g];
            UNROLL
            for (int half = 0; half < 2; half++) {
                codes c = codes_at(data + 16 + g / 2 * 32 + half * 16);
                PUT(out + 32 * g + 16 * half, x, bits_from(c, g % 2 * 4, 15), x * d - m);
            }
        }
    }
}

TARGET static void KERNEL(q5_k)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 176, out += 256) {
        float dl[8], ml[8];
        KERNEL(scales_of_6)(data, dl, ml);
        UNROLL
        for (int g = 0; g < 8; g++) {
            float d = dl[g], m = ml[g];
            UNROLL
            for (int half = 0; half < 2; half++) {
                codes c = codes_at(data + 48 + g / 2 * 32 + half * 16), high = codes_at(data + 16 + half * 16);
                codes fifth = (codes)((high & (uint8_t)(1 << g)) != 0) & 16;
                PUT(out + 32 * g + 16 * half, x, bits_from(c, g % 2 * 4, 15) | fifth, x * d - m);
            }
        }
    }
}

/* In halves of 128 weights: the low halves of 64 bytes, then their high halves, with two bits each from 32 more. */
TARGET static void KERNEL(q6_k)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 210, out += 256) {
        const int8_t *scale = (const int8_t *)(data + 192);
        float d = KERNEL(half_at)(data + 208);
        UNROLL
        for (int g = 0; g < 16; g++) {
            float dl = d * (float)scale[g];
            codes c = codes_at(data + g / 8 * 64 + g % 4 * 16), more = codes_at(data + 128 + g / 8 * 32 + g % 2 * 16);
            codes upper = four_up(bits_from(more, g % 8 / 2 * 2, 3));
            PUT(out + 16 * g, x, (bits_from(c, g % 8 / 4 * 4, 15) | upper) - 32, x * dl);
        }
    }
}

TARGET static void KERNEL(iq4_xs)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 136, out += 256) {
        float d = KERNEL(half_at)(data);
        int high = data[2] | data[3] << 8;
        UNROLL
        for (int g = 0; g < 8; g++) {
            int scale = (data[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4;
            KERNEL(put_by_table)(iq4_values, data + 8 + 16 * g, d * (float)(scale - 32), out + 32 * g);
        }
    }
}

/* ---- `.smoe` vaults: groups of 64 weights, scales apart, neighbours share a byte ------------------------------- */

/* (code - 7.5) / 7.5 is k / 15 with an odd k = 2 code - 15, correctly rounded.  A product with 1 / 15 is not; but
 * with 1 / 15 in two parts, the first so short that k times it is exact, it is. */
TARGET static void KERNEL(smoe_q4)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    for (size_t b = 0; b < 2 * blocks; b++, data += 16, out += 32) {
        float d = KERNEL(half_at)(scales + b / 2 * 2);
        codes c = codes_at(data), low = low_half(c), high = high_half(c);
        PUT(out, x, 2 * first_in_turn(low, high) - 15, (x * FIFTEENTH_HIGH + x * FIFTEENTH_LOW) * d);
        PUT(out + 16, x, 2 * later_in_turn(low, high) - 15, (x * FIFTEENTH_HIGH + x * FIFTEENTH_LOW) * d);
    }
}

/* (code - 1.5) / 1.5 is k / 3 with k = -3, -1, 1, 3, and there the product with 1 / 3 is right. */
TARGET static void KERNEL(smoe_q2)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, data += 16, scales += 2, out += 64) {
        float d = KERNEL(half_at)(scales);
        codes c = codes_at(data), low = low_half(c), high = high_half(c);
        UNROLL
        for (int i = 0; i < 2; i++) {
            codes pairs = i ? later_in_turn(low, high) : first_in_turn(low, high);
            codes even = pairs & 3, odd = bits_from(pairs, 2, 3);
            PUT(out + 32 * i, x, 2 * first_in_turn(even, odd) - 3, x * (1.0f / 3.0f) * d);
            PUT(out + 32 * i + 16, x, 2 * later_in_turn(even, odd) - 3, x * (1.0f / 3.0f) * d);
        }
    }
}

/* ---- floating-point numbers, by sixteens -------------------------------------------------------------------- */

TARGET static void KERNEL(bf16)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t i = 0; i < 16 * blocks; i++) {
        uint16_t h;
        memcpy(&h, data + 2 * i, sizeof h);
        out[i] = from_bits((uint32_t)h << 16);
    }
}

TARGET static void KERNEL(f16)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 32, out += 16) {
        uint16_t h[16];
        memcpy(h, data, sizeof h);
        KERNEL(put_halves)(h, out);
    }
}

/* An E5M2 is the upper half of a float16; all its NaN become the quiet one. */
TARGET static void KERNEL(f8_e5m2)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 16, out += 16) {
        codes c = codes_at(data), none = {0};
        halves h[2] = {(halves)first_in_turn(none, c), (halves)later_in_turn(none, c)};
        for (int i = 0; i < 2; i++) {
            halves nan = (halves)((h[i] & 0x7FFF) > 0x7C00);
            h[i] = (h[i] & ~nan) | (((h[i] & 0x8000) | 0x7E00) & nan);
        }
        KERNEL(put_halves)((const uint16_t *)h, out);
    }
}

/* An E4M3 (the kind without infinities) moved by one bit is a float16 of 1/256 of its value. */
TARGET static void KERNEL(f8_e4m3)(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 16, out += 16) {
        codes c = codes_at(data), none = {0};
        halves h[2] = {(halves)first_in_turn(none, c), (halves)later_in_turn(none, c)};
        for (int i = 0; i < 2; i++) {
            halves nan = (halves)((h[i] & 0x7F00) == 0x7F00), size = (h[i] & 0x7F00) >> 1;
            h[i] = (h[i] & 0x8000) | (size & ~nan) | (0x7E00 & nan);
        }
        KERNEL(put_halves)((const uint16_t *)h, out);
        for (int i = 0; i < 16; i++)
            out[i] *= 256.0f;
    }
}

TARGET static void KERNEL(times)(float *values, size_t n, float scale) {
    for (size_t i = 0; i < n; i++)
        values[i] *= scale;
}

/* ---- from float32 to what is wanted -------------------------------------------------------------------------- */

#if WIDE
/* The upper halves of eight floats, rounded; no NaN among them. */
INLINE __m256i KERNEL(upper_halves)(__m256 x) {
    __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd), 16);
}
#endif

TARGET static void KERNEL(to_bf16)(const float *restrict in, size_t n, uint16_t *restrict out) {
    size_t at = 0;
#if WIDE
    for (; at + 16 <= n; at += 16) {
        __m256 x = _mm256_loadu_ps(in + at), y = _mm256_loadu_ps(in + at + 8);
        if (_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q))) {
            for (size_t i = at; i < at + 16; i++)
                out[i] = float_to_bf16(in[i]);
        } else {
            __m256i both = _mm256_packus_epi32(KERNEL(upper_halves)(x), KERNEL(upper_halves)(y));
            both = _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0));
            _mm256_storeu_si256((__m256i *)(void *)(out + at), both);
        }
    }
#endif
    for (; at < n; at++)
        out[at] = float_to_bf16(in[at]);
}

TARGET static void KERNEL(to_f16)(const float *restrict in, size_t n, uint16_t *restrict out) {
    size_t at = 0;
#if WIDE
    for (; at + 8 <= n; at += 8) {
        __m256 x = _mm256_loadu_ps(in + at);
        if (_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)))
            for (size_t i = at; i < at + 8; i++)
                out[i] = float_to_half(in[i]);
        else
            _mm_storeu_si128((__m128i *)(void *)(out + at), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; at < n; at++)
        out[at] = float_to_half(in[at]);
}

static const struct decoders KERNEL(decoders) = {
    .of = {[Q4_0] = KERNEL(q4_0),
           [Q4_1] = KERNEL(q4_1),
           [Q5_0] = KERNEL(q5_0),
           [Q5_1] = KERNEL(q5_1),
           [Q8_0] = KERNEL(q8_0),
           [Q2_K] = KERNEL(q2_k),
           [Q3_K] = KERNEL(q3_k),
           [Q4_K] = KERNEL(q4_k),
           [Q5_K] = KERNEL(q5_k),
           [Q6_K] = KERNEL(q6_k),
           [IQ4_NL] = KERNEL(iq4_nl),
           [IQ4_XS] = KERNEL(iq4_xs),
           [MXFP4] = KERNEL(mxfp4),
           [MXFP4_APART] = KERNEL(mxfp4_apart),
           [SMOE_Q4] = KERNEL(smoe_q4),
           [SMOE_Q2] = KERNEL(smoe_q2),
           [BF16] = KERNEL(bf16),
           [F16] = KERNEL(f16),
           [F8_E4M3] = KERNEL(f8_e4m3),
           [F8_E5M2] = KERNEL(f8_e5m2),
           [F8_E4M3_TILES] = KERNEL(f8_e4m3),
           [F8_E5M2_TILES] = KERNEL(f8_e5m2)},
    .times = KERNEL(times),
    .to_f16 = KERNEL(to_f16),
    .to_bf16 = KERNEL(to_bf16),
};

#undef INLINE
#undef KERNEL
#undef PUT
#undef PUT2
#undef TARGET
#undef WIDE
