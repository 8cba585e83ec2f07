/* testring.c: see testring.h.  Whatever ends the test, its segments and files are removed. */
#define _GNU_SOURCE
#include "testring.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define READ_ALIGN   4096u
#define HANG_SECONDS 500 /* a test that hangs is ended, and its segments are removed */

/* --- leaving nothing behind ------------------------------------------------------------------------- */

static struct {
    char name[512];
    bool used, segment;
} litter[256];
static pid_t litter_owner;

static void sweep(void) {
    if (getpid() != litter_owner)
        return; /* a forked child's exit */
    for (size_t i = 0; i < sizeof litter / sizeof *litter; i++)
        if (litter[i].used && litter[i].segment)
            shm_unlink(litter[i].name);
        else if (litter[i].used)
            unlink(litter[i].name);
}

static void on_signal(int sig) {
    sweep();
    signal(sig, SIG_DFL);
    raise(sig);
}

static void sweep_at_crash(void) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_set_death_callback(sweep); /* it catches crashes itself, and ends without atexit */
#elif !defined(__SANITIZE_THREAD__)
    signal(SIGSEGV, on_signal);
    signal(SIGBUS, on_signal);
#endif
}

void remember(const char *name, bool segment) {
    if (litter_owner == 0) {
        litter_owner = getpid();
        atexit(sweep);
        static const int signals[] = {SIGALRM, SIGTERM, SIGINT, SIGHUP, SIGPIPE, SIGABRT};
        for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
            signal(signals[i], on_signal);
        sweep_at_crash();
        alarm(HANG_SECONDS);
    }
    for (size_t i = 0; i < sizeof litter / sizeof *litter; i++)
        if (!litter[i].used) {
            snprintf(litter[i].name, sizeof litter[i].name, "%s", name);
            litter[i].segment = segment;
            litter[i].used = true;
            return;
        }
    REQUIRE(!"room to remember what has to be removed");
}

void forget(const char *name) {
    for (size_t i = 0; i < sizeof litter / sizeof *litter; i++)
        if (litter[i].used && strcmp(litter[i].name, name) == 0)
            litter[i].used = false;
}

/* --- files and tables ------------------------------------------------------------------------------- */

static unsigned char stamp(uint32_t x, uint64_t i) {
    uint64_t h = ((uint64_t)x + 1) * 0x9E3779B97F4A7C15ull ^ (i + 1) * 0xC2B2AE3D27D4EB4Full;
    h = (h ^ h >> 29) * 0xBF58476D1CE4E5B9ull;
    return (unsigned char)(h >> 56);
}

static uint64_t round_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

/* Where the expert's extents lie in their files. */
static void plan_parts(struct testring *t, uint32_t x, uint64_t *ends, uint64_t *seed) {
    struct smoe_expert_rec *e = &t->experts[x];
    e->first_part = t->geometry.n_parts;
    e->n_parts = 1 + random_below(seed, 3);
    e->layout = e->n_parts - 1;
    e->bytes = 0;
    for (uint32_t i = 0; i < e->n_parts; i++) {
        struct smoe_part_rec *p = &t->parts[t->geometry.n_parts++];
        uint32_t file = random_below(seed, t->geometry.n_files);
        uint64_t gap = random_below(seed, 4) == 0 ? 0 : random_below(seed, 6000);
        *p = (struct smoe_part_rec){
            .file = file,
            .file_offset = ends[file] + gap,
            .bytes = t->shape.part_bytes / 2 + random_below(seed, t->shape.part_bytes / 2),
        };
        ends[file] = p->file_offset + p->bytes;
        e->bytes += p->bytes;
    }
}

/* The aligned window around a part: merged with the one before where they touch, placed behind it. */
static void plan_window(struct testring *t, struct smoe_expert_rec *e, struct smoe_part_rec *p, uint64_t *used) {
    uint64_t from = p->file_offset / READ_ALIGN * READ_ALIGN;
    uint64_t to = round_up(p->file_offset + p->bytes, READ_ALIGN);
    struct smoe_window_rec *last = e->n_windows ? &t->windows[t->geometry.n_windows - 1] : NULL;
    if (!last || last->file != p->file || from > last->file_offset + last->length) {
        last = &t->windows[t->geometry.n_windows++];
        *last = (struct smoe_window_rec){.file = p->file, .file_offset = from, .slot_offset = *used};
        e->n_windows++;
    }
    last->length = to - last->file_offset;
    last->need = p->file_offset + p->bytes - last->file_offset;
    p->slot_offset = last->slot_offset + (p->file_offset - last->file_offset);
    *used = last->slot_offset + last->length;
}

