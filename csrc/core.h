/* core.h: what the C files share: the handle, the slot word, and each file's functions.
 *
 * Reading order: shm_layout.h, segment.c, slot.c, queue.c, lru.c, counters.c, ring.c, trace.c, crc32c.c,
 * worker.c, recover.c.
 *
 * Memory order.  Five pairs of accesses carry everything; the labels stand at the code:
 *   P1/P2  publish: the worker's CAS to READY or FAILED (release)  /  a reader's load of the word (acquire)
 *   T1/T2  take: any CAS that takes or joins a slot (acq_rel)      /  the CAS that follows it (acq_rel)
 *   Q1/Q2  a queue cell's CAS by the pusher (acq_rel)              /  the popper's load and CAS (acquire, acq_rel)
 *   B1/B2  doorbell: the pusher adds to it after its push          /  a sleeper reads it before the queues
 *   C1/C2  a client's mark: stored (release) after its generation  /  loaded (acquire) before the generation
 * Reservations and guess bits are "publish mine, then look at all": sequentially consistent.
 * Homes, histogram, counters, ticks and bounds are hints, figures or maxima: relaxed.
 */
#ifndef SMOE_CORE_H
#define SMOE_CORE_H

#include "platform.h"
#include "shm_layout.h"
#include "smoe.h"

#include <stdbool.h>

#define INTERNAL __attribute__((visibility("hidden")))

/* In a test build a process can be made to die at a named step: see failpoint.h. */
#ifdef SMOE_FAILPOINTS
void failpoint(const char *name);
#define FAILPOINT(name) failpoint(name)
#else
#define FAILPOINT(name) ((void)0)
#endif

struct smoe_ring {
    /* The control segment's regions in this process's map. */
    struct smoe_header *header;
    struct smoe_hot *hot;
    _Atomic uint32_t *reservations;
    struct smoe_participant *participants;
    _Atomic uint64_t (*counters)[SMOE_COUNTER_ROW], (*marks)[SMOE_COUNTER_ROW];
    _Atomic uint32_t *file_modes;
    _Atomic uint64_t *words, *ticks, *bounds, *empties, *guesses, *colds;
    _Atomic uint64_t *demand_cells, *speculative_cells, *trace;
    _Atomic uint32_t *homes, *histogram;
    struct smoe_slot *slots;
    const uint32_t *grid;
    const struct smoe_expert_rec *experts;
    const struct smoe_window_rec *windows;
    const struct smoe_part_rec *parts;
    const struct smoe_move_rec *moves;
    const struct smoe_layout_rec *layouts;
    const struct smoe_tensor_rec *tensors;
    const struct smoe_file_rec *files;
    const char *strings; /* these two lie in `own` once attached */
    void *own;           /* what leads out of shared memory, paths above all, as it was when it was checked */
    /* Copies of the geometry, checked when it was mapped: shared memory is not asked again. */
    uint32_t n_slots, n_groups, n_experts, n_files, n_windows, n_parts, n_moves, n_layouts, n_tensors;
    uint32_t grid_layers, grid_experts, queue_capacity, guess_limit, read_align;
    uint64_t grid_first, grid_run; /* cells grid_first.. hold the indices 0 .. grid_run - 1 in order */
    uint64_t slot_bytes, control_bytes, data_bytes, strings_bytes;
    unsigned char *data; /* read-only for clients */

    /* This process's part in it. */
    int role;
    uint32_t id;  /* participant id */
    uint64_t bit; /* holder bit, clients only */
    uint32_t generation;
    int lock_fd;
    uint64_t spin_ns;
    int interruptible;               /* naps end calls with -EINTR */
    _Atomic uint32_t *private_holds; /* one a slot: bit 31 lock, the rest a count */
    _Atomic uint32_t busy_holds;     /* like a private hold: bit 31 lock, the rest a count */
    uint32_t fork_generation;
    struct smoe_ring *next; /* all handles of this process, for the fork handler */
};

/* --- the slot word ------------------------------------------------------------------------------ */

#define WORD_STATE(w)      ((uint32_t)((w) & 7u))
#define WORD_SPECULATIVE   8ull
#define WORD_WORKER(w)     ((uint32_t)(((w) >> 4) & 127u))
#define WORD_EXPERT(w)     ((uint32_t)(((w) >> 11) & 0x1FFFFFu))
#define WORD_HOLDERS(w)    ((w) & 0xFFFFFFFF00000000ull)
#define HOLDER_BIT(client) (1ull << (32u + (client)))

