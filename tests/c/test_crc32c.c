/* test_crc32c.c: CRC-32C by tables and by instruction: known sums, and each against a bit at a time. */
#include "core.h"
#include "test.h"

#include <stdlib.h>
#include <string.h>

typedef uint32_t crc_function(uint32_t crc, const void *data, uint64_t bytes);

static crc_function *const WAYS[] = {smoe_crc32c, crc32c_by_tables};

/* The definition: a bit at a time. */
static uint32_t by_bits(const unsigned char *p, uint64_t n) {
    uint32_t crc = ~0u;
    while (n--) {
        crc ^= *p++;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

/* RFC 3720, B.4, and the check value of the catalogues. */
static void known_sums(void) {
    unsigned char zeros[32] = {0}, ones[32], up[32], down[32];
    memset(ones, 0xFF, sizeof ones);
    for (unsigned i = 0; i < 32; i++)
        up[i] = (unsigned char)i, down[i] = (unsigned char)(31 - i);
    for (int way = 0; way < 2; way++) {
        CHECK_EQ(WAYS[way](0, "", 0), 0);
        CHECK_EQ(WAYS[way](0, "123456789", 9), 0xE3069283);
        CHECK_EQ(WAYS[way](0, zeros, 32), 0x8A9136AA);
        CHECK_EQ(WAYS[way](0, ones, 32), 0x62A8AB43);
        CHECK_EQ(WAYS[way](0, up, 32), 0x46DD794E);
        CHECK_EQ(WAYS[way](0, down, 32), 0x113FDB5C);
    }
}

/* Lengths around the steps of 8 bytes and of three stretches of 2048, at every address modulo 8. */
static void every_length(void) {
    static const uint32_t bases[] = {0, 2048, 6144, 12288, 18432};
    unsigned char *data = malloc(18432 + 64);
    uint64_t seed = 7;
    REQUIRE(data);
    for (uint32_t i = 0; i < 18432 + 64; i++)
        data[i] = (unsigned char)random_next(&seed);
    for (uint32_t b = 0; b < sizeof bases / sizeof *bases; b++)
        for (uint32_t more = 0; more < 20; more++)
            for (uint32_t at = 0; at < 8; at++) {
                uint32_t n = bases[b] + more, want = by_bits(data + at, n);
                CHECK_EQ(smoe_crc32c(0, data + at, n), want);
                CHECK_EQ(crc32c_by_tables(0, data + at, n), want);
            }
    free(data);
}

static void in_pieces(void) {
    unsigned char data[20000];
    uint64_t seed = 11;
    for (uint32_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)random_next(&seed);
    uint32_t whole = by_bits(data, sizeof data);
    for (int way = 0; way < 2; way++)
        for (int turn = 0; turn < 200; turn++) {
            uint32_t crc = 0, at = 0;
            while (at < sizeof data) {
                uint32_t n = 1 + random_below(&seed, 9000);
                n = n < sizeof data - at ? n : (uint32_t)sizeof data - at;
                crc = WAYS[way](crc, data + at, n);
                at += n;
            }
            CHECK_EQ(crc, whole);
        }
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"known sums", known_sums}, {"every length", every_length}, {"in pieces", in_pieces}};
    return run_tests(tests, 3, argc, argv);
}