static uint64_t plan_reads(struct testring *t, uint32_t x, uint64_t *seed) {
    struct smoe_expert_rec *e = &t->experts[x];
    uint64_t used = 0;
    e->first_window = t->geometry.n_windows;
    e->n_windows = 0;
    for (uint32_t f = 0; f < t->geometry.n_files; f++)
        for (uint32_t i = 0; i < e->n_parts; i++)
            if (t->parts[e->first_part + i].file == f) /* ascending in each file */
                plan_window(t, e, &t->parts[e->first_part + i], &used);
    e->first_move = t->geometry.n_moves;
    e->n_moves = 0;
    if (random_below(seed, 3) == 0) { /* one part gets an aligned place of its own */
        struct smoe_part_rec *p = &t->parts[e->first_part + random_below(seed, e->n_parts)];
        uint64_t place = round_up(used, 64);
        t->moves[t->geometry.n_moves++] = (struct smoe_move_rec){p->slot_offset, place, p->bytes};
        e->n_moves = 1;
        p->slot_offset = place;
        used = place + p->bytes;
    }
    return used;
}

static void plan_layouts(struct testring *t) {
    uint32_t n = 0;
    memcpy(t->strings, "raw\0U8\0tag", 11);
    t->geometry.strings_bytes = 11;
    for (uint32_t i = 0; i < 3; i++) {
        t->layouts[i] = (struct smoe_layout_rec){n, i + 1};
        for (uint32_t k = 0; k <= i; k++)
            t->tensors[n++] = (struct smoe_tensor_rec){
                .name = 0, .dtype = 4, .tag = 7, .part = k, .ndim = 1, .offset = k, .bytes = 16, .shape = {16}};
    }
    t->geometry.n_layouts = 3;
    t->geometry.n_tensors = n;
}

/* The stamped bytes of all experts, in memory and in the files' contents. */
static void stamp_all(struct testring *t) {
    for (uint32_t f = 0; f < t->geometry.n_files; f++)
        for (uint64_t i = 0; i < t->files[f].bytes; i++)
            t->files[f].content[i] = stamp(0xFFFFFFu - f, i); /* of no expert */
    for (uint32_t x = 0; x < t->geometry.n_experts; x++) {
        const struct smoe_expert_rec *e = &t->experts[x];
        uint64_t at = 0;
        t->expected[x] = malloc(e->bytes);
        for (uint64_t i = 0; i < e->bytes; i++)
            t->expected[x][i] = stamp(x, i);
        for (uint32_t i = 0; i < e->n_parts; i++) {
            const struct smoe_part_rec *p = &t->parts[e->first_part + i];
            memcpy(t->files[p->file].content + p->file_offset, t->expected[x] + at, p->bytes);
            at += p->bytes;
        }
    }
}

