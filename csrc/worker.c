/* worker.c: the read loop: pop, read by plan, publish.
 *
 * A worker is a process of its own with descriptors of its own, one a file (a kernel may serialise
 * direct reads per descriptor).  It takes the demand queue first, always; the speculative one only when
 * demand is empty.
 *
 * Synchronous pread is chosen with care: on a local file system a process killed inside one is not
 * reaped before its transfer has ended, so whoever sees the death finds the slot's memory quiet.
 * Elsewhere (NFS, SMB, 9p, FUSE, unknown) that is not so; there a worker reads into a buffer of its
 * own and copies.
 *
 * Shared memory is not trusted: records are copied, then checked, then used; paths, and what the files are, are those
 * that stood there when the worker attached, which it can be told the checksum of.  Direct I/O is not trusted
 * either: a refusal, at open or at any later read, switches the file to buffered reads with the pages
 * dropped behind them, unless the ring was made with direct_required.  A file is what the ring's record
 * says (device, inode, size, mtime), at open and again before each publication, or nothing of it is
 * published.  Where the ring says verify, nor is anything whose checksum is not the vault's.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define IDLE_SPINS    200
#define IDLE_SLICE_NS 250000000ull
#define MEET_BYTES    (8u << 20) /* mapped at a time, about a millisecond's work with pages of 4 KiB */
#define MEET_NAP_NS   10000000ull
#define PROBES        4
#define BOUNCE_BYTES  (1u << 20)
#define READ_MOST     (1u << 30) /* of one call: macOS refuses more than INT_MAX with EINVAL, Linux cuts it short */

struct open_file {
    int fd; /* -1: not open */
    int mode;
    uint64_t used; /* turn of its last use */
};

struct worker {
    smoe_ring *r;
    uint32_t number;
    struct open_file *files;
    uint32_t open_count, open_limit;
    uint64_t turn;
    unsigned char *bounce;
    uint64_t *met;     /* bit s: slot s is mapped in this process */
    uint32_t next_met; /* all before it are */
};

/* What became of a read. */
struct outcome {
    int error; /* 0: all bytes are in the slot; else errno or SMOE_READ_* */
    uint32_t file;
    uint64_t offset, wanted, got;
    uint64_t asked; /* bytes asked of files */
    uint64_t bytes; /* of the expert */
    bool checked;   /* held against a checksum */
};

static int failed(struct outcome *o, int error, uint32_t file, uint64_t offset, uint64_t wanted, uint64_t got) {
    o->error = error;
    o->file = file;
    o->offset = offset;
    o->wanted = wanted;
    o->got = got;
    return error;
}

/* --- files ------------------------------------------------------------------------------------------ */

static void close_file(struct worker *w, struct open_file *f) {
    close(f->fd);
    f->fd = -1;
    w->open_count--;
}

static void close_least_used(struct worker *w) {
    struct open_file *least = NULL;
    for (uint32_t i = 0; i < w->r->n_files; i++)
        if (w->files[i].fd >= 0 && (!least || w->files[i].used < least->used))
            least = &w->files[i];
    if (least)
        close_file(w, least);
}

/* Is the descriptor's file the one that the ring was made for? */
static bool same_file(const smoe_ring *r, uint32_t i, int fd) {
    struct stat st;
    const struct smoe_file_rec *rec = &r->files[i];
    return fstat(fd, &st) == 0 && (uint64_t)st.st_dev == rec->dev && (uint64_t)st.st_ino == rec->ino &&
           (uint64_t)st.st_size == rec->size && plat_mtime_ns(&st) == rec->mtime_ns;
}

/* The mode that the file system suggests; the first read proves it. */
static int suggested_mode(int fd) {
    struct plat_file_info info;
    plat_file_info(fd, &info);
    return info.kind == PLAT_FS_BLOCK    ? SMOE_MODE_DIRECT
           : info.kind == PLAT_FS_MEMORY ? SMOE_MODE_MEMORY
                                         : SMOE_MODE_BOUNCE;
}

