/* dequant_kernels.h: the decoders of dequant.c, once for each set of instructions.
 *
 * dequant.c includes this file with KERNEL(name), the name's form for the set, TARGET, the attribute that
 * allows the set, and WIDE, 1 where the set is AVX2 with F16C.  A decoder is plain C with loops of fixed
 * length that compilers turn into vectors; both forms are the same text, so they cannot differ in what they
 * compute.  Only what C cannot say is written out for a set: a table of 16 bytes looked up by many indices at
 * once, and float16.
 *
 * Each decoder turns `blocks` blocks at `data` (and their scales at `scales`, where these lie apart) into
 * float32 at `out`, by the very operations and in the order of the reference, each rounded once: the file is
 * compiled with -ffp-contract=off. */

#define INLINE TARGET static inline __attribute__((always_inline))

INLINE float KERNEL(half_at)(const uint8_t *at) {
    uint16_t h;
    memcpy(&h, at, sizeof h);
#if WIDE
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    __fp16 f;
    memcpy(&f, at, sizeof f);
    return f;
#else
    return half_to_float(h);
#endif
}

/* Eight float16 as float32; what a signalling NaN becomes is the processor's choice. */
INLINE void KERNEL(eight_halves)(const uint16_t *h, float *out) {
#if WIDE
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)h)));
#else
    for (int i = 0; i < 8; i++)
        out[i] = KERNEL(half_at)((const uint8_t *)(h + i));
#endif
}

/* table[low nibbles] of 16 bytes, then table[high nibbles]. */
INLINE void KERNEL(look_up)(const int8_t *table, const uint8_t *codes, int8_t *low, int8_t *high) {
#if WIDE
    __m128i t = _mm_loadu_si128((const __m128i *)(const void *)table), mask = _mm_set1_epi8(15);
    __m128i c = _mm_loadu_si128((const __m128i *)(const void *)codes);
    __m128i h = _mm_and_si128(_mm_srli_epi16(c, 4), mask);
    _mm_storeu_si128((__m128i *)(void *)low, _mm_shuffle_epi8(t, _mm_and_si128(c, mask)));
    _mm_storeu_si128((__m128i *)(void *)high, _mm_shuffle_epi8(t, h));
#elif defined(__aarch64__)
    int8x16_t t = vld1q_s8(table);
    uint8x16_t c = vld1q_u8(codes);
    vst1q_s8(low, vqtbl1q_s8(t, vandq_u8(c, vdupq_n_u8(15))));
    vst1q_s8(high, vqtbl1q_s8(t, vshrq_n_u8(c, 4)));
#else
    for (int i = 0; i < 16; i++) {
        low[i] = table[codes[i] & 15];
        high[i] = table[codes[i] >> 4];
    }
#endif
}

INLINE void KERNEL(scaled)(const int8_t *q, int n, float d, float *out) {
    for (int i = 0; i < n; i++)
        out[i] = d * (float)q[i];
}

/* ---- blocks of 32 weights ------------------------------------------------------------------------------ */

TARGET static void KERNEL(q4_0)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 18, out += 32) {
        float d = KERNEL(half_at)(data);
        for (int i = 0; i < 16; i++)
            out[i] = d * (float)((data[2 + i] & 15) - 8);
        for (int i = 0; i < 16; i++)
            out[16 + i] = d * (float)((data[2 + i] >> 4) - 8);
    }
}

TARGET static void KERNEL(q4_1)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 20, out += 32) {
        float d = KERNEL(half_at)(data), m = beside(d, KERNEL(half_at)(data + 2));
        for (int i = 0; i < 16; i++)
            out[i] = d * (float)(data[4 + i] & 15) + m;
        for (int i = 0; i < 16; i++)
            out[16 + i] = d * (float)(data[4 + i] >> 4) + m;
    }
}

/* The codes of Q5_0 and Q5_1: 4 bytes of fifth bits, 16 bytes of nibbles. */
INLINE void KERNEL(codes_of_5)(const uint8_t *data, int8_t *q) {
    uint32_t high;
    memcpy(&high, data, sizeof high);
    data += 4;
    for (int i = 0; i < 16; i++)
        q[i] = (int8_t)((data[i] & 15) | (high >> i & 1) << 4);
    for (int i = 0; i < 16; i++)
        q[16 + i] = (int8_t)((data[i] >> 4) | (high >> (16 + i) & 1) << 4);
}

TARGET static void KERNEL(q5_0)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 22, out += 32) {
        float d = KERNEL(half_at)(data);
        int8_t q[32];
        KERNEL(codes_of_5)(data + 2, q);
        for (int i = 0; i < 32; i++)
            out[i] = d * (float)(q[i] - 16);
    }
}

