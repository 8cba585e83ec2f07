/* fuzz_ring.c: clients, a worker and the sweep on a ring that is written over, between their steps and inside them.
 *
 * Inside: at each of the core's failpoints the next operation of the input is looked at, and if it is one of those, it
 * is done there: between a look and the use of what was seen.  The worker reads real files: no read may lead out of
 * its file or its slot, and no slot but those that it was given may be written to. */
#include "scribble.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define INSIDE 0x80 /* in `what`: to be done at a failpoint */
#define TURNS  6    /* of a worker's loop at most */

static struct stream in;
static smoe_ring *clients[2], *worker;
static volatile int stop;
static uint32_t turns, ops;
static bool given[SMOE_SLOTS_MAX]; /* slots that the worker was given in this turn */

static bool take(struct op *op) {
    return ops++ < OPS_MOST && scribble_next(&in, op);
}

/* The canaries in the data segment: a word every CANARY_STEP bytes, which no read is smaller than. */
#define CANARY_STEP 512u
#define CANARY      0xA5C35A3CA5C35A3Cull

static void set_canaries(uint64_t slot) {
    for (uint64_t at = slot * ring.geometry.slot_bytes; at < (slot + 1) * ring.geometry.slot_bytes; at += CANARY_STEP)
        *(uint64_t *)(void *)(ring.data + at) = CANARY;
}

static void check_canaries(void) {
    for (uint64_t s = 0; s < ring.geometry.n_slots; s++) {
        const unsigned char *slot = ring.data + s * ring.geometry.slot_bytes;
        for (uint64_t at = 0; !given[s] && at < ring.geometry.slot_bytes; at += CANARY_STEP)
            REQUIRE(*(const uint64_t *)(const void *)(slot + at) == CANARY);
        if (given[s])
            set_canaries(s);
        given[s] = false;
    }
}

#ifdef PREAD_WRAPPED /* by the linker, where it can */
ssize_t __real_pread(int fd, void *to, size_t count, off_t offset);
ssize_t __wrap_pread(int fd, void *to, size_t count, off_t offset);

ssize_t __wrap_pread(int fd, void *to, size_t count, off_t offset) {
    struct stat st;
    REQUIRE(fstat(fd, &st) == 0 && offset >= 0 && offset <= st.st_size);
    REQUIRE(within((uint64_t)offset, count, ((uint64_t)st.st_size + 4095) / 4096 * 4096));
    if (worker && (unsigned char *)to >= worker->data && (unsigned char *)to < worker->data + worker->data_bytes) {
        uint64_t at = (uint64_t)((unsigned char *)to - worker->data);
        REQUIRE(given[at / worker->slot_bytes] && within(at % worker->slot_bytes, count, worker->slot_bytes));
    }
    return __real_pread(fd, to, count, offset);
}
#endif

void failpoint(const char *name) {
    struct op op;
    if (worker && strcmp(name, "read.recorded") == 0) /* in this step nobody can have written over it */
        given[atomic_load(&worker->participants[worker->id].current_slot) - 1] = true;
    if (in.left >= OP_BYTES && in.at[0] >= INSIDE && in.at[0] < INSIDE + 32 && take(&op))
        scribble_put(&op);
    if (worker && strcmp(name, "sleep.marked") == 0) {
        stop = 1;
        atomic_fetch_add(&worker->hot->doorbell, 1); /* it does not sleep */
    }
    if (worker && strcmp(name, "pop.returned") == 0 && ++turns >= TURNS)
        stop = 1;
}

static void work(void) {
    const struct worker_options options = {.watch_fd = -1, .ready_fd = -1, .stop = &stop};
    smoe_error e;
    if (smoe_attach(ring.name, SMOE_ROLE_WORKER, 5, "fuzz", &worker, &e) < 0) {
        worker = NULL;
        return;
    }
    stop = 0;
    turns = 0;
    (void)worker_run(worker, &options, &e);
    smoe_detach(worker);
    worker = NULL;
    check_canaries();
}

static void sweep(void) {
    smoe_error e;
    smoe_ring *r;
    int lock = smoe_supervisor_lock(ring.name, &e);
    REQUIRE(lock >= 0);
    if (smoe_attach(ring.name, SMOE_ROLE_SUPERVISOR, (uint32_t)lock, "fuzz", &r, &e) < 0)
        return;
    (void)smoe_recover(r, 1, NULL);
    (void)smoe_give_up_queued(r);
    (void)smoe_intact(r, SMOE_LIVE, &e);
    smoe_detach(r);
}

/* What a client does next.  No call may wait: time limits are over at once, and naps end calls. */
static void act(smoe_ring *r, const struct op *op) {
    static smoe_hold held[2][4];
    smoe_hold *h = held[r == clients[1]], one[3];
    int64_t layer = op->b & 3, experts[3] = {op->value & 15, op->value >> 8 & 15, op->value >> 16 & 15};
    uint32_t n = 1 + (op->b >> 2 & 3) % 3;
    char text[256];
    smoe_error e = {0};
    switch (op->a & 15) {
    case 0:
    case 1:
        (void)smoe_release(r, h, 4);
        memset(h, 0, sizeof held[0]);
        (void)smoe_acquire(r, layer, experts, n, h, 0, &e);
        break;
    case 2:
        (void)smoe_wait(r, h, 4, 0, &e);
        break;
    case 3:
        (void)smoe_wait_any(r, h, 4, 0, &e);
        break;
    case 4:
        (void)smoe_release(r, h, 4);
        break;
    case 5:
        (void)smoe_speculate(r, layer, experts, n, &e);
        break;
    case 6:
        if (smoe_claim_specific(r, layer, experts[0], one, &e) == 1)
            (void)smoe_release(r, one, 1);
        break;
    case 7:
        (void)smoe_acquire_cold(r, layer, experts, n, one, 0, 0, &e);
        (void)smoe_release(r, one, n);
        break;
    case 8:
        if (smoe_hold_again(r, &h[0], one) == 0)
            (void)smoe_release(r, one, 1);
        break;
    case 9:
        (void)smoe_busy(r, op->b & 1);
        break;
    case 10:
        (void)smoe_trace_ranks(r, layer, experts, n, &e);
        break;
    case 11:
        memset(one, 0, sizeof one);
        if (smoe_fetch(r, layer, experts, n, one, 0, &e) == -EINTR || one[0].status != SMOE_HOLD_NONE)
            (void)smoe_release(r, one, n);
        break;
    default:
        break;
    }
    if (e.code)
        (void)smoe_error_text(r, &e, text, sizeof text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static bool canaries;
    struct op op;
    smoe_error e;
    for (uint32_t s = 0; !canaries && s < ring.geometry.n_slots; s++)
        set_canaries(s);
    canaries = true;
    scribble_mend();
    in = (struct stream){NULL, 0};
    ops = 0;
    for (int i = 0; i < 2; i++) {
        REQUIRE(smoe_attach(ring.name, SMOE_ROLE_CLIENT, 0, "fuzz", &clients[i], &e) == 0);
        smoe_set_interruptible(clients[i], 1);
        smoe_set_spin_us(clients[i], 0);
    }
    in = (struct stream){data, size};
    while (take(&op)) {
        if (op.what < INSIDE + 32)
            scribble_put(&op);
        else if (op.what < 0xE0)
            act(clients[op.what & 1], &op);
        else if (op.what < 0xF8)
            work();
        else
            sweep();
    }
    in.left = 0;
    for (int i = 0; i < 2; i++)
        smoe_detach(clients[i]);
    return 0;
}