/* Direct reads of the file are refused: from now on everybody reads it through the cache. */
static bool switch_to_buffered(struct worker *w, uint32_t i, int os_error) {
    if (!plat_refuses_direct(os_error) || w->r->header->direct_required)
        return false;
    smoe_set_file_mode(w->r, i, SMOE_MODE_BUFFERED, os_error);
    count(w->r, SMOE_C_FALLBACKS, 1);
    return true;
}

/* A descriptor for file i in the given mode, or -errno.  Out of descriptors, others are closed for it. */
static int open_in_mode(struct worker *w, uint32_t i, int mode) {
    for (;;) {
        if (w->open_count >= w->open_limit)
            close_least_used(w);
        int fd = plat_open_file(smoe_file_path(w->r, i), mode == SMOE_MODE_DIRECT);
        if ((fd != -EMFILE && fd != -ENFILE) || w->open_count == 0)
            return fd;
        w->open_limit = w->open_count;
    }
}

/* A descriptor for file i if it is the ring's still; *mode: as it is achieved.  Else -errno or -SMOE_READ_CHANGED. */
static int open_same(struct worker *w, uint32_t i, int *mode) {
    int fd = open_in_mode(w, i, *mode);
    if (fd < 0 && *mode == SMOE_MODE_DIRECT && switch_to_buffered(w, i, -fd))
        fd = open_in_mode(w, i, *mode = SMOE_MODE_BUFFERED);
    if (fd >= 0 && !same_file(w->r, i, fd)) {
        close(fd);
        return -SMOE_READ_CHANGED;
    }
    return fd;
}

/* Open file i in the ring's mode for it.  0, errno or SMOE_READ_CHANGED. */
static int open_file(struct worker *w, uint32_t i) {
    struct open_file *f = &w->files[i];
    int mode = smoe_file_mode(w->r, i), fd = open_same(w, i, &mode);
    if (fd >= 0 && mode == SMOE_MODE_UNKNOWN) { /* nobody has probed it */
        mode = suggested_mode(fd);
        smoe_set_file_mode(w->r, i, mode, 0);
        close(fd);
        fd = open_same(w, i, &mode);
    }
    if (fd < 0)
        return -fd;
    f->fd = fd;
    f->mode = mode;
    w->open_count++;
    return 0;
}

/* Another worker, or this one, may have switched the file since. */
static int get_file(struct worker *w, uint32_t i) {
    struct open_file *f = &w->files[i];
    if (f->fd >= 0 && f->mode != smoe_file_mode(w->r, i))
        close_file(w, f);
    int rc = f->fd >= 0 ? 0 : open_file(w, i);
    f->used = ++w->turn;
    return rc;
}

/* --- one window -------------------------------------------------------------------------------------- */

/* Plain reads of [offset, offset + need) to `to`; also the tail of a direct window that will not come in
 * aligned pieces. */
static int read_plain(int fd, unsigned char *to, uint64_t offset, uint64_t need, uint64_t *got) {
    while (*got < need) {
        uint64_t ask = need - *got < READ_MOST ? need - *got : READ_MOST;
        ssize_t n = pread(fd, to + *got, ask, (off_t)(offset + *got));
        if (n < 0 && errno != EINTR)
            return errno;
        if (n == 0)
            return SMOE_READ_SHORT;
        if (n > 0)
            *got += (uint64_t)n;
    }
    return 0;
}

static int read_tail(struct worker *w, uint32_t file, unsigned char *to, uint64_t offset, uint64_t need,
                     uint64_t *got) {
    int fd = plat_open_file(smoe_file_path(w->r, file), 0);
    if (fd < 0)
        return -fd;
    uint64_t from = *got;
    int rc = same_file(w->r, file, fd) ? read_plain(fd, to, offset, need, got) : SMOE_READ_CHANGED;
    plat_drop_cache(fd, offset + from, need - from);
    close(fd);
    return rc;
}

