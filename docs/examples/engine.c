/* An engine in C on a running system: it looks up an expert's tensors, demands a batch without waiting, and
 * takes each expert as it lands.
 *
 *     cc -std=c11 engine.c -o engine $(python -m smoe_mp.cflags)
 *     smoe-mp up my-model.smoe --name mine &
 *     ./engine mine 5 3 17 42          ring, layer, experts
 *
 * What it "computes" is the sum of each expert's bytes. */
#include <smoe.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 64, TENSORS = 32 };

static int complain(const smoe_ring *ring, const smoe_error *error) {
    char text[512];
    smoe_error_text(ring, error, text, sizeof text);
    fprintf(stderr, "engine: error %d: %s\n", error->code, text);
    return 1;
}

/* Name, type, shape and place of each tensor of an expert: read once, and used for every later demand of it. */
static void describe(const smoe_ring *ring, int64_t index) {
    smoe_tensor tensors[TENSORS];
    int n = smoe_expert_tensors(ring, (uint32_t)index, tensors, TENSORS);
    for (int i = 0; i < n && i < TENSORS; i++) {
        printf("  %s: %s [", tensors[i].name, tensors[i].dtype);
        for (uint32_t d = 0; d < tensors[i].ndim; d++)
            printf("%s%" PRIu64, d ? ", " : "", tensors[i].shape[d]);
        printf("], %" PRIu64 " bytes at %" PRIu64 "\n", tensors[i].bytes, tensors[i].offset);
    }
}

static uint64_t sum_of(const smoe_ring *ring, const smoe_hold *hold) {
    const uint8_t *slot = smoe_slot_data(ring, hold->slot);
    smoe_part parts[TENSORS];
    int n = smoe_expert_parts(ring, hold->expert_index, parts, TENSORS);
    uint64_t sum = 0;
    for (int i = 0; i < n && i < TENSORS; i++)
        for (uint64_t k = 0; k < parts[i].bytes; k++)
            sum += slot[parts[i].offset + k];
    return sum;
}

/* One layer of one token: every expert is used as soon as it is there, and given back at once. */
static int compute(smoe_ring *ring, int64_t layer, const int64_t *experts, uint32_t n, smoe_error *error) {
    smoe_hold holds[MOST];
    int hits = smoe_acquire(ring, layer, experts, n, holds, -1, error);
    if (hits < 0)
        return complain(ring, error);
    printf("%d of %" PRIu32 " were there\n", hits, n);
    for (uint32_t left = n; left > 0; left--) {
        int i = -1;
        for (uint32_t k = 0; k < n && i < 0; k++) /* those that were there first */
            if (holds[k].status == SMOE_HOLD_RESIDENT)
                i = (int)k;
        if (i < 0)
            i = smoe_wait_any(ring, holds, n, -1, error);
        if (i < 0) {
            smoe_release(ring, holds, n);
            return complain(ring, error);
        }
        printf("expert %" PRId64 ": %" PRIu64 "\n", experts[i], sum_of(ring, &holds[i]));
        smoe_release(ring, &holds[i], 1);
        holds[i].status = SMOE_HOLD_NONE;
    }
    return 0;
}

int main(int argc, char **argv) {
    int64_t experts[MOST], layer = argc > 2 ? atoll(argv[2]) : 0;
    uint32_t n = 0;
    for (int i = 3; i < argc && n < MOST; i++)
        experts[n++] = atoll(argv[i]);
    if (n == 0) {
        fprintf(stderr, "usage: engine RING LAYER EXPERT...\n");
        return 2;
    }
    smoe_ring *ring;
    smoe_error error = {0};
    if (smoe_attach(argv[1], SMOE_ROLE_CLIENT, 0, "engine.c", &ring, &error) < 0)
        return complain(NULL, &error);
    int64_t index = smoe_expert_index(ring, layer, experts[0]);
    if (index >= 0)
        describe(ring, index);
    smoe_busy(ring, 1); /* prewarming rests while a request is served */
    int failed = compute(ring, layer, experts, n, &error);
    smoe_busy(ring, 0);
    smoe_detach(ring);
    return failed;
}