TARGET static void KERNEL(q5_1)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 24, out += 32) {
        float d = KERNEL(half_at)(data), m = beside(d, KERNEL(half_at)(data + 2));
        int8_t q[32];
        KERNEL(codes_of_5)(data + 4, q);
        for (int i = 0; i < 32; i++)
            out[i] = d * (float)q[i] + m;
    }
}

TARGET static void KERNEL(q8_0)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 34, out += 32)
        KERNEL(scaled)((const int8_t *)(data + 2), 32, KERNEL(half_at)(data), out);
}

TARGET static void KERNEL(iq4_nl)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                  float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 18, out += 32) {
        int8_t q[32];
        KERNEL(look_up)(iq4_values, data + 2, q, q + 16);
        KERNEL(scaled)(q, 32, KERNEL(half_at)(data), out);
    }
}

TARGET static void KERNEL(mxfp4)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                 float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 17, out += 32) {
        int8_t q[32];
        KERNEL(look_up)(e2m1_doubled, data + 1, q, q + 16);
        KERNEL(scaled)(q, 32, half_of_e8m0(data[0]), out);
    }
}

/* Neighbours share a byte, code 8 is a zero with a sign, and scale 255 is infinity. */
TARGET static void KERNEL(mxfp4_apart)(const uint8_t *restrict data, const uint8_t *restrict scales, size_t blocks,
                                       float *restrict out) {
    for (size_t b = 0; b < blocks; b++, data += 16, out += 32) {
        float d = scales[b] == 255 ? INFINITY : half_of_e8m0(scales[b]);
        int8_t low[16], high[16], q[32];
        KERNEL(look_up)(e2m1_signed, data, low, high);
        for (int i = 0; i < 16; i++) {
            q[2 * i] = low[i];
            q[2 * i + 1] = high[i];
        }
        for (int i = 0; i < 32; i++)
            out[i] = d * with_sign_of(q[i], (float)(q[i] & 127));
    }
}

/* ---- blocks of 256 weights ------------------------------------------------------------------------------ */

TARGET static void KERNEL(q2_k)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 84, out += 256) {
        float d = KERNEL(half_at)(data + 80), dmin = KERNEL(half_at)(data + 82), dl[16], ml[16];
        for (int g = 0; g < 16; g++) {
            dl[g] = d * (float)(data[g] & 15);
            ml[g] = dmin * (float)(data[g] >> 4);
        }
        for (int g = 0; g < 16; g++) {
            const uint8_t *qs = data + 16 + g / 8 * 32 + g % 2 * 16;
            int shift = g % 8 / 2 * 2;
            for (int i = 0; i < 16; i++)
                out[16 * g + i] = dl[g] * (float)(qs[i] >> shift & 3) - ml[g];
        }
    }
}

TARGET static void KERNEL(q3_k)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 110, out += 256) {
        const uint8_t *packed = data + 96;
        float d = KERNEL(half_at)(data + 108), dl[16];
        for (int g = 0; g < 16; g++) {
            int low = packed[g % 8] >> g / 8 * 4 & 15, high = packed[8 + g % 4] >> g / 4 * 2 & 3;
            dl[g] = d * (float)((low | high << 4) - 32);
        }
        for (int g = 0; g < 16; g++) {
            const uint8_t *mask = data + g % 2 * 16, *qs = data + 32 + g / 8 * 32 + g % 2 * 16;
            int shift = g % 8 / 2 * 2, bit = g / 2;
            for (int i = 0; i < 16; i++)
                out[16 * g + i] = dl[g] * (float)((qs[i] >> shift & 3) - (~mask[i] >> bit & 1) * 4);
        }
    }
}

/* Eight scales and eight minima of 6 bits in 12 bytes, as Q4_K and Q5_K have them, times d and dmin. */
INLINE void KERNEL(scales_of_6)(const uint8_t *data, float *dl, float *ml) {
    float d = KERNEL(half_at)(data), dmin = KERNEL(half_at)(data + 2);
    const uint8_t *s = data + 4;
    uint8_t scale[8], least[8];
    for (int i = 0; i < 4; i++) {
        scale[i] = s[i] & 63;
        least[i] = s[4 + i] & 63;
        scale[4 + i] = (uint8_t)((s[8 + i] & 15) | (s[i] >> 6) << 4);
        least[4 + i] = (uint8_t)(s[8 + i] >> 4 | (s[4 + i] >> 6) << 4);
    }
    for (int i = 0; i < 8; i++) {
        dl[i] = d * (float)scale[i];
        ml[i] = dmin * (float)least[i];
    }
}

