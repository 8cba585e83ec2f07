/* scribble.h: a ring whose control segment the fuzzer writes over, and the stream of operations that an input is.
 *
 * An input is a row of operations of OP_BYTES: what, a, b (2 bytes), value (8 bytes).  The ring is sound at the
 * beginning of each, so that inputs come deep: whatever is wrong was put there by them. */
#ifndef SCRIBBLE_H
#define SCRIBBLE_H

#include "testring.h"

#include <stddef.h>

#define OP_BYTES 12u
#define OPS_MOST 64u

struct op {
    uint8_t what, a;
    uint16_t b;
    uint64_t value;
};

struct stream {
    const uint8_t *at;
    size_t left;
};

extern struct testring ring;

/* Make the ring, once a process. */
void scribble_open(void);
/* As it was when it was made. */
void scribble_mend(void);
/* The next operation; false: there is none. */
bool scribble_next(struct stream *in, struct op *op);
/* Write op's value over the control segment: `a` chooses the region, `b` the place in it, `what` the width, and
 * whether it is one record or that field in all of them. */
void scribble_put(const struct op *op);

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
