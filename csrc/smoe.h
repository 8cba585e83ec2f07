/* smoe.h: the C API of smoe-mp.
 *
 * An inference process attaches a ring by name and takes experts from it:
 *
 *     smoe_ring *ring;  smoe_hold h[8];  smoe_error e;
 *     int rc = smoe_attach("demo", SMOE_ROLE_CLIENT, 0, "my engine", &ring, &e);
 *     rc = smoe_fetch(ring, layer, experts, 8, h, 30000, &e);      demand, hold and wait
 *     compute(smoe_slot_data(ring, h[0].slot));
 *     smoe_release(ring, h, 8);
 *     smoe_detach(ring);
 *
 * Every function returns a value >= 0, or a negative error: -errno, or one of SMOE_E* below, and then
 * describes it in *error where one is passed.  All functions may be called from several threads of one
 * process on one ring; a hold array belongs to one thread at a time.  After a fork the child's handle
 * is dead (SMOE_EFORKED).  Times are milliseconds; a negative time limit means the ring's own
 * read_deadline_ms.
 *
 * Caveats, frankly: a client maps the control segment read-write.  A client that scribbles over it can
 * ruin the ring for all (never the experts' bytes, which are mapped read-only; what else is promised then:
 * docs/design.md).  32 clients at most.
 */
#ifndef SMOE_H
#define SMOE_H

#include <stdint.h>

/* What is promised: docs/embedding.md.  It is raised by a change that a program built before would not survive. */
#define SMOE_API_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* [cffi: from here] */
typedef struct smoe_ring smoe_ring;

enum {
    SMOE_ROLE_CLIENT = 0,
    SMOE_ROLE_WORKER = 1,
    SMOE_ROLE_SUPERVISOR = 2,
    SMOE_ROLE_PREWARM = 3,
    SMOE_ROLE_OBSERVER = 4, /* takes no id, may only look */
    SMOE_ROLE_TRACE = 5     /* the recorder: one at a time */
};

enum {
    SMOE_EGONE = -1001,         /* the ring was removed or replaced: attach anew */
    SMOE_EBUSY = -1002,         /* no reservation in time: all slots are held */
    SMOE_EREAD = -1003,         /* the expert could not be read */
    SMOE_ETIMEOUT = -1004,      /* not there in time; the ring is served */
    SMOE_ENOSUPERVISOR = -1005, /* not there in time; nobody serves the ring */
    SMOE_ELEASE = -1006,        /* this process's registration was taken from it */
    SMOE_EFORKED = -1007,       /* the handle belongs to the parent process */
    SMOE_EABI = -1008,          /* made by another version or build */
    SMOE_ENOTLIVE = -1009,      /* not finished, or being created */
    SMOE_ECORRUPT = -1010,      /* numbers that do not add up */
    SMOE_ECLIENTS = -1011,      /* 32 clients are attached */
    SMOE_EID = -1012,           /* no such (layer, expert), or named twice */
    SMOE_ETOOLARGE = -1013,     /* more experts than the ring has slots */
    SMOE_ESTOPPING = -1014,     /* the ring is being stopped: no new demand */
    SMOE_ENOSPACE = -1015,      /* the shared-memory file system is too small */
    SMOE_ETAKEN = -1017,        /* the id's lock is held by another process */
    SMOE_EDIFFERS = -1018,      /* not the ring that was asked for */
    SMOE_ECHANGED = -1019       /* a source file changed (file; got: SMOE_CHANGED_*): nothing is served any more */
};

/* What of a source file is not as it was when the ring was made. */
enum {
    SMOE_CHANGED_INODE = 1, /* device or inode: another file under the name */
    SMOE_CHANGED_SIZE = 2,
    SMOE_CHANGED_MTIME = 4,
    SMOE_CHANGED_HEADER = 8
};