/* Direct reads into the slot.  A short one is resumed from an aligned offset; where that brings nothing
 * new, the end of the file was met, or the rest comes through the cache. */
static int read_direct(struct worker *w, const struct smoe_window_rec *v, unsigned char *to, uint64_t *got,
                       uint64_t *asked) {
    int fd = w->files[v->file].fd;
    uint64_t align = w->r->read_align, from = 0;
    for (;;) {
        uint64_t ask = v->length - from < READ_MOST ? v->length - from : READ_MOST;
        ssize_t n = pread(fd, to + from, ask, (off_t)(v->file_offset + from));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno;
        *asked += ask;
        if (from + (uint64_t)n > *got)
            *got = from + (uint64_t)n;
        if (*got >= v->need)
            return 0;
        if (n == 0)
            return SMOE_READ_SHORT;
        count(w->r, SMOE_C_SHORT_READS, (uint64_t)n < ask);
        uint64_t resume = *got / align * align;
        if (resume == from)
            return read_tail(w, v->file, to, v->file_offset, v->need, got);
        from = resume;
    }
}

static int read_bounced(struct worker *w, const struct smoe_window_rec *v, unsigned char *to, uint64_t *got) {
    if (!w->bounce && !(w->bounce = malloc(BOUNCE_BYTES)))
        return ENOMEM;
    while (*got < v->need) {
        uint64_t piece = v->need - *got < BOUNCE_BYTES ? v->need - *got : BOUNCE_BYTES, in = 0;
        int rc = read_plain(w->files[v->file].fd, w->bounce, v->file_offset + *got, piece, &in);
        memcpy(to + *got, w->bounce, in);
        *got += in;
        if (rc)
            return rc;
    }
    return 0;
}

static int read_by_mode(struct worker *w, const struct smoe_window_rec *v, unsigned char *to, uint64_t *got,
                        uint64_t *asked) {
    const struct open_file *f = &w->files[v->file];
    if (f->mode == SMOE_MODE_DIRECT)
        return read_direct(w, v, to, got, asked);
    *asked += v->need;
    int rc =
        f->mode == SMOE_MODE_BOUNCE ? read_bounced(w, v, to, got) : read_plain(f->fd, to, v->file_offset, v->need, got);
    if (f->mode != SMOE_MODE_MEMORY)
        plat_drop_cache(f->fd, v->file_offset, v->length);
    return rc;
}

/* Is there another way after this error?  Once for each: refused direct reads, a stale network handle. */
static bool try_otherwise(struct worker *w, uint32_t file, int error) {
    struct open_file *f = &w->files[file];
    if (f->fd < 0)
        return false;
    if (f->mode == SMOE_MODE_DIRECT && switch_to_buffered(w, file, error))
        return true;
    if (error != ESTALE)
        return false;
    close_file(w, f); /* opened again, it must be the same file still */
    return true;
}

static int read_window(struct worker *w, const struct smoe_window_rec *v, unsigned char *to, struct outcome *o) {
    for (int tries = 0;; tries++) {
        uint64_t got = 0;
        int rc = get_file(w, v->file);
        if (rc == 0)
            rc = read_by_mode(w, v, to, &got, &o->asked);
        if (rc == 0)
            return 0;
        if (tries >= 2 || !try_otherwise(w, v->file, rc))
            return failed(o, rc, v->file, v->file_offset, v->need, got);
    }
}

/* --- one expert -------------------------------------------------------------------------------------- */

/* Lets a plan have no more bytes than a slot has, which also bounds how much work one can be. */
static bool spend(uint64_t *left, uint64_t bytes) {
    if (bytes > *left)
        return false;
    *left -= bytes;
    return true;
}

/* The window number i of the tables.  False: it leads out of its slot, or out of its file, whose end may cut short its
 * last block and nothing that it needs. */
