/* dequant.c: weights as floating-point numbers, out of the block types that experts come in.
 *
 * One row of `types` is one type; what is said about it anywhere else is asked of that table.  The layouts are
 * those of GGUF (as gguf-py 0.19 reads them, whose float32 results are the reference, bit for bit), of `.smoe`
 * vaults (smoe_mp/quant.py), of the MXFP4 that safetensors checkpoints of gpt_oss hold, and of float8
 * checkpoints with one scale for each tile of 128 x 128.
 *
 * A decoder makes float32.  Where float16 or bfloat16 is wanted, it is decoded a few kilobytes at a time into
 * a buffer that stays in the first-level cache, and rounded from there, once, to nearest even.  So each type
 * has one decoder, each format one conversion, and a 16-bit result is the rounded float32 one by construction.
 *
 * The decoders are compiled twice from one text, dequant_kernels.h: for any processor, and for AVX2 and F16C,
 * which are looked for at run time.  On arm64 the first form is NEON.
 *
 * Several threads: the weights are cut into as many runs of whole blocks; the threads live for the one call.
 * A pool would save some 20 us of it, and would have to be taken care of at every fork. */
#define _GNU_SOURCE
#include "smoe.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "all of these formats are little-endian");

enum type {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    MXFP4_APART,
    SMOE_Q4,
    SMOE_Q2,
    BF16,
    F16,
    F8_E4M3,
    F8_E5M2,
    F8_E4M3_TILES,
    F8_E5M2_TILES,
    N_TYPES
};

enum { TILE = 128, CHUNK = 2048, MAX_THREADS = 64 };

static const smoe_block_type types[N_TYPES] = {
    [Q4_0] = {"Q4_0", 32, 18, 0, 0},
    [Q4_1] = {"Q4_1", 32, 20, 0, 0},
    [Q5_0] = {"Q5_0", 32, 22, 0, 0},
    [Q5_1] = {"Q5_1", 32, 24, 0, 0},
    [Q8_0] = {"Q8_0", 32, 34, 0, 0},
    [Q2_K] = {"Q2_K", 256, 84, 0, 0},
    [Q3_K] = {"Q3_K", 256, 110, 0, 0},
    [Q4_K] = {"Q4_K", 256, 144, 0, 0},
    [Q5_K] = {"Q5_K", 256, 176, 0, 0},
    [Q6_K] = {"Q6_K", 256, 210, 0, 0},
    [IQ4_NL] = {"IQ4_NL", 32, 18, 0, 0},
    [IQ4_XS] = {"IQ4_XS", 256, 136, 0, 0},
    [MXFP4] = {"MXFP4", 32, 17, 0, 0},
    [MXFP4_APART] = {"MXFP4", 32, 16, 1, 0},
    [SMOE_Q4] = {"SMOE_Q4", 64, 32, 2, 0},
    [SMOE_Q2] = {"SMOE_Q2", 64, 16, 2, 0},
    [BF16] = {"BF16", 1, 2, 0, 0},
    [F16] = {"F16", 1, 2, 0, 0},
    [F8_E4M3] = {"F8_E4M3", 1, 1, 0, 0},
    [F8_E5M2] = {"F8_E5M2", 1, 1, 0, 0},
    [F8_E4M3_TILES] = {"F8_E4M3", 1, 1, 4, TILE},
    [F8_E5M2_TILES] = {"F8_E5M2", 1, 1, 4, TILE},
};

typedef void decoder(const uint8_t *data, const uint8_t *scales, size_t blocks, float *out);

/* All that is compiled once for each set of instructions. */
struct decoders {
    decoder *of[N_TYPES];
    void (*times)(float *values, size_t n, float scale);
    void (*to_f16)(const float *in, size_t n, uint16_t *out);
    void (*to_bf16)(const float *in, size_t n, uint16_t *out);
};

/* IQ4_NL's and IQ4_XS's 16 steps. */
static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
/* Twice the values of an E2M1 (OCP Microscaling Formats 1.0). */
static const int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

#define FIFTEENTH_HIGH 0x1.1111p-4f
#define FIFTEENTH_LOW  0x1.11111p-24f

static inline uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* A minimum m that is added to products with d.  Of two NaN the sum is the first by the reference, but a compiler
 * may change the sides of a sum; so next to a NaN there is no second one. */
static inline float beside(float d, float m) {
    return d != d ? 0.0f : m;
}

/* Half the power of two that an E8M0 stands for: the other factor is twice an E2M1. */
static inline float half_of_e8m0(uint8_t e) {
    return from_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, a = h & 0x7FFF;
    uint32_t tiny = bits_of((float)a * 0x1p-24f), high = a < 0x7C00 ? 0x38000000 : 0x70000000;
    return from_bits(sign | (a < 0x400 ? tiny : (a << 13) + high));
}

/* To nearest even; a NaN keeps its sign and upper bits, as numpy has it.  Without branches and with signed numbers
 * only, so that a loop of it becomes vectors. */
