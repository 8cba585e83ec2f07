/* shm_layout.h: what bytes are in shared memory.  No logic.
 *
 * A ring is two POSIX shared-memory objects.  The control segment holds everything that is not an
 * expert's bytes, the data segment holds nothing but slots.  Everything is an offset, never a pointer,
 * so every process may map the segments where it likes.
 *
 *   control segment "/smoe.NAME"                          mapped by clients
 *   ┌────────────────────────────────────────────┐ 0
 *   │ smoe_header: first 64 bytes never change   │         read-write
 *   │   geometry, region offsets, settings       │
 *   │ smoe_hot: tick, doorbells, queue positions │
 *   │ reservations   u32 [32]                    │
 *   │ participants   smoe_participant [163]      │
 *   │ counters       u64 [163][192]              │
 *   │ marks          u64 [163][192]              │
 *   │ file modes     u32 [n_files]               │
 *   │ ticks          u64 [n_groups * 64]         │
 *   │ bounds         u64 [n_spans * 64]          │
 *   │ empties        u64 [n_spans * 64]  (hints) │
 *   │ guesses        u64 [n_spans * 64]  (hints) │
 *   │ colds          u64 [n_spans * 64]  (hints) │
 *   │ demand cells   u64 [capacity]              │
 *   │ spec. cells    u64 [capacity]              │
 *   │ homes          u32 [n_experts]             │
 *   │ histogram      u32 [n_experts]             │
 *   │ words          u64 [n_slots]  slot words   │
 *   │ slots          smoe_slot [n_slots]         │
 *   │ trace          u64 [131072]  see trace.c   │
 *   ├────────────────────────────────────────────┤ tables_offset, a multiple of 64 KiB
 *   │ grid           u32 [grid_layers][grid_ex]  │         read-only
 *   │ experts, windows, parts, moves             │
 *   │ layouts, tensors, files, strings           │
 *   └────────────────────────────────────────────┘ control_bytes, a multiple of 64 KiB
 *
 *   data segment "/smoe.NAME.d": n_slots * slot_bytes      read-only
 *
 * Asserted below and hashed into the header's layout fingerprint are sizes, and the offsets that others depend
 * on; the rest goes by SMOE_ABI.  The tables' sizes are held against the numpy dtypes of smoe_mp/tables.py by a test.
 */
#ifndef SMOE_SHM_LAYOUT_H
#define SMOE_SHM_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SMOE_MAGIC 0x474E4952454F4D53ull /* "SMOERING", little-endian */
#define SMOE_ABI   4u

#define SMOE_SLOT_ALIGN  16384u     /* slots start on, and are a multiple of, 16 KiB */
#define SMOE_PAGE_ALIGN  65536u     /* the largest page size that we meet */
#define SMOE_LINE        128u       /* cache line of Apple arm64; twice that of x86-64 */
#define SMOE_GROUP       64u        /* slots in a tick group, bits in a hint word */
#define SMOE_SPAN        64u        /* groups whose bounds and hint words are looked at together */
#define SMOE_CLIENTS     32u        /* holder bits in a slot word */
#define SMOE_WORKERS     127u       /* worker ids 0..126 */
#define SMOE_SLOTS_MAX   65535u     /* 16 bits of a queue cell */
#define SMOE_EXPERTS_MAX 2097151u   /* 21 bits of a slot word */
#define SMOE_GRID_MAX    (1u << 24) /* cells of the (layer, expert) grid */
#define SMOE_FILES_MAX   4096u
#define SMOE_NDIM        4u
#define SMOE_TRACE_CELLS (1u << 17)

/* Participant ids.  A participant's id is also the byte of the control segment that it locks. */
#define SMOE_ID_CLIENT     0u
#define SMOE_ID_WORKER     SMOE_CLIENTS
#define SMOE_ID_SUPERVISOR (SMOE_ID_WORKER + 128u)
#define SMOE_ID_PREWARM    (SMOE_ID_SUPERVISOR + 1u)
#define SMOE_ID_TRACE      (SMOE_ID_PREWARM + 1u)
#define SMOE_PARTICIPANTS  (SMOE_ID_TRACE + 1u)

enum smoe_ring_state {
    SMOE_CREATING = 0, /* zero pages: what a creator leaves that was killed on the way */
    SMOE_LIVE = 1,     /* stored last of all at creation */
    SMOE_STOPPING = 2, /* no new demand; reads finish */
    SMOE_GONE = 3,     /* removed: attach anew */
    SMOE_STALE = 4,    /* a source file changed: nothing is served any more, to the end of the ring */
};