/* Reasons of a failed read beside errno values. */
enum {
    SMOE_READ_SHORT = 2001,    /* the file ended before the expert's last byte */
    SMOE_READ_CHANGED = 2002,  /* the file is not the one that the ring was made for */
    SMOE_READ_PLAN = 2003,     /* the read plan in shared memory does not add up */
    SMOE_READ_KILLER = 2004,   /* three workers died reading it */
    SMOE_READ_UNSERVED = 2005, /* no worker is left to read it */
    SMOE_READ_CHECKSUM = 2006  /* CRC-32C of the bytes is got, the vault's is wanted */
};

typedef struct {
    int32_t code;     /* what the function returned */
    int32_t os_error; /* errno, or SMOE_READ_*, 0: none */
    const char *call; /* the system call or step that failed, static */
    uint32_t layer;   /* of the expert in question */
    uint32_t expert;
    uint32_t file;    /* index of the source file */
    uint32_t holders; /* bit i: client i holds slots (SMOE_EBUSY) */
    uint64_t offset;  /* in the file */
    uint64_t wanted;  /* figures, as the code has it */
    uint64_t got;
    uint64_t began_ns;  /* with -EINTR: when the call began; the next call with this record goes on from there */
    uint64_t waited_ns; /* likewise: when its wait for bytes began, 0: it has not */
} smoe_error;

enum { SMOE_STATE_QUEUED = 1, SMOE_STATE_READING = 2 };
enum { SMOE_HOLD_NONE = 0, SMOE_HOLD_LOADING = 1, SMOE_HOLD_RESIDENT = 2 };

typedef struct {
    uint32_t expert_index; /* position in the vault's table */
    uint32_t slot;
    int32_t status; /* SMOE_HOLD_* */
    uint32_t hit;   /* 1: was resident when acquired */
} smoe_hold;

/* --- attach -------------------------------------------------------------------------------------- */

/* Map the ring NAME and register as ROLE.  id: a worker's number; for the supervisor the descriptor that
 * smoe_supervisor_lock gave; else ignored.  label: at most 31 bytes, shown to people.  Errors: -ENOENT no such ring,
 * -EACCES, SMOE_EABI (wanted: this build's, got: the segment's), SMOE_ENOTLIVE, SMOE_ECORRUPT, SMOE_ECLIENTS,
 * SMOE_ETAKEN. */
int smoe_attach(const char *name, int role, uint32_t id, const char *label, smoe_ring **ring, smoe_error *error);
/* Release all holds, unregister, unmap.  Views into the data segment die with it. */
void smoe_detach(smoe_ring *ring);

/* --- experts ------------------------------------------------------------------------------------- */

/* Index of (layer, expert) in the vault's table, or SMOE_EID. */
int64_t smoe_expert_index(const smoe_ring *ring, int64_t layer, int64_t expert);
/* Demand with hold, without waiting for the reads: reserve n slots at once (waiting at most timeout_ms
 * for the reservation), then join or queue each expert.  holds: n entries, all filled or (on error)
 * none.  Returns how many were resident.  Errors: SMOE_EID, SMOE_ETOOLARGE (wanted n, got slots),
 * SMOE_EBUSY (holders), SMOE_EGONE, SMOE_ESTOPPING, SMOE_ELEASE, SMOE_EFORKED, -EINTR (interruptible
 * only; nothing is held, call again). */
int smoe_acquire(smoe_ring *ring, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds,
                 int64_t timeout_ms, smoe_error *error);
/* Like smoe_acquire, but if the reservation cannot be had at once, returns SMOE_EBUSY at once. */
int smoe_acquire_nowait(smoe_ring *ring, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds,
                        smoe_error *error);
/* Like smoe_acquire, for a part of a request that is more than the ring can keep: of what has to be read
 * the slots are the next to be evicted, once released, until somebody asks for those experts again.  wait 0:
 * if the reservation cannot be had at once, returns SMOE_EBUSY at once. */
int smoe_acquire_cold(smoe_ring *ring, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds, int wait,
                      int64_t timeout_ms, smoe_error *error);
/* Wait until all n holds are resident.  Returns 0.  On SMOE_EREAD the failed hold is dropped and
 * *error names it; the others stay.  On SMOE_ETIMEOUT and SMOE_ENOSUPERVISOR the hold that was waited
 * for is dropped.  -EINTR (interruptible only): call again. */