static inline uint16_t float_to_half(float f) {
    int32_t u = (int32_t)bits_of(f), a = u & 0x7FFFFFFF, sign = u >> 16 & 0x8000;
    int32_t normal = (a - 0x38000000 + 0xFFF + (a >> 13 & 1)) >> 13;
    int32_t tiny = (int32_t)bits_of(from_bits((uint32_t)a) + 0.5f) - 0x3F000000; /* rounded to multiples of 2^-24 */
    int32_t payload = a >> 13 & 0x3FF, nan = 0x7C00 | (payload ? payload : 1);
    int32_t large = a > 0x7F800000 ? nan : 0x7C00, finite = a < 0x38800000 ? tiny : normal;
    return (uint16_t)(sign | (a < 0x477FF000 ? finite : large));
}

/* To nearest even; a NaN becomes the quiet one of its sign, as ml_dtypes has it. */
static inline uint16_t float_to_bf16(float f) {
    uint32_t u = bits_of(f), rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
    uint32_t nan = (u >> 16 & 0x8000) | 0x7FC0;
    return (uint16_t)((int32_t)(u & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

/* Vectors of 16 bytes, codes or halves of float16, and of 8 floats.  Arithmetic on them is that of their items. */
typedef uint8_t codes __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(16)));
typedef uint64_t longs __attribute__((vector_size(16)));
#if defined(__x86_64__)
typedef float floats __attribute__((vector_size(32)));
#endif

/* Where a loop's counter says how far to shift, which should be known when the code is made. */
#if defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

static inline codes codes_at(const uint8_t *at) {
    codes c;
    memcpy(&c, at, sizeof c);
    return c;
}

/* Each byte's bits from `shift` on, under `mask`.  A shift of pairs of bytes, for processors have none of bytes: the
 * mask has to take what comes over from the neighbour. */
static inline codes bits_from(codes c, int shift, uint8_t mask) {
    return (codes)((halves)c >> (uint16_t)shift) & mask;
}

/* Codes below 16, times 16. */
static inline codes four_up(codes c) {
    return (codes)((halves)c << 4);
}

static inline codes low_half(codes c) {
    return c & 15;
}

static inline codes high_half(codes c) {
    return bits_from(c, 4, 15);
}

/* a[0] b[0] a[1] b[1] ..., and how it goes on from a[8]. */
static inline codes first_in_turn(codes a, codes b) {
#if defined(__x86_64__)
    return (codes)_mm_unpacklo_epi8((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    return (codes)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b);
#else
    codes c;
    for (int i = 0; i < 16; i++)
        c[i] = i % 2 ? b[i / 2] : a[i / 2];
    return c;
#endif
}

static inline codes later_in_turn(codes a, codes b) {
#if defined(__x86_64__)
    return (codes)_mm_unpackhi_epi8((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    return (codes)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b);
#else
    codes c;
    for (int i = 0; i < 16; i++)
        c[i] = i % 2 ? b[8 + i / 2] : a[8 + i / 2];
    return c;
#endif
}

/* 16 for each of 16 bits that is set, the lowest first. */
static inline codes fifth_bits(const uint8_t *at) {
    const codes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    longs spread = {at[0] * 0x0101010101010101u, at[1] * 0x0101010101010101u};
    return (codes)(((codes)spread & bit) != 0) & 16;
}

#define KERNEL(name) name##_plain
#define TARGET
#define WIDE 0
#include "dequant_kernels.h"

#if defined(__x86_64__)
#define KERNEL(name) name##_avx2
#define TARGET       __attribute__((target("avx2,f16c")))
#define WIDE         1
#include "dequant_kernels.h"

static const struct decoders *decoders_here(bool plain) {
    bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    return plain || !wide ? &decoders_plain : &decoders_avx2;
}
#else
static const struct decoders *decoders_here(bool plain) {
    (void)plain;
    return &decoders_plain;
}
#endif

/* One thread's part of a job: the weights from `first` to `end`. */
struct share {
    const smoe_dequant_job *job;
    const struct decoders *decoders;
    uint64_t first, end;
};

/* Numbers that are no blocks are decoded by sixteens. */
static size_t step_of(const smoe_block_type *t) {
    return t->elements > 1 ? t->elements : 16;
}

static uint64_t blocks_for(uint64_t weights, uint32_t block) {
    return weights / block + (weights % block != 0);
}

/* Weights from `at` on that have what is needed at hand: a chunk, or the rest of a row's tile. */
static size_t run_length(const struct share *s, uint32_t tile, uint64_t at) {
    uint64_t most = CHUNK;
    if (tile) {
        uint64_t column = at % s->job->columns, in_row = s->job->columns - column;
        most = tile - column % tile;
        most = most < in_row ? most : in_row;
    }
    return (size_t)(most < s->end - at ? most : s->end - at);
}

static float scale_of_tile(const smoe_dequant_job *job, uint32_t tile, uint64_t at) {
    uint64_t row = at / job->columns / tile, column = at % job->columns / tile;
    float scale;
    memcpy(&scale, (const uint8_t *)job->scales + 4 * (row * blocks_for(job->columns, tile) + column), sizeof scale);
    return scale;
}

/* The last block where the weights end inside it: decoded from a copy that is whole. */
static void decode_rest(decoder *decode, const smoe_block_type *t, const uint8_t *data, const uint8_t *scales, size_t n,
                        float *out) {
    uint8_t block[64] = {0};
    float whole[64];
    memcpy(block, data, n * t->bytes / t->elements);
    decode(block, scales, 1, whole);
    memcpy(out, whole, n * sizeof *out);
}

static void decode_run(const struct share *s, uint64_t at, size_t n, float *out) {
    const smoe_dequant_job *job = s->job;
    const smoe_block_type *t = &types[job->type];
    decoder *decode = s->decoders->of[job->type];
    size_t step = step_of(t), blocks = n / step, rest = n % step;
    const uint8_t *data = (const uint8_t *)job->data + at / t->elements * t->bytes;
    const uint8_t *scales = job->scales;
    if (scales && !t->tile)
        scales += at / t->elements * t->scale_bytes;
    decode(data, scales, blocks, out);
    if (rest)
        decode_rest(decode, t, data + (n - rest) * t->bytes / t->elements,
                    scales ? scales + blocks * t->scale_bytes : NULL, rest, out + n - rest);
    if (t->tile)
        s->decoders->times(out, n, scale_of_tile(job, t->tile, at));
}

static void *decode_share(void *argument) {
    const struct share *s = argument;
    const smoe_dequant_job *job = s->job;
    float chunk[CHUNK];
    for (uint64_t at = s->first, n; at < s->end; at += n) {
        n = run_length(s, types[job->type].tile, at);
        float *wide = job->to == SMOE_TO_F32 ? (float *)job->out + at : chunk;
        decode_run(s, at, (size_t)n, wide);
        if (job->to == SMOE_TO_F16)
            s->decoders->to_f16(wide, (size_t)n, (uint16_t *)job->out + at);
        else if (job->to == SMOE_TO_BF16)
            s->decoders->to_bf16(wide, (size_t)n, (uint16_t *)job->out + at);
    }
    return NULL;
}

/* Threads for the other shares, with every signal left to the process's own threads.  A share for which none can be
 * had is done here. */
static void decode_shares(struct share *shares, uint32_t n) {
    pthread_t threads[MAX_THREADS];
    bool started[MAX_THREADS] = {false};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (uint32_t i = 1; i < n; i++)
        started[i] = pthread_create(&threads[i], NULL, decode_share, &shares[i]) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    decode_share(&shares[0]);
    for (uint32_t i = 1; i < n; i++)
        if (started[i])
            pthread_join(threads[i], NULL);
        else
            decode_share(&shares[i]);
}

const smoe_block_type *smoe_block_type_at(uint32_t type) {
    return type < N_TYPES ? &types[type] : NULL;
}

/* Do the sizes fit the type and the shape?  No product is formed that could wrap. */
static bool adds_up(const smoe_dequant_job *job, uint64_t *weights) {
    if (job->type >= N_TYPES || job->to > SMOE_TO_BF16 || !job->data || !job->out)
        return false;
    const smoe_block_type *t = &types[job->type];
    if (!job->rows || !job->columns || job->rows > (UINT64_MAX >> 8) / job->columns)
        return false;
    *weights = job->rows * job->columns;
    bool flat = t->scale_bytes && !t->tile; /* a group may run over the end of a row, and end early */
    if (!flat && job->columns % t->elements)
        return false;
    uint64_t bits = *weights % t->elements * t->bytes * 8 / t->elements;
    uint64_t bytes = *weights / t->elements * t->bytes + bits / 8;
    uint64_t scales = blocks_for(*weights, t->elements) * t->scale_bytes;
    if (t->tile)
        scales = blocks_for(job->rows, t->tile) * blocks_for(job->columns, t->tile) * t->scale_bytes;
    uint64_t item = job->to == SMOE_TO_F32 ? 4 : 2;
    return bits % 8 == 0 && job->data_bytes == bytes && job->scales_bytes == scales && !scales == !job->scales &&
           job->out_bytes == *weights * item;
}

int smoe_dequantize(const smoe_dequant_job *job) {
    uint64_t weights;
    if (!adds_up(job, &weights))
        return -EINVAL;
    uint64_t unit = types[job->type].elements, units = blocks_for(weights, (uint32_t)unit);
    uint32_t n = job->threads < MAX_THREADS ? job->threads : MAX_THREADS;
    n = n < 1 ? 1 : n > units ? (uint32_t)units : n;
    struct share shares[MAX_THREADS];
    for (uint32_t i = 0; i < n; i++) {
        uint64_t first = units / n * i, end = i + 1 < n ? units / n * (i + 1) * unit : weights;
        shares[i] = (struct share){job, decoders_here(job->plain), first * unit, end};
    }
    decode_shares(shares, n);
    return 0;
}