/* What the prewarm process says of itself. */
enum smoe_prewarm_state {
    SMOE_PREWARM_NONE = 0, /* not running */
    SMOE_PREWARM_IDLE = 1, /* its pass is done */
    SMOE_PREWARM_RUNS = 2,
    SMOE_PREWARM_BUSY = 3,   /* rests: a client serves a request */
    SMOE_PREWARM_PAUSED = 4, /* rests: told to */
    SMOE_PREWARM_SMALL = 5,  /* the ring leaves no room beside its headroom */
};

/* The slot word: see slot.c for the transitions.  The words lie densely: a line of its own for each was
 * tried, and made hits in large rings slower (their stride fills half of the cache's sets);
 * ticks, which every hit writes as well, lie densely anyway.
 *    0-2 state   3 speculative   4-10 worker   11-31 expert index   32-63 holders  */
enum smoe_state {
    SMOE_EMPTY = 0,
    SMOE_QUEUED = 1,
    SMOE_READING = 2,
    SMOE_READY = 3,
    SMOE_CONSUMED = 4,
    SMOE_FAILED = 5,
    SMOE_STATES = 6,
};

/* How a source file is read: what was achieved, not what was asked.  In the file modes' low byte; above it
 * the errno of the direct read that was refused. */
enum smoe_file_mode {
    SMOE_MODE_UNKNOWN = 0,
    SMOE_MODE_DIRECT = 1,   /* direct into the slot */
    SMOE_MODE_BUFFERED = 2, /* through the page cache, pages dropped behind the read */
    SMOE_MODE_BOUNCE = 3,   /* not a local block file system: private buffer, then a copy */
    SMOE_MODE_MEMORY = 4,   /* the file lives in memory (tmpfs and the like) */
};

/* Counters, one row per participant: see counters.c.  Only the owner adds to its row. */
enum smoe_counter {
    /* clients: of each phase on its own */
    SMOE_C_HITS = 0, /* acquired, resident on arrival */
    SMOE_C_JOINS,    /* acquired, already loading for somebody's demand */
    SMOE_C_PROMOTED, /* acquired, already loading or queued as a guess */
    SMOE_C_MISSES,   /* acquired, not there */
    SMOE_C_WAITS,    /* waits that did not find the bytes at once, and have ended */
    SMOE_C_WAIT_NS,
    SMOE_C_PHASED, /* how many */
    /* clients: of all phases together */
    SMOE_C_GUESS_HITS = SMOE_C_PHASED, /* of the hits and claims: loaded as a guess, first demand */
    SMOE_C_GUESS_USED_BYTES,           /* experts of the guesses that a hit, a claim or a promotion made use of */
    SMOE_C_GUESSES,                    /* guesses issued */
    SMOE_C_GUESS_DROPS,                /* guesses given up: no idle slot, limit or queue full */
    SMOE_C_GUESS_DISPLACED,            /* guesses that were queued still when a demand took their slot */
    SMOE_C_EVICTIONS,                  /* slots taken from another expert */
    SMOE_C_GUESS_WASTED,               /* of the evictions: guesses that nobody had demanded */
    SMOE_C_GUESS_WASTED_BYTES,
    SMOE_C_CLAIMS, /* claim_specific that returned a slot */
    SMOE_C_RELEASES,
    SMOE_C_BUSY_WAITS,  /* had to wait for a reservation */
    SMOE_C_READ_ERRORS, /* errors delivered to a waiter */
    SMOE_C_TIMEOUTS,
    /* workers */
    SMOE_C_READS,
    SMOE_C_WANTED_BYTES, /* bytes of experts */
    SMOE_C_DEVICE_BYTES, /* bytes asked of the files: windows, re-reads included */
    SMOE_C_READ_NS,
    SMOE_C_SKIPS, /* popped entries that were stale hints */
    SMOE_C_POPS_DEMAND,
    SMOE_C_POPS_SPECULATIVE,
    SMOE_C_SHORT_READS, /* reads continued after fewer bytes than asked */
    SMOE_C_FAILED_READS,
    SMOE_C_FALLBACKS, /* direct reads refused, file switched to buffered */
    SMOE_C_CHECKED,   /* reads held against a checksum */
    SMOE_C_BAD_SUMS,  /* of them: did not match */
    /* supervisor */
    SMOE_C_REQUEUED, /* reads taken up again after their worker's death */
    SMOE_COUNTERS
};
/* A row: a word a counter (the phased ones' are not used), then for each phase a word a phased counter and a word
 * a bucket: of a client's waits, or, under the first phase, of a worker's reads. */
#define SMOE_COUNTER_WORDS 48u
#define SMOE_PHASE_WORDS   48u
#define SMOE_PHASE_COUNT   3u
#define SMOE_BUCKET_WORD   16u /* of a phase's words: the first bucket */
#define SMOE_BUCKET_COUNT  28u /* at most 1 us, 2 us, 4 us, ... 2^26 us, more */
#define SMOE_COUNTER_ROW   (SMOE_COUNTER_WORDS + SMOE_PHASE_COUNT * SMOE_PHASE_WORDS)

