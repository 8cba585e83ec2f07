/* finite.c: is a run of floating-point numbers free of infinities and NaNs?
 *
 * Without its sign, a number is finite if its bits are below a threshold of its type, whatever the type.  So
 * one loop does for all of one width: blocks are looked at as a whole, without branches, which compilers
 * turn into vector instructions; only a block that has one is gone through again. */
#include "core.h"

#include <errno.h>
#include <string.h>

#define BLOCK 2048u

#define SCAN(name, type)                                                                                               \
    static int64_t name(const unsigned char *p, uint64_t n, uint64_t mask, uint64_t least) {                           \
        const type m = (type)mask, l = (type)least;                                                                    \
        for (uint64_t from = 0; from < n; from += BLOCK) {                                                             \
            uint32_t count = n - from < BLOCK ? (uint32_t)(n - from) : BLOCK;                                          \
            type v, bad = 0;                                                                                           \
            for (uint32_t i = 0; i < count; i++) {                                                                     \
                memcpy(&v, p + (from + i) * sizeof v, sizeof v);                                                       \
                bad |= (type)((type)(v & m) >= l);                                                                     \
            }                                                                                                          \
            for (uint32_t i = 0; bad && i < count; i++) {                                                              \
                memcpy(&v, p + (from + i) * sizeof v, sizeof v);                                                       \
                if ((type)(v & m) >= l)                                                                                \
                    return (int64_t)((from + i) * sizeof v);                                                           \
            }                                                                                                          \
        }                                                                                                              \
        return -1;                                                                                                     \
    }

SCAN(scan8, uint8_t)
SCAN(scan16, uint16_t)
SCAN(scan32, uint32_t)
SCAN(scan64, uint64_t)

int64_t smoe_find_not_finite(const void *data, uint64_t bytes, uint32_t width, uint64_t mask, uint64_t least) {
    switch (width) {
    case 1:
        return scan8(data, bytes, mask, least);
    case 2:
        return scan16(data, bytes / 2, mask, least);
    case 4:
        return scan32(data, bytes / 4, mask, least);
    case 8:
        return scan64(data, bytes / 8, mask, least);
    default:
        return -EINVAL;
    }
}