/* In the current directory: it lies on a real file system, so direct reads are real. */
static void write_file(struct testring *t, uint32_t i) {
    struct test_file *f = &t->files[i];
    char folder[400];
    struct stat st;
    REQUIRE(getcwd(folder, sizeof folder) != NULL);
    snprintf(f->path, sizeof f->path, "%s/%s.%u.bin", folder, t->name, i);
    remember(f->path, false);
    int fd = open(f->path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    REQUIRE(fd >= 0);
    REQUIRE(write(fd, f->content, f->bytes) == (ssize_t)f->bytes);
    REQUIRE(fsync(fd) == 0 && fstat(fd, &st) == 0);
    close(fd);
    f->mtime_ns = plat_mtime_ns(&st);
    t->file_recs[i] = (struct smoe_file_rec){
        .dev = st.st_dev,
        .ino = st.st_ino,
        .size = f->bytes,
        .mtime_ns = f->mtime_ns,
        .path = (uint32_t)t->geometry.strings_bytes,
    };
    size_t n = strlen(f->path) + 1;
    REQUIRE(t->geometry.strings_bytes + n <= sizeof t->strings);
    memcpy(t->strings + t->geometry.strings_bytes, f->path, n);
    t->geometry.strings_bytes += n;
}

static void set_defaults(struct testring *t, const struct shape *shape) {
    static uint32_t rings;
    memset(t, 0, sizeof *t);
    t->shape = *shape;
    t->shape.files = shape->files ? shape->files : TEST_FILES;
    t->shape.part_bytes = shape->part_bytes ? shape->part_bytes : 12000;
    t->shape.deadline_ms = shape->deadline_ms ? shape->deadline_ms : 60000;
    snprintf(t->name, sizeof t->name, "ct-%d-%u", (int)getpid(), rings++);
    pthread_mutex_init(&t->handles_lock, NULL);
    t->geometry = (smoe_geometry){
        .n_slots = shape->slots,
        .n_experts = shape->layers * shape->experts,
        .n_files = t->shape.files,
        .grid_layers = shape->layers,
        .grid_experts = shape->experts + 1,
        .read_deadline_ms = t->shape.deadline_ms,
        .read_align = READ_ALIGN,
    };
    uint32_t n = t->geometry.n_experts;
    t->experts = calloc(n, sizeof *t->experts);
    t->windows = calloc(3 * n, sizeof *t->windows);
    t->parts = calloc(3 * n, sizeof *t->parts);
    t->moves = calloc(n, sizeof *t->moves);
    t->expected = calloc(n, sizeof *t->expected);
}

void testring_plan(struct testring *t, const struct shape *shape) {
    uint64_t seed = shape->seed, ends[TEST_FILES] = {0}, largest = 0;
    set_defaults(t, shape);
    plan_layouts(t);
    for (uint32_t x = 0; x < t->geometry.n_experts; x++) {
        t->experts[x].layer = x / shape->experts;
        t->experts[x].expert = x % shape->experts;
        plan_parts(t, x, ends, &seed);
        uint64_t used = plan_reads(t, x, &seed);
        largest = used > largest ? used : largest;
    }
    t->geometry.slot_bytes = round_up(largest, SMOE_SLOT_ALIGN);
    for (uint32_t f = 0; f < t->shape.files; f++) {
        t->files[f].bytes = ends[f] + random_below(&seed, 3000); /* the end of file cuts windows short */
        t->files[f].content = malloc(t->files[f].bytes + 1);
    }
    stamp_all(t);
    for (uint32_t f = 0; f < t->shape.files; f++)
        write_file(t, f);
}

/* --- the ring --------------------------------------------------------------------------------------- */

static int make_segment(const char *name, bool data, uint64_t bytes) {
    char path[40];
    REQUIRE(segment_name(path, name, data) > 0);
    remember(path, true);
    int fd = shm_open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    REQUIRE(fd >= 0);
    REQUIRE(ftruncate(fd, (off_t)bytes) == 0);
    return fd;
}

static void remove_segment(const char *name, bool data) {
    char path[40];
    segment_name(path, name, data);
    shm_unlink(path);
    forget(path);
}

smoe_tables testring_tables(const struct testring *t) {
    return (smoe_tables){
        .experts = t->experts,
        .windows = t->windows,
        .parts = t->parts,
        .moves = t->moves,
        .layouts = t->layouts,
        .tensors = t->tensors,
        .files = t->file_recs,
        .strings = t->strings,
    };
}

int testring_create(struct testring *t, smoe_error *error) {
    const smoe_tables tables = testring_tables(t);
    int rc = smoe_measure(&t->geometry, &t->control_bytes, &t->data_bytes, error);
    if (rc)
        return rc;
    int control = make_segment(t->name, false, t->control_bytes);
    int data = make_segment(t->name, true, t->data_bytes);
    rc = smoe_create(control, data, &t->geometry, &tables, error);
    if (rc == 0) {
        t->control = mmap(NULL, t->control_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, control, 0);
        t->data = mmap(NULL, t->data_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, data, 0);
        REQUIRE(t->control != MAP_FAILED && t->data != MAP_FAILED);
    } else {
        remove_segment(t->name, false);
        remove_segment(t->name, true);
    }
    close(control);
    close(data);
    return rc;
}

void testring_open(struct testring *t, const struct shape *shape) {
    smoe_error e;
    testring_plan(t, shape);
    if (testring_create(t, &e) != 0) {
        printf("  smoe_create: %s: %s (wanted %llu, got %llu)\n", smoe_strerror(e.code), e.call,
               (unsigned long long)e.wanted, (unsigned long long)e.got);
        exit(1);
    }
    int lock = smoe_supervisor_lock(t->name, &e);
    REQUIRE(lock >= 0);
    t->supervisor = testring_attach(t, SMOE_ROLE_SUPERVISOR, (uint32_t)lock);
}

void testring_close(struct testring *t) {
    testring_stop(t);
    for (uint32_t i = 0; i < TEST_HANDLES; i++)
        if (t->handles[i].ring)
            testring_detach(t, t->handles[i].ring);
    if (t->control) {
        munmap(t->control, t->control_bytes);
        munmap(t->data, t->data_bytes);
        remove_segment(t->name, false);
        remove_segment(t->name, true);
    }
    for (uint32_t f = 0; f < t->shape.files; f++) {
        unlink(t->files[f].path);
        forget(t->files[f].path);
        free(t->files[f].content);
    }
    for (uint32_t x = 0; x < t->geometry.n_experts; x++)
        free(t->expected[x]);
    free(t->expected);
    free(t->experts);
    free(t->windows);
    free(t->parts);
    free(t->moves);
    pthread_mutex_destroy(&t->handles_lock);
}

/* --- handles ---------------------------------------------------------------------------------------- */

static bool one_map(void) {
#ifdef __SANITIZE_THREAD__
    return true;
#else
    return getenv("SMOE_TEST_ONE_MAP") != NULL;
#endif
}

static void bend(smoe_ring *r, ptrdiff_t by) {
#define BEND(field) r->field = (void *)((char *)(uintptr_t)r->field + by)
    BEND(header), BEND(hot), BEND(reservations), BEND(participants), BEND(counters), BEND(file_modes);
    BEND(ticks), BEND(bounds), BEND(empties), BEND(guesses), BEND(colds), BEND(demand_cells), BEND(speculative_cells);
    BEND(homes), BEND(histogram), BEND(words), BEND(slots), BEND(grid), BEND(experts), BEND(windows), BEND(parts);
    BEND(moves), BEND(layouts), BEND(tensors);
#undef BEND
}

static void adopt_handle(struct testring *t, smoe_ring *r) {
    pthread_mutex_lock(&t->handles_lock);
    uint32_t i = 0;
    while (i < TEST_HANDLES && t->handles[i].ring)
        i++;
    REQUIRE(i < TEST_HANDLES);
    t->handles[i].ring = r;
    t->handles[i].data = r->data;
    t->handles[i].shift = one_map() ? (char *)t->control - (char *)r->header : 0;
    if (one_map()) {
        bend(r, t->handles[i].shift);
        r->data = t->data;
    }
    pthread_mutex_unlock(&t->handles_lock);
}

int testring_try_attach(struct testring *t, int role, uint32_t id, smoe_ring **ring, smoe_error *error) {
    int rc = smoe_attach(t->name, role, id, "a test", ring, error);
    if (rc == 0)
        adopt_handle(t, *ring);
    return rc;
}

smoe_ring *testring_attach(struct testring *t, int role, uint32_t id) {
    smoe_ring *r = NULL;
    smoe_error e;
    if (testring_try_attach(t, role, id, &r, &e) != 0) {
        printf("  smoe_attach: %s: %s (wanted %llu, got %llu)\n", smoe_strerror(e.code), e.call,
               (unsigned long long)e.wanted, (unsigned long long)e.got);
        exit(1);
    }
    return r;
}

smoe_ring *testring_client(struct testring *t) {
    return testring_attach(t, SMOE_ROLE_CLIENT, 0);
}

void testring_detach(struct testring *t, smoe_ring *r) {
    pthread_mutex_lock(&t->handles_lock);
    for (uint32_t i = 0; i < TEST_HANDLES; i++)
        if (t->handles[i].ring == r) {
            bend(r, -t->handles[i].shift);
            r->data = t->handles[i].data;
            t->handles[i].ring = NULL;
        }
    pthread_mutex_unlock(&t->handles_lock);
    smoe_detach(r);
}

void testring_detach_supervisor(struct testring *t) {
    testring_detach(t, t->supervisor);
    t->supervisor = NULL;
}

/* --- workers ---------------------------------------------------------------------------------------- */

#ifdef __SANITIZE_THREAD__
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
#else
#define AnnotateIgnoreWritesBegin(file, line) ((void)0)
#define AnnotateIgnoreWritesEnd(file, line)   ((void)0)
#endif

/* In a worker process a signal handler sets the flag, so it is a volatile int and no atomic. */
static void set_stop(struct test_worker *w) {
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    w->stop = 1;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
}

static void *work(void *arg) {
    struct test_worker *w = arg;
    const struct worker_options options = {.watch_fd = -1, .ready_fd = -1, .stop = &w->stop};
    w->rc = worker_run(w->ring, &options, &w->error);
    return NULL;
}

void testring_start(struct testring *t, uint32_t workers) {
    REQUIRE(t->n_workers + workers <= TEST_WORKERS);
    for (uint32_t i = 0; i < workers; i++) {
        struct test_worker *w = &t->workers[t->n_workers];
        w->stop = 0;
        w->ring = testring_attach(t, SMOE_ROLE_WORKER, t->n_workers++);
        REQUIRE(pthread_create(&w->thread, NULL, work, w) == 0);
    }
}

void testring_stop(struct testring *t) {
    for (uint32_t i = 0; i < t->n_workers; i++)
        set_stop(&t->workers[i]);
    for (uint32_t i = 0; i < t->n_workers; i++) {
        doorbell_ring(t->workers[i].ring, 0);
        pthread_join(t->workers[i].thread, NULL);
        testring_detach(t, t->workers[i].ring);
    }
    t->n_workers = 0;
}

/* --- looking ---------------------------------------------------------------------------------------- */

bool testring_bytes_ok(const struct testring *t, const smoe_ring *r, const smoe_hold *h) {
    smoe_part parts[3];
    const unsigned char *slot = smoe_slot_data(r, h->slot), *expected = t->expected[h->expert_index];
    int n = smoe_expert_parts(r, h->expert_index, parts, 3);
    for (int i = 0; i < n; i++) {
        if (memcmp(slot + parts[i].offset, expected, parts[i].bytes) != 0)
            return false;
        expected += parts[i].bytes;
    }
    return n > 0;
}

struct smoe_expert_rec *testring_expert(struct testring *t, uint32_t x) {
    const struct smoe_header *h = (const struct smoe_header *)t->control;
    return (struct smoe_expert_rec *)(t->control + h->off_experts) + x;
}

struct smoe_window_rec *testring_window(struct testring *t, uint32_t x, uint32_t i) {
    const struct smoe_header *h = (const struct smoe_header *)t->control;
    return (struct smoe_window_rec *)(t->control + h->off_windows) + t->experts[x].first_window + i;
}

void testring_touch(struct testring *t, uint32_t file, bool changed) {
    int64_t ns = t->files[file].mtime_ns + (changed ? 1000000007 : 0);
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {ns / 1000000000, ns % 1000000000}};
    REQUIRE(utimensat(AT_FDCWD, t->files[file].path, times, 0) == 0);
}