int smoe_wait(smoe_ring *ring, smoe_hold *holds, uint32_t n, int64_t timeout_ms, smoe_error *error);
/* Wait until one of the holds that are LOADING is resident (or failed).  Returns its index. */
int smoe_wait_any(smoe_ring *ring, smoe_hold *holds, uint32_t n, int64_t timeout_ms, smoe_error *error);
/* smoe_acquire and smoe_wait in one call.  On an error nothing is held, except after -EINTR in the wait
 * (holds[0].status tells), when smoe_wait goes on. */
int smoe_fetch(smoe_ring *ring, int64_t layer, const int64_t *experts, uint32_t n, smoe_hold *holds, int64_t timeout_ms,
               smoe_error *error);
/* The non-blocking poll: 1 and a hold if the expert is resident, else 0. */
int smoe_claim_specific(smoe_ring *ring, int64_t layer, int64_t expert, smoe_hold *hold, smoe_error *error);
/* Guess: have the experts read when no demand is waiting.  Takes no hold, never waits.  Returns how
 * many were queued. */
int smoe_speculate(smoe_ring *ring, int64_t layer, const int64_t *experts, uint32_t n, smoe_error *error);
/* Give up holds; entries that are NONE are passed over.  The bytes stay: retention. */
int smoe_release(smoe_ring *ring, smoe_hold *holds, uint32_t n);
/* A second hold on a slot that this process holds; release it like any other. */
int smoe_hold_again(smoe_ring *ring, const smoe_hold *hold, smoe_hold *again);

/* --- what is where ------------------------------------------------------------------------------- */

const void *smoe_slot_data(const smoe_ring *ring, uint32_t slot);

typedef struct {
    uint64_t slot_bytes, data_bytes, control_bytes;
    uint64_t creation[2];
    uint32_t n_slots, n_experts, n_files, n_layouts;
    uint32_t grid_layers, grid_experts;
    uint32_t queue_capacity, guess_limit, read_deadline_ms, top_k, read_align, speculation_ranks, huge, abi;
    uint32_t id; /* of this participant */
} smoe_info;
int smoe_get_info(const smoe_ring *ring, smoe_info *info);

typedef struct {
    const char *name;
    const char *dtype;
    const char *tag; /* of the order of its elements, "" if there is nothing to say */
    uint64_t shape[4];
    uint32_t ndim;
    uint32_t part;
    uint64_t offset; /* from the slot's start */
    uint64_t bytes;
} smoe_tensor;
typedef struct {
    uint64_t offset; /* from the slot's start */
    uint64_t bytes;
    uint64_t file_offset;
    uint32_t file;
    uint32_t reserved;
} smoe_part;
/* Layer, expert, layout, parts and tensors of an expert.  Each returns >= 0, SMOE_EID, or SMOE_ECORRUPT where
 * somebody has written over the tables and they lead out of the slot. */
int smoe_expert_pair(const smoe_ring *ring, uint32_t expert_index, uint32_t *layer, uint32_t *expert);
int smoe_expert_layout(const smoe_ring *ring, uint32_t expert_index);
int smoe_expert_parts(const smoe_ring *ring, uint32_t expert_index, smoe_part *parts, uint32_t room);
int smoe_expert_tensors(const smoe_ring *ring, uint32_t expert_index, smoe_tensor *tensors, uint32_t room);
const char *smoe_file_path(const smoe_ring *ring, uint32_t file);
/* Checksum of what this handle goes by of the files: their records, and all names. */
uint32_t smoe_files_sum(const smoe_ring *ring);
int smoe_file_mode(const smoe_ring *ring, uint32_t file);    /* as achieved: 0 unknown, 1 direct, 2 buffered,
                                                                3 bounce buffer, 4 memory */
int smoe_file_refusal(const smoe_ring *ring, uint32_t file); /* errno of the direct read that was refused */