static inline uint64_t word_make(uint32_t state, uint64_t speculative, uint32_t worker, uint32_t expert,
                                 uint64_t holders) {
    return (uint64_t)state | speculative | (uint64_t)worker << 4 | (uint64_t)expert << 11 | holders;
}
static inline bool word_resident(uint64_t w) {
    return WORD_STATE(w) == SMOE_READY || WORD_STATE(w) == SMOE_CONSUMED;
}
static inline bool word_loading(uint64_t w) {
    return WORD_STATE(w) == SMOE_QUEUED || WORD_STATE(w) == SMOE_READING;
}
static inline bool word_evictable(uint64_t w) {
    return word_resident(w) && WORD_HOLDERS(w) == 0;
}
static inline bool word_guess(uint64_t w) {
    return word_loading(w) && (w & WORD_SPECULATIVE);
}
static inline uint64_t slot_word(const smoe_ring *r, uint32_t s) {
    return atomic_load_explicit(&r->words[s], memory_order_acquire); /* P2, T2 */
}
static inline const _Atomic uint32_t *slot_futex(const smoe_ring *r, uint32_t s) {
    return (const _Atomic uint32_t *)&r->words[s]; /* the low half: little-endian */
}

/* counters.c */
extern INTERNAL _Thread_local uint32_t thread_phase; /* SMOE_PHASE_* of what the calling thread does */
struct counted {
    enum smoe_counter counter;
    uint64_t n;
};
static inline uint32_t phase_word(uint32_t phase, uint32_t word) {
    return SMOE_COUNTER_WORDS + phase * SMOE_PHASE_WORDS + word;
}
/* For counters from SMOE_C_PHASED on, and other words of a row. */
static inline void count(smoe_ring *r, uint32_t word, uint64_t n) {
    atomic_fetch_add_explicit(&r->counters[r->id][word], n, memory_order_relaxed);
}
INTERNAL uint32_t counters_bucket(uint64_t ns);
INTERNAL void counters_begin(smoe_ring *r);
INTERNAL void counters_add_read(smoe_ring *r, uint32_t s, const struct counted *c, uint32_t n, uint64_t ns);
INTERNAL void counters_confirm(smoe_ring *r);
INTERNAL void counters_recover(smoe_ring *r, uint32_t worker);

/* slot.c: the only writer of slot words. */
enum slot_join {
    JOIN_NO,       /* the slot is not this expert's, or empty */
    JOIN_HIT,      /* resident */
    JOIN_LOADING,  /* QUEUED or READING for a demand */
    JOIN_PROMOTED, /* was a guess; push it if it is still QUEUED */
    JOIN_RETRY,    /* was FAILED, is QUEUED again: push it */
};
INTERNAL enum slot_join slot_join(smoe_ring *r, uint32_t s, uint32_t expert, uint64_t bit, uint64_t *before);
INTERNAL bool slot_claim(smoe_ring *r, uint32_t s, uint32_t expert, uint64_t bit, uint64_t *before);
INTERNAL bool slot_take(smoe_ring *r, uint32_t s, uint64_t seen, uint32_t expert, uint64_t speculative, uint64_t bit);
INTERNAL bool slot_give_back(smoe_ring *r, uint32_t s, uint32_t expert, uint64_t speculative, uint64_t bit);
INTERNAL void slot_drop(smoe_ring *r, uint32_t s, uint64_t bit);
INTERNAL bool slot_start(smoe_ring *r, uint32_t s, uint32_t worker, uint64_t *word);
INTERNAL void slot_publish(smoe_ring *r, uint32_t s, uint32_t worker);
INTERNAL void slot_fail(smoe_ring *r, uint32_t s, uint32_t worker);
INTERNAL void slot_error_set(smoe_ring *r, uint32_t s, int error, uint32_t file, uint64_t offset, uint64_t wanted,
                             uint64_t got);
INTERNAL bool slot_error(const smoe_ring *r, uint32_t s, smoe_error *e);
INTERNAL bool slot_requeue(smoe_ring *r, uint32_t s, uint32_t worker);
INTERNAL bool slot_give_up(smoe_ring *r, uint32_t s);

/* queue.c */
struct queue {
    struct smoe_queue_pos *pos;
    _Atomic uint64_t *cells;
    uint32_t capacity;
};
INTERNAL void queue_init(_Atomic uint64_t *cells, uint32_t capacity);
INTERNAL struct queue demand_queue(const smoe_ring *r);
INTERNAL struct queue speculative_queue(const smoe_ring *r);
INTERNAL bool queue_push(struct queue q, uint32_t slot);
INTERNAL int queue_pop(struct queue q); /* slot, or -1: empty */
INTERNAL bool queue_empty(struct queue q);
INTERNAL uint32_t queue_length(struct queue q);
INTERNAL void doorbell_ring(smoe_ring *r, int workers);