TARGET static void KERNEL(q4_k)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 144, out += 256) {
        float dl[8], ml[8];
        KERNEL(scales_of_6)(data, dl, ml);
        for (int g = 0; g < 8; g += 2) {
            const uint8_t *qs = data + 16 + g * 16;
            for (int i = 0; i < 32; i++)
                out[32 * g + i] = dl[g] * (float)(qs[i] & 15) - ml[g];
            for (int i = 0; i < 32; i++)
                out[32 * g + 32 + i] = dl[g + 1] * (float)(qs[i] >> 4) - ml[g + 1];
        }
    }
}

TARGET static void KERNEL(q5_k)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 176, out += 256) {
        const uint8_t *high = data + 16;
        float dl[8], ml[8];
        KERNEL(scales_of_6)(data, dl, ml);
        for (int g = 0; g < 8; g += 2) {
            const uint8_t *qs = data + 48 + g * 16;
            for (int i = 0; i < 32; i++)
                out[32 * g + i] = dl[g] * (float)((qs[i] & 15) | (high[i] >> g & 1) << 4) - ml[g];
            for (int i = 0; i < 32; i++)
                out[32 * g + 32 + i] = dl[g + 1] * (float)(qs[i] >> 4 | (high[i] >> (g + 1) & 1) << 4) - ml[g + 1];
        }
    }
}

/* 128 weights: the low halves of 64 bytes, then their high halves, with two bits each from 32 bytes. */
INLINE void KERNEL(codes_of_6)(const uint8_t *low, const uint8_t *high, int8_t *q) {
    for (int i = 0; i < 32; i++) {
        q[i] = (int8_t)(((low[i] & 15) | (high[i] & 3) << 4) - 32);
        q[32 + i] = (int8_t)(((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) - 32);
        q[64 + i] = (int8_t)((low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32);
        q[96 + i] = (int8_t)((low[32 + i] >> 4 | (high[i] >> 6) << 4) - 32);
    }
}

TARGET static void KERNEL(q6_k)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 210, out += 256) {
        const int8_t *scale = (const int8_t *)(data + 192);
        float d = KERNEL(half_at)(data + 208);
        int8_t q[256];
        KERNEL(codes_of_6)(data, data + 128, q);
        KERNEL(codes_of_6)(data + 64, data + 160, q + 128);
        for (int g = 0; g < 16; g++)
            KERNEL(scaled)(q + 16 * g, 16, d * (float)scale[g], out + 16 * g);
    }
}

TARGET static void KERNEL(iq4_xs)(const uint8_t *restrict data, const uint8_t *scales, size_t blocks,
                                  float *restrict out) {
    (void)scales;
    for (size_t b = 0; b < blocks; b++, data += 136, out += 256) {
        float d = KERNEL(half_at)(data);
        unsigned high = data[2] | (unsigned)data[3] << 8;
        for (int g = 0; g < 8; g++) {
            unsigned scale = (data[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4;
            int8_t q[32];
            KERNEL(look_up)(iq4_values, data + 8 + 16 * g, q, q + 16);
            KERNEL(scaled)(q, 32, d * (float)((int)scale - 32), out + 32 * g);
        }
    }
}

/* ---- `.smoe` vaults: groups of 64 weights, scales apart -------------------------------------------------- */

/* (code - 7.5) / 7.5 is k / 15 with an odd k = 2 code - 15, correctly rounded.  A product with 1 / 15 is not; but
 * with 1 / 15 in two parts, the first so short that k times it is exact, it is. */
TARGET static void KERNEL(smoe_q4)(const uint8_t *restrict data, const uint8_t *restrict scales, size_t blocks,
                                   float *restrict out) {
    for (size_t b = 0; b < blocks; b++, data += 32, scales += 2, out += 64) {
        float d = KERNEL(half_at)(scales);
        int8_t k[64];
        for (int i = 0; i < 32; i++) {
            k[2 * i] = (int8_t)((data[i] & 15) * 2 - 15);
            k[2 * i + 1] = (int8_t)((data[i] >> 4) * 2 - 15);
        }
        for (int i = 0; i < 64; i++)
            out[i] = ((float)k[i] * FIFTEENTH_HIGH + (float)k[i] * FIFTEENTH_LOW) * d;
    }
}

/* (code - 1.5) / 1.5 is k / 3 with k = -3, -1, 1, 3, and there the product with 1 / 3 is right. */
TARGET static void KERNEL(smoe_q2)(const uint8_t *restrict data, const uint8_t *restrict scales, size_t blocks,
                                   float *restrict out) {
    for (size_t b = 0; b < blocks; b++, data += 16, scales += 2, out += 64) {
        float d = KERNEL(half_at)(scales);
        int8_t k[64];
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 4; j++)
                k[4 * i + j] = (int8_t)((data[i] >> 2 * j & 3) * 2 - 3);
        for (int i = 0; i < 64; i++)
            out[i] = (float)k[i] * (1.0f / 3.0f) * d;
    }
}

/* ---- floating-point numbers that are no blocks: one weight each ------------------------------------------- */

TARGET static void KERNEL(bf16)(const uint8_t *restrict data, const uint8_t *scales, size_t n, float *restrict out) {
    (void)scales;
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, data + 2 * i, sizeof h);
        out[i] = from_bits((uint32_t)h << 16);
    }
}