/* --- looking on ---------------------------------------------------------------------------------- */

enum { SMOE_PHASE_UNSAID = 0, SMOE_PHASE_PREFILL = 1, SMOE_PHASE_DECODE = 2, SMOE_PHASES = 3 };
enum { SMOE_PHASED = 6, SMOE_BUCKETS = 28 };
/* Say what the calling thread demands and waits for from now on, on all rings: SMOE_PHASE_*.  Returns what it was
 * before, or -EINVAL. */
int smoe_phase(int phase);
/* Figures since the ring was made: see counters.c.  Buckets: SMOE_BUCKETS of them, how many took at most 1 us, 2 us,
 * 4 us, ..., 2^26 us (67 s), and more.  There is room for more of everything; what is not used is 0. */
typedef struct {
    uint64_t counters[64];  /* by number, as smoe_counter_name has them */
    uint64_t phases[4][16]; /* the first SMOE_PHASED of them by phase */
    uint64_t waits[4][32];  /* buckets, by phase */
    uint64_t reads[32];     /* buckets; failed ones included */
} smoe_tally;
enum {
    SMOE_OF_ALL = 0,     /* since the ring was made, whoever it was */
    SMOE_OF_PRESENT = 1, /* of a client's id: by its present owner */
    SMOE_OF_FORMER = 2   /* likewise: by those before, who left or died */
};
/* What was counted by the owners of an id; with SMOE_OF_ALL of any participant, or (-1) of all of them together, else
 * of a client.  -ENOENT: the id has no owner, or another one since the call began; -EINVAL. */
int smoe_get_tally(const smoe_ring *ring, int id, int whose, smoe_tally *out);
/* One counter of SMOE_OF_ALL. */
uint64_t smoe_counter_value(const smoe_ring *ring, uint32_t counter, int id);
const char *smoe_counter_name(uint32_t counter); /* NULL past the last */
/* Slots by state (6 values), held slots, guesses loading, reserved: out[9]. */
int smoe_census(const smoe_ring *ring, uint32_t *out);
int smoe_ring_state(const smoe_ring *ring);
/* One byte a slot, n at most: its state, + 8 while somebody holds it, + 16 while a guess of it loads. */
enum { SMOE_SHOWN_HELD = 8, SMOE_SHOWN_GUESS = 16 };
int smoe_slot_states(const smoe_ring *ring, uint8_t *out, uint32_t n);
/* The slot word: for tests and status. */
uint64_t smoe_slot_word(const smoe_ring *ring, uint32_t slot);
uint64_t smoe_slot_tick(const smoe_ring *ring, uint32_t slot);
uint32_t smoe_home(const smoe_ring *ring, uint32_t expert_index); /* slot + 1, 0: none */
uint32_t smoe_histogram_count(const smoe_ring *ring, uint32_t expert_index);
uint32_t smoe_queue_length(const smoe_ring *ring, int speculative);

typedef struct {
    uint32_t id, role, pid, alive;
    uint32_t reserved_slots, current_slot; /* slot + 1, 0: none */
    uint64_t started_ns, read_started_ns;
    char label[32];
} smoe_participant_info;
/* The registered participants; returns their number. */
int smoe_participants(const smoe_ring *ring, smoe_participant_info *out, uint32_t room);
uint64_t smoe_now_ns(void);

/* A client raises its busy flag for the time of a request: the prewarm process rests meanwhile.  Calls nest.
 * Returns how deep. */
int smoe_busy(smoe_ring *ring, int on);
uint32_t smoe_busy_clients(const smoe_ring *ring); /* bit i: client i */

/* Popularity, by expert index: read n counts, add to one (saturates at 2^32 - 1), or set one. */
int smoe_histogram_read(const smoe_ring *ring, uint32_t *counts, uint32_t n);
int smoe_histogram_add(smoe_ring *ring, uint32_t expert_index, uint32_t n);
int smoe_histogram_set(smoe_ring *ring, uint32_t expert_index, uint32_t n);