static bool loading(const struct testring *t) {
    uint32_t n[9];
    smoe_census(t->supervisor, n);
    return n[SMOE_QUEUED] + n[SMOE_READING] > 0;
}

void testring_settle(struct testring *t) {
    UNTIL(!loading(t));
}

void testring_check_quiet(struct testring *t) {
    smoe_ring *r = t->supervisor;
    uint32_t n[9];
    CHECK_EQ(smoe_census(r, n), 0);
    CHECK_EQ(n[0] + n[1] + n[2] + n[3] + n[4] + n[5], r->n_slots);
    CHECK_EQ(n[SMOE_QUEUED], 0);
    CHECK_EQ(n[SMOE_READING], 0);
    CHECK_EQ(n[SMOE_FAILED], 0);
    CHECK_EQ(n[6], 0); /* held */
    CHECK_EQ(n[8], 0); /* reserved */
    CHECK_EQ(guess_count(r), 0);
    for (uint32_t s = 0; s < r->n_slots; s++) {
        bool hint = atomic_load(&r->empties[s / SMOE_GROUP]) >> (s % SMOE_GROUP) & 1;
        if (WORD_STATE(slot_word(r, s)) == SMOE_EMPTY)
            CHECK(hint); /* a bit too many is corrected when it is met; one too few hides the slot */
    }
}

uint64_t testring_counter(const struct testring *t, enum smoe_counter c) {
    return smoe_counter_value(t->supervisor, c, -1);
}