struct smoe_header {
    /* These 64 bytes never change between versions. */
    uint64_t magic;
    uint32_t abi;
    uint32_t header_bytes;
    uint64_t creation[2]; /* random: tells two rings of one name apart */
    _Atomic uint32_t state;
    uint32_t reserved0;
    uint64_t fingerprint; /* hash of sizes, offsets and alignments */
    uint64_t data_dev;    /* of the data segment, compared after opening it by name */
    uint64_t data_ino;
    /* Geometry. */
    uint64_t control_bytes;
    uint64_t data_bytes;
    uint64_t slot_bytes;
    uint32_t n_slots;
    uint32_t n_groups;
    uint32_t n_experts;
    uint32_t n_files;
    uint32_t n_layouts;
    uint32_t n_tensors;
    uint32_t n_windows;
    uint32_t n_parts;
    uint32_t n_moves;
    uint32_t grid_layers;
    uint32_t grid_experts;
    uint32_t queue_capacity;
    uint32_t guess_limit;
    uint32_t huge; /* 1: huge pages were asked for and not refused */
    uint64_t strings_bytes;
    /* Settings. */
    uint32_t read_deadline_ms;
    uint32_t top_k; /* 0: unknown */
    uint32_t direct_required;
    uint32_t read_align; /* windows are whole multiples of this, in file and slot */
    uint32_t speculation_ranks;
    uint32_t verify; /* 1: reads are held against the experts' checksums */
    /* Region offsets from the segment's start. */
    uint64_t off_hot, off_reservations, off_participants, off_counters, off_marks, off_file_modes;
    uint64_t off_ticks, off_bounds, off_empties, off_guesses, off_colds;
    uint64_t off_demand, off_speculative, off_homes, off_histogram, off_words, off_slots, off_trace;
    uint64_t tables_offset;
    uint64_t off_grid, off_experts, off_windows, off_parts, off_moves;
    uint64_t off_layouts, off_tensors, off_files, off_strings;
};

/* Words that many processes write, each on a line of its own. */
struct smoe_queue_pos {
    _Alignas(SMOE_LINE) _Atomic uint64_t head;
    _Alignas(SMOE_LINE) _Atomic uint64_t tail;
};
struct smoe_hot {
    _Alignas(SMOE_LINE) _Atomic uint64_t tick;
    _Alignas(SMOE_LINE) _Atomic uint32_t doorbell;  /* added to after each push; workers sleep on it */
    _Atomic uint64_t sleepers[2];                   /* bit i: worker i sleeps on the doorbell, or was killed asleep */
    _Alignas(SMOE_LINE) _Atomic uint32_t space;     /* changed when a reservation or slot came free */
    _Atomic uint32_t space_wanted;                  /* 1: somebody sleeps on space (a stale 1 costs one wake) */
    _Alignas(SMOE_LINE) _Atomic uint64_t landed_ns; /* monotonic time of the last publication */
    _Alignas(SMOE_LINE) _Atomic uint32_t busy;      /* bit i: client i serves a request; prewarm rests */
    _Atomic uint32_t prewarm_bell;                  /* changed with busy and the settings below; prewarm sleeps on it */
    _Atomic uint32_t prewarm_paused;                /* 1: told to rest by a person */
    _Atomic uint32_t prewarm_trickle_us;            /* pause between two of its guesses */
    _Atomic uint32_t prewarm_runs;                  /* changed to have it begin anew */
    _Atomic uint32_t prewarm_state;                 /* what it does now: enum smoe_prewarm_state */
    _Atomic uint32_t prewarm_done, prewarm_goal;    /* experts of the pass under way */
    _Atomic uint32_t tracing;                       /* 1: somebody records; see trace.c */
    _Atomic uint32_t changed;                       /* STALE: file (low 16 bits), what of it (SMOE_CHANGED_*) above */
    _Alignas(SMOE_LINE) _Atomic uint64_t trace_head; /* cells of the trace drawn so far */
    struct smoe_queue_pos demand;
    struct smoe_queue_pos speculative;
};

/* A queue cell: sequence (48 bits) and slot number (16 bits) in one word: see queue.c. */

struct smoe_participant {
    _Atomic uint32_t generation; /* odd while registered; changes at each registration and clean-up */
    _Atomic uint32_t landed;     /* client: doorbell, changed when a slot that it holds lands */
    uint32_t pid;                /* for people; nothing is decided by it */
    uint32_t role;
    uint64_t pid_namespace;
    uint64_t started_ns;
    char label[32];
    /* worker: what it does now */
    _Atomic uint64_t read_started_ns; /* 0: idle */
    _Atomic uint32_t current_slot;    /* slot + 1, 0: none */
    uint32_t reserved0;
    _Atomic uint32_t publishing; /* slot + 1 whose read is being published, 0: none; see counters.c */
    uint8_t reserved[128 - 84];
};

