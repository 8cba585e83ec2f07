/* crc32c.c: the checksum of experts: CRC-32C (Castagnoli), reflected polynomial 0x82F63B78, start and end
 * inverted, as in iSCSI (RFC 3720, B.4).
 *
 * Three ways to the same number, chosen once a process:
 *   tables     eight bytes a step by eight tables ("slicing-by-8"); everywhere
 *   SSE4.2     the crc32 instruction of x86-64, where the processor has it
 *   ARMv8 CRC  crc32cx of arm64, likewise
 * One such instruction takes three cycles and a new one can begin in each, so the fast way runs three
 * streams side by side over neighbouring stretches and joins them.  Joining rests on the CRC being linear:
 * the CRC of A followed by B is that of A moved on over len(B) zero bytes, xor that of B; the move over one
 * stretch is a table, filled at the start.
 */
#include "core.h"

#include <pthread.h>
#include <string.h>

#define POLYNOMIAL    0x82F63B78u
#define STRETCH_BYTES 2048u

static uint32_t step[8][256];  /* step[k][b]: byte b followed by k zero bytes */
static uint32_t moved[4][256]; /* moved[k][b]: byte k of a CRC, moved on over STRETCH_BYTES zero bytes */
static bool by_instruction;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static inline uint64_t word_at(const unsigned char *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* --- by tables -------------------------------------------------------------------------------------- */

static uint32_t tables_bytes(uint32_t crc, const unsigned char *p, uint64_t n) {
    while (n--)
        crc = crc >> 8 ^ step[0][(crc ^ *p++) & 0xFF];
    return crc;
}

static uint32_t tables_run(uint32_t crc, const unsigned char *p, uint64_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t w = word_at(p) ^ crc; /* little-endian: shm_layout.h asserts it */
        crc = step[7][w & 0xFF] ^ step[6][w >> 8 & 0xFF] ^ step[5][w >> 16 & 0xFF] ^ step[4][w >> 24 & 0xFF] ^
              step[3][w >> 32 & 0xFF] ^ step[2][w >> 40 & 0xFF] ^ step[1][w >> 48 & 0xFF] ^ step[0][w >> 56];
    }
    return tables_bytes(crc, p, n);
}

/* --- by instruction --------------------------------------------------------------------------------- */

#if defined(__x86_64__)
static bool have_instruction(void) {
    return __builtin_cpu_supports("sse4.2");
}
static inline uint32_t add_word(uint32_t crc, uint64_t w) {
    uint64_t wide = crc;
    __asm__("crc32q %1, %0" : "+r"(wide) : "rm"(w));
    return (uint32_t)wide;
}
#elif defined(__aarch64__)
static bool have_instruction(void) {
    return plat_has_crc32c();
}
static inline uint32_t add_word(uint32_t crc, uint64_t w) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(w));
    return crc;
}
#else
static bool have_instruction(void) {
    return false;
}
static inline uint32_t add_word(uint32_t crc, uint64_t w) {
    unsigned char bytes[sizeof w];
    memcpy(bytes, &w, sizeof w);
    return tables_bytes(crc, bytes, sizeof bytes);
}
#endif

static uint32_t move_on(uint32_t crc) {
    return moved[0][crc & 0xFF] ^ moved[1][crc >> 8 & 0xFF] ^ moved[2][crc >> 16 & 0xFF] ^ moved[3][crc >> 24];
}

static uint32_t instruction_run(uint32_t crc, const unsigned char *p, uint64_t n) {
    for (; n >= 3 * STRETCH_BYTES; n -= 3 * STRETCH_BYTES, p += 3 * STRETCH_BYTES) {
        uint32_t second = 0, third = 0;
        for (uint32_t i = 0; i < STRETCH_BYTES; i += 8) {
            crc = add_word(crc, word_at(p + i));
            second = add_word(second, word_at(p + STRETCH_BYTES + i));
            third = add_word(third, word_at(p + 2 * STRETCH_BYTES + i));
        }
        crc = move_on(move_on(crc) ^ second) ^ third;
    }
    for (; n >= 8; n -= 8, p += 8)
        crc = add_word(crc, word_at(p));
    return tables_bytes(crc, p, n);
}

/* --- both ------------------------------------------------------------------------------------------- */

static void prepare(void) {
    static const unsigned char zeros[STRETCH_BYTES];
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        step[0][b] = crc;
    }
    for (uint32_t k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++)
            step[k][b] = step[k - 1][b] >> 8 ^ step[0][step[k - 1][b] & 0xFF];
    for (uint32_t bit = 0; bit < 32; bit++) /* of single bits first; of the rest by sums */
        moved[bit / 8][1u << bit % 8] = tables_run(1u << bit, zeros, sizeof zeros);
    for (uint32_t k = 0; k < 4; k++)
        for (uint32_t b = 1; b < 256; b++)
            moved[k][b] = moved[k][b & (b - 1)] ^ moved[k][b & -b];
    by_instruction = have_instruction();
}

uint32_t smoe_crc32c(uint32_t crc, const void *data, uint64_t bytes) {
    pthread_once(&once, prepare);
    return ~(by_instruction ? instruction_run : tables_run)(~crc, data, bytes);
}

uint32_t crc32c_by_tables(uint32_t crc, const void *data, uint64_t bytes) {
    pthread_once(&once, prepare);
    return ~tables_run(~crc, data, bytes);
}