/* Words between the prewarm process and those who steer it. */
enum {
    SMOE_PREWARM_BELL = 0,       /* changes with everything that the process should look at */
    SMOE_PREWARM_PAUSE = 1,      /* 1: rest */
    SMOE_PREWARM_TRICKLE_US = 2, /* pause between two guesses */
    SMOE_PREWARM_RUN = 3,        /* set: begin anew */
    SMOE_PREWARM_STATE = 4, /* 0 not running, 1 idle, 2 runs, 3 rests for a busy client, 4 paused, 5 ring too small */
    SMOE_PREWARM_DONE = 5,
    SMOE_PREWARM_GOAL = 6
};
int64_t smoe_prewarm_get(const smoe_ring *ring, int which);
int smoe_prewarm_set(smoe_ring *ring, int which, uint32_t value);
/* Sleep until the bell differs from what was seen, at most timeout_ms. */
int smoe_prewarm_sleep(smoe_ring *ring, uint32_t bell, uint32_t timeout_ms);

/* --- traces: see trace.c ---------------------------------------------------------------------------- */

enum smoe_trace_kind {
    SMOE_TRACE_DEMAND = 1, /* a batch that was acquired */
    SMOE_TRACE_CLAIM = 2,  /* claim_specific that found its expert */
    SMOE_TRACE_RANKS = 3,  /* what a router ranked behind the demand before it */
    SMOE_TRACE_GUESS = 4,  /* a speculate */
    SMOE_TRACE_BUSY = 5,   /* a request begins, and ends: no entries */
    SMOE_TRACE_IDLE = 6
};
enum smoe_trace_outcome {
    SMOE_TRACE_ASKED = 0,  /* a read was asked for, or was under way */
    SMOE_TRACE_THERE = 1,  /* resident; of a guess: in the ring in some state */
    SMOE_TRACE_DROPPED = 2 /* a guess that was given up */
};
enum { SMOE_TRACE_ENTRIES = 65535 }; /* of one record at most */
/* A word that is not 0 while somebody records. */
const uint32_t *smoe_tracing(const smoe_ring *ring);
/* Write down what a router ranked behind a demand, best first; nothing where nobody records.  Returns 0. */
int smoe_trace_ranks(smoe_ring *ring, int64_t layer, const int64_t *experts, uint32_t n, smoe_error *error);
/* Record, or stop.  Returns the log's position, from which on to read.  Recorder only: else -EPERM. */
int64_t smoe_trace_record(smoe_ring *ring, int on);
/* Cells written so far: where the next record will begin. */
uint64_t smoe_trace_head(const smoe_ring *ring);
/* Copy whole records from *position on to out, at most room cells, and go behind them.  Returns how many cells.
 * What was written over before it was read is added to *lost, in cells.  A record that is not finished stops
 * it; pass_over: it is lost.  -ENOBUFS: room is too small for a record.  Recorder only. */
int64_t smoe_trace_read(const smoe_ring *ring, int pass_over, uint64_t *position, uint64_t *lost, uint64_t *out,
                        uint32_t room);

/* For callers that have signals to look after, as Python has: calls that would go on waiting return -EINTR
 * after each nap of at most 100 ms and at every signal.  Call again with the same error record, and the time
 * limit goes on; before the first call that record is zero.  Otherwise (the default) signals interrupt nothing. */
void smoe_set_interruptible(smoe_ring *ring, int on);
/* Client settings: how long a wait spins before it sleeps (microseconds). */
void smoe_set_spin_us(smoe_ring *ring, uint32_t spin_us);

/* --- making and ending a ring (supervisor) --------------------------------------------------------- */