static bool take_window(const smoe_ring *r, uint32_t i, struct smoe_window_rec *v) {
    *v = r->windows[i];
    COPIED(*v);
    if (v->file >= r->n_files || (v->file_offset | v->length | v->slot_offset) % r->read_align)
        return false;
    uint64_t size = r->files[v->file].size, blocks = (size + r->read_align - 1) / r->read_align * r->read_align;
    return v->need && v->need <= v->length && within(v->slot_offset, v->length, r->slot_bytes) &&
           within(v->file_offset, v->need, size) && within(v->file_offset, v->length, blocks);
}

static struct smoe_expert_rec take_expert(const smoe_ring *r, uint32_t i) {
    struct smoe_expert_rec x = r->experts[i];
    COPIED(x);
    return x;
}

static int read_plan(struct worker *w, uint32_t expert, unsigned char *slot, struct outcome *o) {
    smoe_ring *r = w->r;
    if (expert >= r->n_experts)
        return failed(o, SMOE_READ_PLAN, 0, 0, r->n_experts, expert);
    const struct smoe_expert_rec x = take_expert(r, expert);
    o->bytes = x.bytes;
    if (x.n_windows == 0 || !within(x.first_window, x.n_windows, r->n_windows) ||
        !within(x.first_move, x.n_moves, r->n_moves))
        return failed(o, SMOE_READ_PLAN, 0, 0, r->n_windows, x.first_window);
    uint64_t left = r->slot_bytes, left_to_move = r->slot_bytes;
    for (uint32_t i = 0; i < x.n_windows; i++) {
        struct smoe_window_rec v;
        if (!take_window(r, x.first_window + i, &v) || !spend(&left, v.length))
            return failed(o, SMOE_READ_PLAN, 0, v.file_offset, r->slot_bytes, v.slot_offset);
        if (read_window(w, &v, slot + v.slot_offset, o))
            return o->error;
        FAILPOINT("read.window");
    }
    for (uint32_t i = 0; i < x.n_moves; i++) {
        struct smoe_move_rec m = r->moves[x.first_move + i];
        COPIED(m);
        if (!within(m.from, m.bytes, r->slot_bytes) || !within(m.to, m.bytes, r->slot_bytes) ||
            !spend(&left_to_move, m.bytes))
            return failed(o, SMOE_READ_PLAN, 0, 0, r->slot_bytes, m.to);
        memmove(slot + m.to, slot + m.from, m.bytes);
        FAILPOINT("read.moved");
    }
    /* The bytes are of the file that the ring was made for, or they are not published. */
    for (uint32_t i = 0; i < x.n_windows; i++) {
        struct smoe_window_rec v;
        if (!take_window(r, x.first_window + i, &v))
            return failed(o, SMOE_READ_PLAN, 0, v.file_offset, r->slot_bytes, v.slot_offset);
        if (get_file(w, v.file) != 0 || !same_file(r, v.file, w->files[v.file].fd))
            return failed(o, SMOE_READ_CHANGED, v.file, v.file_offset, v.need, v.need);
    }
    return 0;
}

/* Hold what was read against the vault's checksum, where it has one: CRC-32C of the expert's parts in order. */
static int check_sum(struct worker *w, uint32_t expert, const unsigned char *slot, struct outcome *o) {
    smoe_ring *r = w->r;
    const struct smoe_expert_rec x = take_expert(r, expert); /* read_plan has checked the index */
    uint32_t file = 0;
    uint64_t offset = 0, left = r->slot_bytes;
    uint32_t sum = 0;
    if (!r->header->verify || x.crc32c == 0)
        return 0;
    if (x.n_parts == 0 || !within(x.first_part, x.n_parts, r->n_parts))
        return failed(o, SMOE_READ_PLAN, 0, 0, r->n_parts, x.first_part);
    for (uint32_t i = 0; i < x.n_parts; i++) {
        struct smoe_part_rec p = r->parts[x.first_part + i];
        COPIED(p);
        if (p.file >= r->n_files || !within(p.slot_offset, p.bytes, r->slot_bytes) || !spend(&left, p.bytes))
            return failed(o, SMOE_READ_PLAN, 0, p.file_offset, r->slot_bytes, p.slot_offset);
        sum = smoe_crc32c(sum, slot + p.slot_offset, p.bytes);
        file = i ? file : p.file;
        offset = i ? offset : p.file_offset;
    }
    o->checked = true;
    return sum == x.crc32c ? 0 : failed(o, SMOE_READ_CHECKSUM, file, offset, x.crc32c, sum);
}