/* float16 by eights, through `halves`; NaN as they are, also signalling ones. */
INLINE void KERNEL(widen)(const uint16_t *halves, float *out) {
    KERNEL(eight_halves)(halves, out);
    for (int i = 0; i < 8; i++) {
        uint32_t h = halves[i], nan = (h & 0x8000) << 16 | 0x7F800000 | (h & 0x3FF) << 13;
        out[i] = (h & 0x7FFF) > 0x7C00 ? from_bits(nan) : out[i];
    }
}

TARGET static void KERNEL(f16)(const uint8_t *restrict data, const uint8_t *scales, size_t n, float *restrict out) {
    (void)scales;
    for (size_t at = 0; at < n; at += 8) {
        uint16_t h[8] = {0};
        float wide[8];
        size_t take = n - at < 8 ? n - at : 8;
        memcpy(h, data + 2 * at, 2 * take);
        KERNEL(widen)(h, wide);
        memcpy(out + at, wide, 4 * take);
    }
}

/* An E5M2 is the upper half of a float16; all its NaN become the quiet one. */
TARGET static void KERNEL(f8_e5m2)(const uint8_t *restrict data, const uint8_t *scales, size_t n, float *restrict out) {
    (void)scales;
    for (size_t at = 0; at < n; at += 8) {
        uint8_t x[8] = {0};
        uint16_t h[8];
        float wide[8];
        size_t take = n - at < 8 ? n - at : 8;
        memcpy(x, data + at, take);
        for (int i = 0; i < 8; i++)
            h[i] = (uint16_t)((x[i] & 0x7F) > 0x7C ? (x[i] & 0x80) << 8 | 0x7E00 : x[i] << 8);
        KERNEL(widen)(h, wide);
        memcpy(out + at, wide, 4 * take);
    }
}

/* An E4M3 (the kind without infinities) moved by one bit is a float16 of 1/256 of its value. */
TARGET static void KERNEL(f8_e4m3)(const uint8_t *restrict data, const uint8_t *scales, size_t n, float *restrict out) {
    (void)scales;
    for (size_t at = 0; at < n; at += 8) {
        uint8_t x[8] = {0};
        uint16_t h[8];
        float wide[8];
        size_t take = n - at < 8 ? n - at : 8;
        memcpy(x, data + at, take);
        for (int i = 0; i < 8; i++)
            h[i] = (uint16_t)((x[i] & 0x80) << 8 | ((x[i] & 0x7F) == 0x7F ? 0x7E00 : (x[i] & 0x7F) << 7));
        KERNEL(widen)(h, wide);
        for (int i = 0; i < 8; i++)
            wide[i] *= 256.0f;
        memcpy(out + at, wide, 4 * take);
    }
}

TARGET static void KERNEL(times)(float *values, size_t n, float scale) {
    for (size_t i = 0; i < n; i++)
        values[i] *= scale;
}

/* ---- from float32 to what is wanted ------------------------------------------------------------------------ */

TARGET static void KERNEL(to_bf16)(const float *restrict in, size_t n, uint16_t *restrict out) {
    for (size_t i = 0; i < n; i++)
        out[i] = float_to_bf16(in[i]);
}

TARGET static void KERNEL(to_f16)(const float *restrict in, size_t n, uint16_t *restrict out) {
    size_t at = 0;
#if WIDE
    for (; at + 8 <= n; at += 8) {
        __m256 x = _mm256_loadu_ps(in + at);
        if (_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)))
            for (int i = 0; i < 8; i++)
                out[at + (size_t)i] = float_to_half(in[at + (size_t)i]);
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
#undef TARGET
#undef WIDE