struct smoe_slot {
    _Alignas(64) _Atomic uint64_t read_started_ns; /* of the READING under way */
    _Atomic uint32_t kills; /* reads begun and not ended: after a death, workers that died in it */
    /* The error of a FAILED slot, written by its worker before the word says FAILED. */
    _Atomic int32_t error; /* errno, or SMOE_READ_* */
    _Atomic uint32_t error_file;
    _Atomic uint32_t error_sequence; /* odd while the record is being written */
    _Atomic uint64_t error_offset;
    _Atomic uint64_t error_wanted;
    _Atomic uint64_t error_got;
};

/* The tables: written at creation, read-only from then on. */
struct smoe_expert_rec {
    uint32_t layer;
    uint32_t expert;
    uint32_t layout;
    uint32_t first_window, n_windows;
    uint32_t first_part, n_parts;
    uint32_t first_move, n_moves;
    uint32_t crc32c; /* of the parts' bytes in order; 0: none */
    uint64_t bytes;  /* sum of the parts */
};
struct smoe_window_rec { /* one aligned read */
    uint64_t file_offset;
    uint64_t length;      /* a multiple of read_align; the end of file may cut it short */
    uint64_t need;        /* bytes from its start that must arrive */
    uint64_t slot_offset; /* where it lands */
    uint32_t file;
    uint32_t reserved;
};
struct smoe_part_rec { /* one extent of the expert's own bytes */
    uint64_t file_offset;
    uint64_t bytes;
    uint64_t slot_offset; /* after the moves */
    uint32_t file;
    uint32_t reserved;
};
struct smoe_move_rec { /* bytes moved inside the slot after the reads, in order */
    uint64_t from, to, bytes;
};
struct smoe_layout_rec { /* experts whose tensors are alike share a layout */
    uint32_t first_tensor, n_tensors;
};
struct smoe_tensor_rec {
    uint32_t name;  /* offset of a NUL-terminated string */
    uint32_t dtype; /* likewise */
    uint32_t tag;   /* likewise: what is known of the order of its elements */
    uint32_t part;  /* index among the expert's parts */
    uint32_t ndim;
    uint32_t reserved;
    uint64_t offset; /* from the part's start */
    uint64_t bytes;
    uint64_t shape[SMOE_NDIM];
};
struct smoe_file_rec {
    uint64_t dev, ino, size;
    int64_t mtime_ns;
    uint8_t digest[16]; /* of the header bytes */
    uint32_t path;
    uint32_t reserved;
};

_Static_assert(sizeof(_Atomic uint64_t) == 8 && sizeof(_Atomic uint32_t) == 4, "atomics have no lock inside");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics are lock-free");
_Static_assert(offsetof(struct smoe_header, state) == 32, "frozen");
_Static_assert(offsetof(struct smoe_header, fingerprint) == 40, "frozen");
_Static_assert(offsetof(struct smoe_header, data_ino) == 56, "frozen");
_Static_assert(offsetof(struct smoe_header, control_bytes) == 64, "the frozen part is 64 bytes");
_Static_assert(sizeof(struct smoe_slot) == 64, "");
_Static_assert(sizeof(struct smoe_participant) == 128, "");
_Static_assert(sizeof(struct smoe_hot) == 10 * SMOE_LINE, "");
_Static_assert(sizeof(struct smoe_expert_rec) == 48, "");
_Static_assert(sizeof(struct smoe_window_rec) == 40, "");
_Static_assert(sizeof(struct smoe_part_rec) == 32, "");
_Static_assert(sizeof(struct smoe_move_rec) == 24, "");
_Static_assert(sizeof(struct smoe_layout_rec) == 8, "");
_Static_assert(sizeof(struct smoe_tensor_rec) == 72, "");
_Static_assert(sizeof(struct smoe_file_rec) == 56, "");
_Static_assert(SMOE_COUNTERS <= SMOE_COUNTER_WORDS && SMOE_C_PHASED <= SMOE_BUCKET_WORD, "");
_Static_assert(SMOE_BUCKET_WORD + SMOE_BUCKET_COUNT <= SMOE_PHASE_WORDS, "");
_Static_assert(SMOE_COUNTER_ROW * sizeof(uint64_t) % SMOE_LINE == 0, "no two participants write to one line");
/* Homes and queues name slots in 16 bits; the low half of a word is the futex word (little-endian). */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "big-endian machines are not supported");

#endif