static void finish(struct worker *w, uint32_t s, const struct outcome *o, uint64_t began) {
    smoe_ring *r = w->r;
    struct smoe_slot *slot = &r->slots[s];
    uint64_t now = plat_now_ns();
    const struct counted counts[] = {
        {o->error ? SMOE_C_FAILED_READS : SMOE_C_READS, 1},
        {SMOE_C_WANTED_BYTES, o->error ? 0 : o->bytes},
        {SMOE_C_DEVICE_BYTES, o->asked},
        {SMOE_C_READ_NS, now - began},
        {SMOE_C_CHECKED, o->checked},
        {SMOE_C_BAD_SUMS, o->error == SMOE_READ_CHECKSUM},
    };
    atomic_store_explicit(&slot->read_started_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&slot->kills, 0, memory_order_relaxed);
    atomic_store_explicit(&r->hot->landed_ns, now, memory_order_relaxed);
    counters_add_read(r, s, counts, sizeof counts / sizeof *counts, now - began);
    if (o->error) {
        slot_error_set(r, s, o->error, o->file, o->offset, o->wanted, o->got);
        FAILPOINT("fail.recorded");
        slot_fail(r, s, w->number);
    } else {
        lru_stamp(r, s);
        FAILPOINT("publish.stamped");
        slot_publish(r, s, w->number);
    }
    counters_confirm(r);
    FAILPOINT("publish.done");
    guess_clear(r, s);
    FAILPOINT("publish.guess_cleared");
    space_freed(r); /* a read that nobody held leaves an idle slot */
}

/* Map a slot when it is first met, sixteen pages a fault: the kernel's direct read would take one fault for
 * each page, and btrfs does not read past its cache into pages that are not mapped. */
static void meet(struct worker *w, uint32_t s) {
    if (w->met[s / 64] >> (s % 64) & 1)
        return;
    plat_prefault(w->r->data + (uint64_t)s * w->r->slot_bytes, w->r->slot_bytes, 0);
    w->met[s / 64] |= 1ull << (s % 64);
}

/* Nothing to do: map some more slots, so that the first reads into them are as fast as the later ones.  True:
 * there are more.  The nap in between leaves most of a core to whoever computes. */
static bool meet_some(struct worker *w) {
    uint64_t bytes = 0;
    for (; w->next_met < w->r->n_slots && bytes < MEET_BYTES; w->next_met++) {
        bytes += w->r->slot_bytes;
        meet(w, w->next_met);
    }
    return w->next_met < w->r->n_slots;
}

static void serve(struct worker *w, uint32_t s) {
    smoe_ring *r = w->r;
    struct smoe_participant *me = &r->participants[r->id];
    struct outcome o = {0};
    uint64_t word, began = plat_now_ns();
    if (s >= r->n_slots || !slot_start(r, s, w->number, &word)) {
        count(r, SMOE_C_SKIPS, 1);
        return;
    }
    FAILPOINT("read.started");
    atomic_fetch_add_explicit(&r->slots[s].kills, 1, memory_order_relaxed);
    atomic_store_explicit(&r->slots[s].read_started_ns, began, memory_order_relaxed);
    atomic_store_explicit(&me->read_started_ns, began, memory_order_relaxed);
    atomic_store_explicit(&me->current_slot, s + 1, memory_order_relaxed);
    FAILPOINT("read.recorded");
    meet(w, s);
    unsigned char *slot = r->data + (uint64_t)s * r->slot_bytes;
    if (read_plan(w, WORD_EXPERT(word), slot, &o) == 0)
        check_sum(w, WORD_EXPERT(word), slot, &o);
    FAILPOINT("read.done");
    finish(w, s, &o, began);
    atomic_store_explicit(&me->current_slot, 0, memory_order_relaxed);
    atomic_store_explicit(&me->read_started_ns, 0, memory_order_relaxed);
}