typedef struct {
    uint64_t slot_bytes;
    uint32_t n_slots;
    uint32_t n_experts, n_windows, n_parts, n_moves, n_layouts, n_tensors, n_files;
    uint32_t grid_layers, grid_experts;
    uint64_t strings_bytes;
    uint32_t read_deadline_ms, top_k, direct_required, read_align, speculation_ranks;
    uint32_t verify; /* 1: an expert that has a checksum is held against it before it is published */
} smoe_geometry;
typedef struct { /* arrays of the records of shm_layout.h */
    const void *experts, *windows, *parts, *moves, *layouts, *tensors, *files;
    const char *strings;
} smoe_tables;
/* Bytes of the two segments.  Errors: SMOE_ECORRUPT with the call naming the number at fault. */
int smoe_measure(const smoe_geometry *geometry, uint64_t *control_bytes, uint64_t *data_bytes, smoe_error *error);
/* Lay out both segments (open, sized, empty), get all pages, store LIVE last.  Errors: SMOE_ENOSPACE,
 * SMOE_ECORRUPT, -errno. */
int smoe_create(int control_fd, int data_fd, const smoe_geometry *geometry, const smoe_tables *tables,
                smoe_error *error);
/* Take the supervisor's lock on the ring NAME, whatever state it is in: a descriptor, to be handed to
 * smoe_attach (whose it is then, also when that fails) or to smoe_supervisor_unlock, never to close.
 * SMOE_ETAKEN: a supervisor lives. */
int smoe_supervisor_lock(const char *name, smoe_error *error);
void smoe_supervisor_unlock(int lock);
/* State of the ring NAME without attaching it: SMOE_CREATING .. SMOE_STALE, or an error.  *alive: whether a
 * supervisor holds its lock. */
int smoe_peek(const char *name, int *alive, smoe_error *error);
/* How many participants of the ring NAME live, by their locks alone: also of one that cannot be attached. */
int smoe_locks_held(const char *name);
/* Store GONE in the ring NAME and wake everyone (before it is unlinked); in one of another ABI the waiters
 * see it at their next look. */
int smoe_bury(const char *name);
int smoe_set_state(smoe_ring *ring, int state); /* and wake everyone */
/* A source file is not what the ring was made for: from now on demand, claim and guess return SMOE_ECHANGED, and so
 * do waits that do not find their bytes; what is held stays right.  There is no way back.  Supervisor only. */
int smoe_set_changed(smoe_ring *ring, uint32_t file, uint32_t what);
int smoe_set_file_mode(smoe_ring *ring, uint32_t file, int mode, int os_error);

typedef struct {
    uint32_t clients, workers; /* dead ones whose traces were cleared */
    uint32_t requeued;         /* reads taken up again */
    uint32_t pushed;           /* queue entries pushed again */
    uint32_t reserved;
} smoe_recovery;
/* The sweep after a death: see recover.c.  in_full: also where nobody is found dead (at a start).
 * Returns how many participants were dead.  Supervisor only. */
int smoe_recover(smoe_ring *ring, int in_full, smoe_recovery *out);
/* Keep the ring's pages from being swapped out, by this process, for as long as it lives.  -errno: mostly
 * -ENOMEM, where the limit of locked memory is too small. */
int smoe_lock_pages(smoe_ring *ring);
/* Bytes of the data segment that are in memory; of more than 64 MiB by a sample. */
uint64_t smoe_resident_bytes(smoe_ring *ring);
/* No worker is left: fail what is queued.  Returns how many. */
int smoe_give_up_queued(smoe_ring *ring);
/* 1 if a worker may be started under this number: nobody holds its lock and its entry is clean. */
int smoe_id_free(const smoe_ring *ring, uint32_t worker);
/* Can this process, as its new supervisor, go on with a ring that another one made?  0, or SMOE_EDIFFERS
 * with the call naming what is not as geometry and tables have it, or SMOE_ECORRUPT. */
int smoe_adoptable(smoe_ring *ring, const smoe_geometry *geometry, const smoe_tables *tables, smoe_error *error);
/* Is what lies in shared memory what can lie there, with the ring in this state?  0, or SMOE_ECORRUPT with the call
 * naming what somebody wrote over.  Not all of it is looked at. */
int smoe_intact(const smoe_ring *ring, int state, smoe_error *error);
/* Have this process say, before SIGBUS or SIGSEGV ends it, which ring it was that ended it: a line on stderr. */
int smoe_say_crash(const char *name);
/* Take over the settings of a geometry that may differ between two starts on one ring. */
int smoe_set_settings(smoe_ring *ring, const smoe_geometry *geometry);