/* lru.c */
/* Packing of ticks and bounds: see lru.c. */
#define SMOE_SLOT_BITS  6u
#define SMOE_GROUP_BITS 10u
#define SMOE_SPANS(n)   (((n) + SMOE_SPAN - 1) / SMOE_SPAN) /* spans of n groups */
#define SMOE_GROUPS_MAX ((SMOE_SLOTS_MAX + SMOE_GROUP - 1) / SMOE_GROUP)
#define SMOE_SPANS_MAX  SMOE_SPANS(SMOE_GROUPS_MAX)
_Static_assert(SMOE_GROUP == 1u << SMOE_SLOT_BITS && SMOE_GROUPS_MAX <= 1u << SMOE_GROUP_BITS, "packed ticks");

INTERNAL void lru_init(smoe_ring *r);
INTERNAL uint64_t lru_tick(const smoe_ring *r, uint32_t s);
INTERNAL uint64_t lru_bound(const smoe_ring *r, uint32_t group);
INTERNAL void lru_stamp(smoe_ring *r, uint32_t s);
INTERNAL void lru_used(smoe_ring *r, uint32_t s);
INTERNAL int lru_victim(smoe_ring *r, uint64_t *word);
INTERNAL int lru_find_empty(smoe_ring *r);
INTERNAL int lru_find_cold(smoe_ring *r, uint64_t *word);
INTERNAL void hint_empty(smoe_ring *r, uint32_t s);
INTERNAL void hint_not_empty(smoe_ring *r, uint32_t s);
INTERNAL void hint_cold(smoe_ring *r, uint32_t s);
INTERNAL void hint_not_cold(smoe_ring *r, uint32_t s);
INTERNAL bool guess_admit(smoe_ring *r, uint32_t s);
INTERNAL void guess_mark(smoe_ring *r, uint32_t s);
INTERNAL void guess_clear(smoe_ring *r, uint32_t s);
INTERNAL uint32_t guess_count(const smoe_ring *r);
INTERNAL bool guess_over(smoe_ring *r);

/* A record in shared memory is copied, then checked, then used.  COPIED comes after the first: the compiler may not
 * look into shared memory again for what has been copied. */
#define COPIED(record) __asm__ volatile("" : "+m"(record) : : "memory")

static inline bool within(uint64_t offset, uint64_t bytes, uint64_t limit) {
    return offset <= limit && bytes <= limit - offset;
}

/* segment.c */
INTERNAL int segment_name(char out[40], const char *name, bool data);
INTERNAL int fail(smoe_error *e, int code, const char *call, int os_error, uint64_t wanted, uint64_t got);
INTERNAL uint32_t fork_generation(void);

/* ring.c */
INTERNAL void prewarm_ring(smoe_ring *r);
INTERNAL void space_freed(smoe_ring *r);
INTERNAL int ring_check(const smoe_ring *r, smoe_error *e);

/* trace.c */
static inline bool tracing(const smoe_ring *r) {
    return atomic_load_explicit(&r->hot->tracing, memory_order_relaxed) != 0;
}
INTERNAL uint64_t trace_begin(smoe_ring *r, enum smoe_trace_kind kind, uint32_t layer, uint32_t n);
INTERNAL void trace_entry(smoe_ring *r, uint64_t position, uint32_t expert, enum smoe_trace_outcome outcome);
INTERNAL void trace_holds(smoe_ring *r, enum smoe_trace_kind kind, uint32_t layer, const smoe_hold *holds, uint32_t n);

/* recover.c */
INTERNAL void leave_client(smoe_ring *r, uint32_t id);
INTERNAL void recover_client(smoe_ring *r, uint32_t id);
INTERNAL void recover_worker(smoe_ring *r, uint32_t worker);
INTERNAL void recover_trace(smoe_ring *r);
INTERNAL void free_entry(smoe_ring *r, uint32_t id);

/* crc32c.c: beside what smoe.h has, the way that needs no instruction; for tests */
INTERNAL uint32_t crc32c_by_tables(uint32_t crc, const void *data, uint64_t bytes);

/* quant.c: likewise, without the wider vector instructions */
INTERNAL int quantize_plainly(const float *weights, uint64_t groups, int bits, const float *candidates,
                              unsigned char *codes, float *scales);

/* worker.c */
struct worker_options {
    int watch_fd; /* hang-up: the supervisor died; -1: none */
    int ready_fd; /* gets one byte when the files are open; -1: none */
    const volatile int *stop;
};
int worker_run(smoe_ring *r, const struct worker_options *options, smoe_error *e);

#endif