/* Demand first, always. */
static bool serve_next(struct worker *w) {
    smoe_ring *r = w->r;
    int s = queue_pop(demand_queue(r));
    FAILPOINT("pop.returned");
    if (s >= 0) {
        count(r, SMOE_C_POPS_DEMAND, 1);
    } else {
        s = queue_pop(speculative_queue(r));
        FAILPOINT("pop.speculative");
        if (s < 0)
            return false;
        count(r, SMOE_C_POPS_SPECULATIVE, 1);
    }
    serve(w, (uint32_t)s);
    return true;
}

/* --- the loop ----------------------------------------------------------------------------------------- */

static bool told_to_end(const struct worker *w, const struct worker_options *options) {
    if (options->stop && *options->stop)
        return true;
    uint32_t state = atomic_load_explicit(&w->r->header->state, memory_order_acquire);
    if (state == SMOE_STOPPING) /* reads that are demanded finish */
        return queue_empty(demand_queue(w->r));
    return state != SMOE_LIVE && state != SMOE_STALE;
}

static void idle(struct worker *w, uint32_t bell) {
    for (int i = 0; i < IDLE_SPINS; i++)
        if (atomic_load_explicit(&w->r->hot->doorbell, memory_order_acquire) != bell)
            return;
    uint64_t nap_ns = meet_some(w) ? MEET_NAP_NS : IDLE_SLICE_NS;
    _Atomic uint64_t *sleepers = &w->r->hot->sleepers[w->number / 64];
    uint64_t bit = 1ull << (w->number % 64);
    atomic_fetch_or_explicit(sleepers, bit, memory_order_seq_cst);
    FAILPOINT("sleep.marked");
    (void)plat_wait(&w->r->hot->doorbell, bell, nap_ns); /* B2: at once, if it has rung since */
    atomic_fetch_and_explicit(sleepers, ~bit, memory_order_seq_cst);
}

static void loop(struct worker *w, const struct worker_options *options) {
    for (;;) {
        /* B2: the doorbell before the queues. */
        uint32_t bell = atomic_load_explicit(&w->r->hot->doorbell, memory_order_seq_cst);
        if (told_to_end(w, options))
            return;
        if (!serve_next(w))
            idle(w, bell);
    }
}

/* The supervisor's death closes the pipe.  Ending inside a read is safe: see the file's top. */
static void *watch(void *arg) {
    struct pollfd p = {.fd = (int)(intptr_t)arg, .events = POLLIN};
    while (poll(&p, 1, -1) < 0 && errno == EINTR) {
    }
    _exit(3);
}

static int open_all(struct worker *w, smoe_error *e) {
    uint64_t limit = plat_raise_nofile();
    w->open_limit = limit > 64 ? (uint32_t)(limit - 32 < SMOE_FILES_MAX ? limit - 32 : SMOE_FILES_MAX) : 8;
    w->files = calloc(w->r->n_files, sizeof *w->files);
    if (!w->files)
        return fail(e, -ENOMEM, "calloc", ENOMEM, w->r->n_files * sizeof *w->files, 0);
    for (uint32_t i = 0; i < w->r->n_files; i++)
        w->files[i].fd = -1;
    for (uint32_t i = 0; i < w->r->n_files; i++) {
        int rc = get_file(w, i);
        if (rc) {
            fail(e, SMOE_EREAD, "open", rc, limit, 0);
            if (e)
                e->file = i;
            return SMOE_EREAD;
        }
    }
    return 0;
}

