/* testring.h: a ring over scratch files of stamped experts, with workers that are threads.
 *
 * Byte i of expert x is a hash of (x, i), and the bytes between the experts are a hash of something else,
 * so one foreign, missing or shifted byte is seen.  Experts have 1 to 3 extents in 1 to 3 files at offsets
 * that are a multiple of nothing; the plans are made by the rules of smoe_mp/tables.py, some with moves.
 *
 * Under ThreadSanitizer (or with SMOE_TEST_ONE_MAP set) all handles are bent to one map of the segments.
 * TSan knows memory by its address: with a map for each attach it would see neither a race between two
 * participants nor the synchronisation between them.
 */
#ifndef TESTRING_H
#define TESTRING_H

#include "core.h"
#include "test.h"

#include <pthread.h>

#define TEST_FILES   3
#define TEST_HANDLES 64
#define TEST_WORKERS 16

struct shape {
    uint32_t layers, experts; /* index = layer * experts + expert; the grid has a column more, which is empty */
    uint32_t slots;
    uint32_t files;       /* 0: TEST_FILES */
    uint32_t part_bytes;  /* an extent has half to all of it; 0: 12000 */
    uint32_t deadline_ms; /* 0: 60000 */
    uint32_t seed;
};

struct test_file {
    char path[512];
    unsigned char *content;
    uint64_t bytes;
    int64_t mtime_ns;
};

struct test_worker {
    pthread_t thread;
    smoe_ring *ring;
    volatile int stop;
    int rc; /* of worker_run, once joined */
    smoe_error error;
};

struct testring {
    struct shape shape;
    char name[24];
    smoe_geometry geometry;
    struct smoe_expert_rec *experts;
    struct smoe_window_rec *windows;
    struct smoe_part_rec *parts;
    struct smoe_move_rec *moves;
    struct smoe_layout_rec layouts[3];
    struct smoe_tensor_rec tensors[6];
    struct smoe_file_rec file_recs[TEST_FILES];
    char strings[2048];
    struct test_file files[TEST_FILES];
    unsigned char **expected; /* an expert's bytes, its extents one after the other */

    /* The segments, mapped read-write whatever the roles may do: to look into and to scribble on. */
    unsigned char *control, *data;
    uint64_t control_bytes, data_bytes;

    smoe_ring *supervisor;
    struct test_worker workers[TEST_WORKERS];
    uint32_t n_workers;
    struct {
        smoe_ring *ring;
        ptrdiff_t shift; /* by which its pointers were bent */
        unsigned char *data;
    } handles[TEST_HANDLES];
    pthread_mutex_t handles_lock;
};

/* Files and tables only; then the segments, LIVE, from the tables as they are. */
void testring_plan(struct testring *t, const struct shape *shape);
int testring_create(struct testring *t, smoe_error *error);
smoe_tables testring_tables(const struct testring *t);
/* Both, and a supervisor attached.  Dies where it cannot. */
void testring_open(struct testring *t, const struct shape *shape);
/* Stops workers, detaches everyone, removes everything. */
void testring_close(struct testring *t);

/* Attach and detach through these, so that handles are bent to one map where that is wanted. */
int testring_try_attach(struct testring *t, int role, uint32_t id, smoe_ring **ring, smoe_error *error);
smoe_ring *testring_attach(struct testring *t, int role, uint32_t id);
smoe_ring *testring_client(struct testring *t);
void testring_detach(struct testring *t, smoe_ring *r);
void testring_detach_supervisor(struct testring *t);

void testring_start(struct testring *t, uint32_t workers);
void testring_stop(struct testring *t);

/* Are the held slot's bytes its expert's, every one? */
bool testring_bytes_ok(const struct testring *t, const smoe_ring *r, const smoe_hold *h);
/* The tables in shared memory, to scribble on. */
struct smoe_expert_rec *testring_expert(struct testring *t, uint32_t x);
struct smoe_window_rec *testring_window(struct testring *t, uint32_t x, uint32_t i);
/* Change a file's mtime, so that it is no longer the ring's, and back. */
void testring_touch(struct testring *t, uint32_t file, bool changed);
/* Wait until no read is queued or under way; the workers have to be there. */
void testring_settle(struct testring *t);
/* Nobody holds, nothing loads, nothing is reserved, hints say so: as after every client has left. */
void testring_check_quiet(struct testring *t);
uint64_t testring_counter(const struct testring *t, enum smoe_counter c);

/* Remember what atexit and the signal handlers have to remove. */
void remember(const char *name, bool segment);
void forget(const char *name);

#endif
