/* fuzz_bytes.c: what works on plain bytes of any length and address: CRC-32C, the search for what is not finite, and
 * the quantiser, each held against its simpler twin. */
#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool ok) {
    if (!ok)
        abort();
}

static void sums(const uint8_t *at, size_t n, uint32_t from, size_t cut) {
    uint32_t whole = smoe_crc32c(from, at, n);
    check(whole == crc32c_by_tables(from, at, n));
    check(whole == smoe_crc32c(smoe_crc32c(from, at, cut), at + cut, n - cut));
}

static void not_finite(const uint8_t *at, size_t n, uint32_t width, uint64_t mask, uint64_t least) {
    int64_t found = smoe_find_not_finite(at, n, width, mask, least), first = -1;
    if (width != 1 && width != 2 && width != 4 && width != 8) {
        check(found < -1);
        return;
    }
    for (size_t i = 0; i + width <= n && first < 0; i += width) {
        uint64_t v = 0;
        memcpy(&v, at + i, width);
        if ((v & mask) >= least)
            first = (int64_t)i;
    }
    check(found == first);
}

static void quantize(const uint8_t *at, size_t n, int bits) {
    uint64_t groups = n / 256;
    if (groups > 4)
        groups = 4;
    float *weights = malloc(groups * 256 + 1), scales[2][4] = {{0}}, candidates[64];
    unsigned char codes[2][4 * 32] = {{0}};
    memcpy(weights, at, groups * 256);
    for (int i = 0; i < 64; i++)
        candidates[i] = (float)(i + 1) / 64.0f;
    int rc = smoe_quantize(weights, groups, bits, candidates, codes[0], scales[0]);
    if (bits != 2 && bits != 4) {
        check(rc == -EINVAL);
        free(weights);
        return;
    }
    check(rc == quantize_plainly(weights, groups, bits, candidates, codes[1], scales[1]));
    check(rc < 0 ||
          (memcmp(codes[0], codes[1], sizeof codes[0]) == 0 && memcmp(scales[0], scales[1], sizeof scales[0]) == 0));
    free(weights);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const struct {
        uint32_t width;
        uint64_t mask, least;
    } numbers[] = {
        {1, 0x7F, 0x7F},
        {2, 0x7FFF, 0x7C00},
        {2, 0x7FFF, 0x7F80},
        {4, 0x7FFFFFFF, 0x7F800000},
        {8, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000},
        {3, 0, 0},
    };
    if (size < 4)
        return 0;
    size_t n = size - 4, shift = data[0] % 17;
    uint8_t *whole = malloc(n + shift), *at = whole + shift;
    memcpy(at, data + 4, n);
    sums(at, n, data[1], n ? data[2] % (n + 1) : 0);
    uint32_t k = data[3] % 6, aligned = numbers[k].width;
    size_t used = aligned == 3 ? n : n / aligned * aligned;
    uint8_t *own = malloc(used + 1); /* aligned to its items */
    memcpy(own, at, used);
    not_finite(own, used, aligned, numbers[k].mask, numbers[k].least);
    free(own);
    quantize(at, n, data[3] & 128 ? 2 : data[3] & 64 ? 4 : data[3] % 8);
    free(whole);
    return 0;
}