int worker_run(smoe_ring *r, const struct worker_options *options, smoe_error *e) {
    struct worker w = {.r = r, .number = r->id - SMOE_ID_WORKER};
    pthread_t watcher;
    int rc = options->watch_fd < 0 ? 0 : pthread_create(&watcher, NULL, watch, (void *)(intptr_t)options->watch_fd);
    if (rc)
        return fail(e, -rc, "pthread_create", rc, 0, 0); /* it sets no errno */
    w.met = calloc(r->n_slots / 64 + 1, sizeof *w.met);
    rc = w.met ? open_all(&w, e) : fail(e, -ENOMEM, "calloc", ENOMEM, r->n_slots / 8, 0);
    if (rc == 0) {
        if (options->ready_fd >= 0) {
            if (write(options->ready_fd, "r", 1) != 1) {
                /* The supervisor is gone; the watcher ends us. */
            }
            close(options->ready_fd);
        }
        loop(&w, options);
    }
    for (uint32_t i = 0; w.files && i < r->n_files; i++)
        if (w.files[i].fd >= 0)
            close(w.files[i].fd);
    free(w.met);
    free(w.files);
    free(w.bounce);
    return rc;
}

/* --- the probe ---------------------------------------------------------------------------------------- */

/* Real aligned direct reads in several places of the file, since it may be compressed in parts.  *cached:
 * whether one left its block in the page cache all the same, as a compressing file system does. */
static int probe_read(int fd, int plain, const struct plat_file_info *info, bool *cached) {
    size_t align = info->mem_align > info->offset_align ? info->mem_align : info->offset_align;
    void *block;
    if (align < 4096)
        align = 4096;
    if (posix_memalign(&block, align, align) != 0)
        return ENOMEM;
    memset(block, 0, align); /* mapped: see meet */
    struct stat st;
    uint64_t size = fstat(fd, &st) == 0 ? (uint64_t)st.st_size : 0;
    int rc = 0;
    for (uint64_t i = 0; i < PROBES && rc == 0 && !*cached; i++) {
        uint64_t at = size / PROBES * i / SMOE_PAGE_ALIGN * SMOE_PAGE_ALIGN;
        plat_drop_cache(plain, at, align);
        bool before = plat_is_cached(plain, at);
        ssize_t n;
        do
            n = pread(fd, block, align, (off_t)at);
        while (n < 0 && errno == EINTR);
        rc = n < 0 ? errno : 0;
        *cached = rc == 0 && !before && plat_is_cached(plain, at);
        plat_drop_cache(plain, at, align);
    }
    free(block);
    return rc;
}

int smoe_probe(const char *path, smoe_probe_result *result, smoe_error *error) {
    struct plat_file_info info;
    bool cached = false;
    memset(result, 0, sizeof *result);
    int plain = plat_open_file(path, 0);
    if (plain < 0)
        return fail(error, plain, "open", -plain, 0, 0);
    plat_file_info(plain, &info);
    memcpy(result->fs, info.fs, sizeof result->fs);
    result->mem_align = info.mem_align;
    result->offset_align = info.offset_align;
    if (info.kind != PLAT_FS_BLOCK) {
        close(plain);
        result->mode = info.kind == PLAT_FS_MEMORY ? SMOE_MODE_MEMORY : SMOE_MODE_BOUNCE;
        return 0;
    }
    result->call = "open";
    int fd = plat_open_file(path, 1), rc = fd < 0 ? -fd : 0;
    if (rc == 0) {
        result->call = "pread";
        rc = probe_read(fd, plain, &info, &cached);
        close(fd);
    }
    close(plain);
    if (rc && !plat_refuses_direct(rc))
        return fail(error, -rc, result->call, rc, 0, 0);
    result->mode = rc || cached ? SMOE_MODE_BUFFERED : SMOE_MODE_DIRECT;
    result->os_error = rc;
    return 0;
}