typedef struct {
    int mode;         /* SMOE_MODE_* */
    int os_error;     /* of the refused direct read, 0: none */
    const char *call; /* that was refused */
    uint32_t mem_align, offset_align;
    char fs[32]; /* file-system type */
} smoe_probe_result;
/* How much memory the system calls left: on macOS kern.memorystatus_level, 0 to 100 (percent), or -errno.
 * Elsewhere -ENOSYS: there is no such figure. */
int smoe_memory_level(void);
/* Open PATH and try one real aligned direct read. */
int smoe_probe(const char *path, smoe_probe_result *result, smoe_error *error);
/* CRC-32C of `bytes` bytes, going on from `crc` (0 at the start).  By the processor's instruction, or
 * from the tables of crc32c.c. */
uint32_t smoe_crc32c(uint32_t crc, const void *data, uint64_t bytes);
/* Quantise groups of 64 float32 weights by the `.smoe` format: bits 4 or 2.  candidates: for 2 bits, the 64 factors
 * of the largest absolute value that are tried as scales.  codes: groups x 8 x bits bytes; scales: one a group, to be
 * rounded to float16.  -ERANGE: a weight is not finite or too large for a float16; -EINVAL: other bits. */
int smoe_quantize(const float *weights, uint64_t groups, int bits, const float *candidates, unsigned char *codes,
                  float *scales);
/* Where the first infinity or NaN is in an array of floating-point numbers of width 1, 2, 4 or 8 bytes: its offset in
 * bytes, -1: there is none, -EINVAL: another width.  mask: all bits but the sign; least: the smallest of what is left
 * of a number that is not finite. */
int64_t smoe_find_not_finite(const void *data, uint64_t bytes, uint32_t width, uint64_t mask, uint64_t least);
uint32_t smoe_sizeof(uint32_t record); /* of the records, in smoe_tables' order, then header and slot */
const char *smoe_strerror(int code);
/* An error in words: what, the expert, the call, the file and the figures, as far as they are known.  Writes at most
 * `room` bytes with a 0 at the end, and returns the length of the whole text.  ring may be NULL. */
int smoe_error_text(const smoe_ring *ring, const smoe_error *error, char *text, uint32_t room);
/* SMOE_API_VERSION of the library. */
uint32_t smoe_api_version(void);
/* The number of the memory layout that the library attaches, and no other (smoe_info's abi is a ring's). */
uint32_t smoe_layout_version(void);

/* --- Dequantisers: see dequant.c.  They need no ring. */

/* A type of blocks: how many weights one block holds, in how many bytes.  scale_bytes: of one scale, where the
 * scales lie apart from the blocks, else 0; one for each block, or, where tile is not 0, one for each
 * tile x tile weights of a matrix, edges counted full.  A name may stand twice, without scales and with. */
typedef struct {
    const char *name;
    uint32_t elements, bytes, scale_bytes, tile;
} smoe_block_type;
/* The types by number, from 0; NULL past the last. */
const smoe_block_type *smoe_block_type_at(uint32_t type);

enum { SMOE_TO_F32 = 0, SMOE_TO_F16 = 1, SMOE_TO_BF16 = 2 };
typedef struct {
    uint32_t type, to; /* a type's number, SMOE_TO_* */
    uint32_t threads;  /* at most 64; they live for the call */
    uint32_t plain;    /* 1: no vectors beyond what the compiler may assume: for tests */
    uint64_t rows, columns;
    const void *data, *scales; /* any address; scales NULL where the type has none */
    uint64_t data_bytes, scales_bytes;
    void *out; /* aligned to its item; must not overlap the others */
    uint64_t out_bytes;
} smoe_dequant_job;
/* Decode rows x columns weights.  The sizes must be those of type and shape: else -EINVAL, and nothing is written. */
int smoe_dequantize(const smoe_dequant_job *job);
/* [cffi: to here] */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
