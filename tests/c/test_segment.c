/* test_segment.c: what smoe_create and smoe_attach refuse, ids and locks, dead clients, forks. */
#define _GNU_SOURCE
#include "testring.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct shape SMALL = {.layers = 2, .experts = 12, .slots = 6, .seed = 4};

static smoe_hold acquire_ok(smoe_ring *r, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e;
    int rc = smoe_acquire(r, 0, &expert, 1, &h, 60000, &e);
    CHECK(rc == 0 || rc == 1);
    return h;
}

/* What happens between the opening of a segment by its name and the locking of it. */
static void (*before_lock)(void);
int __real_plat_lock_try(int lock_fd, uint32_t id);
int __wrap_plat_lock_try(int lock_fd, uint32_t id);
int __wrap_plat_lock_try(int lock_fd, uint32_t id) {
    if (before_lock) {
        void (*happens)(void) = before_lock;
        before_lock = NULL;
        happens();
    }
    return __real_plat_lock_try(lock_fd, id);
}

static int open_descriptors(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

/* --- the supervisor's lock ---------------------------------------------------------------------------- */

static char race_path[40];

static void give_name_away(void) {
    shm_unlink(race_path);
    int fd = shm_open(race_path, O_RDWR | O_CREAT | O_EXCL, 0600);
    REQUIRE(fd >= 0 && ftruncate(fd, 4096) == 0);
    close(fd);
}

/* The lock of a segment that has no name any more gives no right to the one that has it now. */
static void test_lock_race(void) {
    smoe_error e;
    char name[20];
    snprintf(name, sizeof name, "ct-%d-race", (int)getpid());
    snprintf(race_path, sizeof race_path, "/smoe.%s", name);
    int fd = shm_open(race_path, O_RDWR | O_CREAT | O_EXCL, 0600);
    REQUIRE(fd >= 0);
    close(fd);
    before_lock = give_name_away;
    CHECK_EQ(smoe_supervisor_lock(name, &e), SMOE_ETAKEN);
    int lock = smoe_supervisor_lock(name, &e);
    CHECK(lock >= 0);
    if (lock >= 0)
        smoe_supervisor_unlock(lock);
    shm_unlink(race_path);
}

/* --- creation --------------------------------------------------------------------------------------- */

struct change {
    const char *what;
    void *field;
    size_t bytes;
    uint64_t value;
};

static void refused(struct testring *t, const struct change *c) {
    uint64_t old = 0;
    smoe_error e;
    int before = test_failures();
    memcpy(&old, c->field, c->bytes);
    memcpy(c->field, &c->value, c->bytes);
    CHECK_EQ(testring_create(t, &e), SMOE_ECORRUPT);
    CHECK_EQ(e.code, SMOE_ECORRUPT);
    CHECK(e.call != NULL);
    memcpy(c->field, &old, c->bytes);
    if (test_failures() != before) {
        test_fail(__FILE__, __LINE__, c->what);
        t->control = NULL; /* it was created */
    }
}

#define CHANGE(field, value) {#field " = " #value, &(field), sizeof(field), (uint64_t)(value)}

static void test_refused_tables(void) {
    struct testring t;
    testring_plan(&t, &SMALL);
    struct smoe_expert_rec *x = &t.experts[3];
    struct smoe_window_rec *w = &t.windows[2];
    struct smoe_part_rec *p = &t.parts[2];
    struct smoe_move_rec *m = t.moves;
    const smoe_geometry *g = &t.geometry;
    uint64_t size = t.file_recs[w->file].size;
    const struct change changes[] = {
        CHANGE(x->layer, g->grid_layers),
        CHANGE(x->expert, g->grid_experts),
        CHANGE(x->expert, UINT32_MAX),
        CHANGE(x->expert, 2), /* named twice */
        CHANGE(x->layout, 3),
        CHANGE(x->n_windows, 0),
        CHANGE(x->n_windows, UINT32_MAX),
        CHANGE(x->first_window, g->n_windows),
        CHANGE(x->first_window, UINT32_MAX),
        CHANGE(x->n_parts, 0),
        CHANGE(x->n_parts, UINT32_MAX),
        CHANGE(x->first_part, g->n_parts),
        CHANGE(x->n_moves, UINT32_MAX),
        CHANGE(x->first_move, UINT32_MAX),
        CHANGE(w->file, g->n_files),
        CHANGE(w->length, 0),
        CHANGE(w->length, w->length + 512),
        CHANGE(w->length, g->slot_bytes + 4096),
        CHANGE(w->length, -4096),
        CHANGE(w->need, 0),
        CHANGE(w->need, w->length + 1),
        CHANGE(w->file_offset, size / 4096 * 4096 + 4096),
        CHANGE(w->file_offset, -4096),
        CHANGE(w->file_offset, w->file_offset + 1),
        CHANGE(w->slot_offset, g->slot_bytes),
        CHANGE(w->slot_offset, w->slot_offset + 512),
        CHANGE(w->slot_offset, -4096),
        CHANGE(p->file, g->n_files),
        CHANGE(p->file_offset, t.file_recs[p->file].size),
        CHANGE(p->file_offset, UINT64_MAX),
        CHANGE(p->bytes, UINT64_MAX),
        CHANGE(p->bytes, g->slot_bytes + 1),
        CHANGE(p->slot_offset, g->slot_bytes),
        CHANGE(p->slot_offset, UINT64_MAX),
        CHANGE(m->from, g->slot_bytes),
        CHANGE(m->to, g->slot_bytes),
        CHANGE(m->to, UINT64_MAX),
        CHANGE(m->bytes, UINT64_MAX),
        CHANGE(t.layouts[1].first_tensor, g->n_tensors),
        CHANGE(t.layouts[1].n_tensors, UINT32_MAX),
        CHANGE(t.tensors[0].part, 3),
        CHANGE(t.tensors[0].offset, g->slot_bytes),
        CHANGE(t.tensors[0].offset, UINT64_MAX),
        CHANGE(t.tensors[0].bytes, UINT64_MAX),
        CHANGE(t.tensors[0].name, g->strings_bytes),
        CHANGE(t.tensors[0].dtype, UINT32_MAX),
        CHANGE(t.tensors[0].ndim, SMOE_NDIM + 1),
        CHANGE(t.file_recs[0].path, g->strings_bytes),
        CHANGE(t.file_recs[0].size, 1),
        CHANGE(t.strings[g->strings_bytes - 1], 'x'),
    };
    int descriptors = open_descriptors();
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        refused(&t, &changes[i]);
    CHECK_EQ(open_descriptors(), descriptors);
    smoe_error e;
    CHECK_EQ(testring_create(&t, &e), 0); /* the same tables, unchanged */
    testring_close(&t);
}

static void test_refused_geometry(void) {
    struct testring t;
    testring_plan(&t, &SMALL);
    smoe_geometry *g = &t.geometry;
    const struct change changes[] = {
        CHANGE(g->n_slots, 0),
        CHANGE(g->n_slots, SMOE_SLOTS_MAX + 1),
        CHANGE(g->slot_bytes, 0),
        CHANGE(g->slot_bytes, SMOE_SLOT_ALIGN + 4096),
        CHANGE(g->slot_bytes, UINT64_MAX),
        CHANGE(g->slot_bytes, (1ull << 40) + SMOE_SLOT_ALIGN),
        CHANGE(g->slot_bytes, SMOE_SLOT_ALIGN), /* smaller than the plans */
        CHANGE(g->n_experts, 0),
        CHANGE(g->n_experts, SMOE_EXPERTS_MAX + 1),
        CHANGE(g->n_windows, 0),
        CHANGE(g->n_windows, UINT32_MAX),
        CHANGE(g->n_parts, 0),
        CHANGE(g->n_moves, UINT32_MAX),
        CHANGE(g->n_layouts, 0),
        CHANGE(g->n_tensors, UINT32_MAX),
        CHANGE(g->n_files, 0),
        CHANGE(g->n_files, SMOE_FILES_MAX + 1),
        CHANGE(g->grid_layers, 0),
        CHANGE(g->grid_layers, 1),
        CHANGE(g->grid_experts, 11),
        CHANGE(g->grid_experts, UINT32_MAX),
        CHANGE(g->grid_layers, SMOE_GRID_MAX), /* alone in range; with the experts not */
        CHANGE(g->strings_bytes, 0),
        CHANGE(g->strings_bytes, UINT64_MAX),
        CHANGE(g->read_align, 0),
        CHANGE(g->read_align, 4095),
        CHANGE(g->read_align, 1u << 20),
    };
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        refused(&t, &changes[i]);
    smoe_error e;
    CHECK_EQ(testring_create(&t, &e), 0);
    testring_close(&t);
}

/* --- attaching -------------------------------------------------------------------------------------- */

static void attach_gives(struct testring *t, int want, const struct change *c) {
    uint64_t old = 0;
    smoe_ring *r;
    smoe_error e;
    int before = test_failures();
    memcpy(&old, c->field, c->bytes);
    memcpy(c->field, &c->value, c->bytes);
    int rc = smoe_attach(t->name, SMOE_ROLE_CLIENT, 0, NULL, &r, &e);
    memcpy(c->field, &old, c->bytes);
    CHECK_EQ(rc, want);
    if (rc == 0)
        smoe_detach(r);
    else
        CHECK_EQ(e.code, want);
    if (test_failures() != before)
        test_fail(__FILE__, __LINE__, c->what);
}

static void test_foreign_headers(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    struct smoe_header *h = (struct smoe_header *)t.control;
    const struct {
        int want;
        struct change change;
    } cases[] = {
        {SMOE_EABI, CHANGE(h->magic, 0x1234)},
        {SMOE_ENOTLIVE, CHANGE(h->magic, 0)},
        {SMOE_EABI, CHANGE(h->abi, SMOE_ABI + 1)},
        {SMOE_EABI, CHANGE(h->fingerprint, 1)},
        {SMOE_ENOTLIVE, CHANGE(h->state, SMOE_CREATING)},
        {SMOE_ESTOPPING, CHANGE(h->state, SMOE_STOPPING)},
        {SMOE_EGONE, CHANGE(h->state, SMOE_GONE)},
        {SMOE_EGONE, CHANGE(h->data_ino, 1)},
        {SMOE_EGONE, CHANGE(h->data_dev, 1)},
        {SMOE_ECORRUPT, CHANGE(h->control_bytes, h->control_bytes + 65536)},
        {SMOE_ECORRUPT, CHANGE(h->control_bytes, 0)},
        {SMOE_ECORRUPT, CHANGE(h->data_bytes, 0)},
        {SMOE_ECORRUPT, CHANGE(h->slot_bytes, 2 * h->slot_bytes)},
        {SMOE_ECORRUPT, CHANGE(h->n_slots, 0)},
        {SMOE_ECORRUPT, CHANGE(h->n_slots, 7)},
        {SMOE_ECORRUPT, CHANGE(h->n_slots, UINT32_MAX)},
        {SMOE_ECORRUPT, CHANGE(h->n_groups, 2)},
        {SMOE_ECORRUPT, CHANGE(h->n_experts, 1u << 20)},
        {SMOE_ECORRUPT, CHANGE(h->n_windows, UINT32_MAX)},
        {SMOE_ECORRUPT, CHANGE(h->grid_layers, UINT32_MAX)},
        {SMOE_ECORRUPT, CHANGE(h->queue_capacity, 3)},
        {SMOE_ECORRUPT, CHANGE(h->queue_capacity, 1u << 20)},
        {SMOE_ECORRUPT, CHANGE(h->guess_limit, 100)},
        {SMOE_ECORRUPT, CHANGE(h->read_align, 3)},
        {SMOE_ECORRUPT, CHANGE(h->strings_bytes, UINT64_MAX)},
        {SMOE_ECORRUPT, CHANGE(h->off_hot, 0)},
        {SMOE_ECORRUPT, CHANGE(h->off_slots, UINT64_MAX)},
        {SMOE_ECORRUPT, CHANGE(h->tables_offset, 0)},
        {SMOE_ECORRUPT, CHANGE(h->off_strings, h->control_bytes)},
    };
    int descriptors = open_descriptors();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        attach_gives(&t, cases[i].want, &cases[i].change);
    CHECK_EQ(open_descriptors(), descriptors);
    const struct change none = CHANGE(h->reserved0, 0);
    attach_gives(&t, 0, &none);
    testring_close(&t);
}

static void resize(const char *name, bool data, uint64_t bytes) {
    char path[40];
    segment_name(path, name, data);
    int fd = shm_open(path, O_RDWR, 0);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    close(fd);
}

/* Sizes are looked at before anything is mapped: no SIGBUS. */
static void test_foreign_sizes(void) {
    struct testring t;
    smoe_ring *r;
    smoe_error e;
    testring_plan(&t, &SMALL);
    REQUIRE(testring_create(&t, &e) == 0);
    const struct {
        bool data;
        uint64_t bytes;
        int want;
    } cases[] = {
        {true, t.data_bytes + 65536, SMOE_ECORRUPT},
        {true, 0, SMOE_ECORRUPT},
        {true, t.data_bytes, 0},
        {false, t.control_bytes + 65536, SMOE_ECORRUPT},
        {false, t.control_bytes / 2, SMOE_ECORRUPT},
        {false, sizeof(struct smoe_header), SMOE_ECORRUPT},
        {false, sizeof(struct smoe_header) - 1, SMOE_ENOTLIVE},
        {false, 0, SMOE_ENOTLIVE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        resize(t.name, cases[i].data, cases[i].bytes);
        int rc = smoe_attach(t.name, SMOE_ROLE_CLIENT, 0, NULL, &r, &e);
        CHECK_EQ(rc, cases[i].want);
        if (rc == 0)
            smoe_detach(r);
    }
    int alive = 1;
    CHECK_EQ(smoe_peek(t.name, &alive, &e), SMOE_CREATING);
    CHECK_EQ(alive, 0);
    testring_close(&t);
}

static void test_names(void) {
    struct testring t;
    smoe_ring *r;
    smoe_error e;
    int alive;
    testring_open(&t, &SMALL);
    CHECK_EQ(smoe_attach("ct-no-such-ring", SMOE_ROLE_CLIENT, 0, NULL, &r, &e), -ENOENT);
    CHECK_EQ(smoe_peek("ct-no-such-ring", &alive, &e), -ENOENT);
    CHECK_EQ(smoe_supervisor_lock("ct-no-such-ring", &e), -ENOENT);
    CHECK_EQ(smoe_attach("../etc/passwd", SMOE_ROLE_CLIENT, 0, NULL, &r, &e), -ENAMETOOLONG);
    CHECK_EQ(smoe_attach("a-name-of-more-than-22-ch", SMOE_ROLE_CLIENT, 0, NULL, &r, &e), -ENAMETOOLONG);
    CHECK_EQ(smoe_peek(t.name, &alive, &e), SMOE_LIVE);
    CHECK_EQ(alive, 1);
    char path[40];
    segment_name(path, t.name, true);
    shm_unlink(path);
    CHECK_EQ(smoe_attach(t.name, SMOE_ROLE_CLIENT, 0, NULL, &r, &e), -ENOENT);
    testring_detach_supervisor(&t);
    CHECK_EQ(smoe_peek(t.name, &alive, &e), SMOE_LIVE);
    CHECK_EQ(alive, 0);
    testring_close(&t);
}

/* Clients cannot write what others compute with. */
static void test_read_only(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            smoe_ring *r;
            smoe_error e;
            signal(SIGSEGV, SIG_DFL);
            if (smoe_attach(t.name, SMOE_ROLE_CLIENT, 0, NULL, &r, &e) != 0)
                _exit(9);
            if (i == 0)
                *(volatile unsigned char *)r->data = 1;
            else
                *(volatile uint32_t *)(uintptr_t)&r->experts[0].layer = 1;
            _exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
    testring_close(&t);
}

/* --- ids and locks ---------------------------------------------------------------------------------- */

static void test_33rd_client(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *clients[32], *r;
    smoe_error e;
    for (int i = 0; i < 32; i++) {
        clients[i] = testring_client(&t);
        CHECK_EQ(clients[i]->id, i);
    }
    CHECK_EQ(testring_try_attach(&t, SMOE_ROLE_CLIENT, 0, &r, &e), SMOE_ECLIENTS);
    CHECK_EQ(e.wanted, 32);
    testring_detach(&t, clients[17]);
    r = testring_client(&t);
    CHECK_EQ(r->id, 17);
    testring_close(&t);
}

static void test_taken_ids(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *r;
    smoe_error e;
    CHECK_EQ(smoe_supervisor_lock(t.name, &e), SMOE_ETAKEN);
    testring_attach(&t, SMOE_ROLE_WORKER, 3);
    CHECK_EQ(testring_try_attach(&t, SMOE_ROLE_WORKER, 3, &r, &e), SMOE_ETAKEN);
    CHECK_EQ(testring_try_attach(&t, SMOE_ROLE_WORKER, SMOE_WORKERS, &r, &e), -EINVAL);
    testring_attach(&t, SMOE_ROLE_PREWARM, 0);
    CHECK_EQ(testring_try_attach(&t, SMOE_ROLE_PREWARM, 0, &r, &e), SMOE_ETAKEN);
    smoe_ring *client = testring_client(&t), *observer = testring_attach(&t, SMOE_ROLE_OBSERVER, 0);
    smoe_participant_info who[8];
    CHECK_EQ(smoe_participants(observer, who, 8), 4);
    CHECK_EQ(who[0].id, client->id);
    CHECK_EQ(who[1].id, SMOE_ID_WORKER + 3);
    for (int i = 0; i < 4; i++)
        CHECK(who[i].alive && who[i].pid == (uint32_t)getpid() && strcmp(who[i].label, "a test") == 0);
    smoe_hold h;
    const int64_t three = 3;
    CHECK_EQ(smoe_acquire(observer, 0, &three, 1, &h, 0, &e), -EPERM);
    testring_close(&t);
}

/* A queue's positions as a killed process may leave them, and as only somebody who writes over them can. */
static void test_adopted_queues(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *r = t.supervisor;
    const smoe_tables tables = testring_tables(&t);
    const uint64_t capacity = r->queue_capacity, far = 1ull << 32;
    const struct {
        uint64_t head, tail;
        int rc;
    } positions[] = {
        {5, 5, 0},
        {5, 5 + capacity, 0},
        {5, 6 + capacity, 0}, /* full once more behind a head that lags */
        {6, 5, 0},            /* popped before the tail was moved on */
        {5, 7 + capacity, SMOE_ECORRUPT},
        {7, 5, SMOE_ECORRUPT},
        {5, 5 + far, SMOE_ECORRUPT},
        {5 + far, 5, SMOE_ECORRUPT},
    };
    struct smoe_queue_pos *const queues[] = {&r->hot->demand, &r->hot->speculative};
    smoe_error e;
    for (int q = 0; q < 2; q++) {
        for (size_t i = 0; i < sizeof positions / sizeof *positions; i++) {
            atomic_store(&queues[q]->head, positions[i].head);
            atomic_store(&queues[q]->tail, positions[i].tail);
            CHECK_EQ(smoe_adoptable(r, &t.geometry, &tables, &e), positions[i].rc);
        }
        atomic_store(&queues[q]->head, 0);
        atomic_store(&queues[q]->tail, 0);
    }
    testring_close(&t);
}

static void test_detach_frees(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    smoe_hold h;
    for (int64_t x = 0; x < 4; x++)
        h = acquire_ok(a, x);
    acquire_ok(a, 3);
    acquire_ok(b, 3);
    uint32_t id = a->id;
    CHECK_EQ(WORD_HOLDERS(slot_word(b, h.slot)), a->bit | b->bit);
    testring_detach(&t, a);
    uint32_t n[9];
    smoe_census(t.supervisor, n);
    CHECK_EQ(n[6], 1);
    CHECK_EQ(n[8], 1);
    CHECK_EQ(WORD_HOLDERS(slot_word(b, h.slot)), b->bit);
    smoe_participant_info who[8];
    CHECK_EQ(smoe_participants(b, who, 8), 2);
    a = testring_client(&t);
    CHECK_EQ(a->id, id);
    testring_close(&t);
}

/* --- death ------------------------------------------------------------------------------------------ */

/* A child that attaches, holds three slots (one twice, one FAILED), tells so, and is then killed. */
static pid_t holding_child(const struct testring *t, int *told) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        smoe_ring *r;
        smoe_error e;
        smoe_hold h[3], again;
        const int64_t experts[] = {0, 1, 2};
        uint64_t word;
        bool ok = smoe_attach(t->name, SMOE_ROLE_CLIENT, 0, "child", &r, &e) == 0 &&
                  smoe_acquire(r, 0, experts, 3, h, 0, &e) == 0 && smoe_hold_again(r, &h[0], &again) == 0 &&
                  slot_start(r, h[2].slot, 126, &word);
        if (ok)
            slot_fail(r, h[2].slot, 126);
        if (!ok || write(ends[1], &h[2].slot, 4) != 4)
            _exit(1);
        for (;;)
            pause();
    }
    close(ends[1]);
    *told = ends[0];
    return pid;
}

static void dead_client(bool recovered) {
    struct testring t;
    testring_open(&t, &SMALL);
    int told;
    uint32_t failed;
    pid_t pid = holding_child(&t, &told);
    REQUIRE(read(told, &failed, 4) == 4);
    close(told);
    CHECK_EQ(smoe_recover(t.supervisor, 0, NULL), 0); /* it lives */
    uint32_t n[9];
    smoe_census(t.supervisor, n);
    CHECK_EQ(n[6], 3);
    CHECK_EQ(n[8], 3);
    CHECK_EQ(n[SMOE_FAILED], 1);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    smoe_participant_info who[8];
    CHECK_EQ(smoe_participants(t.supervisor, who, 8), 2);
    CHECK_EQ(who[0].alive, 0);
    if (recovered) {
        CHECK_EQ(smoe_recover(t.supervisor, 0, NULL), 1);
        CHECK_EQ(smoe_recover(t.supervisor, 0, NULL), 0);
    } else {
        CHECK_EQ(testring_client(&t)->id, 0); /* the next owner of the id cleans */
    }
    smoe_census(t.supervisor, n);
    CHECK_EQ(n[6], 0);
    CHECK_EQ(n[8], 0);
    CHECK_EQ(slot_word(t.supervisor, failed), 0);
    CHECK_EQ(n[SMOE_QUEUED], 2); /* they stay queued: somebody may come for them */
    testring_close(&t);
}

static void test_dead_client_recovered(void) {
    dead_client(true);
}

static void test_dead_client_followed(void) {
    dead_client(false);
}

/* --- forks ------------------------------------------------------------------------------------------ */

static smoe_hold held;
static const int64_t EXPERT = 3;

static int do_acquire(smoe_ring *r) {
    smoe_hold h;
    return smoe_acquire(r, 0, &EXPERT, 1, &h, 0, NULL);
}
static int do_acquire_default(smoe_ring *r) {
    smoe_hold h;
    return smoe_acquire(r, 0, &EXPERT, 1, &h, -1, NULL); /* the limit stands in the segment */
}
static int do_acquire_nowait(smoe_ring *r) {
    smoe_hold h;
    return smoe_acquire_nowait(r, 0, &EXPERT, 1, &h, NULL);
}
static int do_acquire_cold(smoe_ring *r) {
    smoe_hold h;
    return smoe_acquire_cold(r, 0, &EXPERT, 1, &h, 1, -1, NULL);
}
static int do_fetch(smoe_ring *r) {
    smoe_hold h;
    return smoe_fetch(r, 0, &EXPERT, 1, &h, 0, NULL);
}
static int do_fetch_default(smoe_ring *r) {
    smoe_hold h;
    return smoe_fetch(r, 0, &EXPERT, 1, &h, -1, NULL);
}
static int do_wait(smoe_ring *r) {
    return smoe_wait(r, &held, 1, -1, NULL);
}
static int do_wait_any(smoe_ring *r) {
    return smoe_wait_any(r, &held, 1, -1, NULL);
}
static int do_claim(smoe_ring *r) {
    smoe_hold h;
    return smoe_claim_specific(r, 0, EXPERT, &h, NULL);
}
static int do_speculate(smoe_ring *r) {
    return smoe_speculate(r, 0, &EXPERT, 1, NULL);
}
static int do_release(smoe_ring *r) {
    return smoe_release(r, &held, 1);
}
static int do_hold_again(smoe_ring *r) {
    smoe_hold h;
    return smoe_hold_again(r, &held, &h);
}
static int do_census(smoe_ring *r) {
    uint32_t n[9];
    return smoe_census(r, n);
}
static int do_info(smoe_ring *r) {
    smoe_info info;
    return smoe_get_info(r, &info);
}
static int do_participants(smoe_ring *r) {
    smoe_participant_info who[2];
    return smoe_participants(r, who, 2);
}

static int in_child(int (*call)(smoe_ring *), smoe_ring *r) {
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        int rc = call(r);
        smoe_detach(r); /* a finaliser does that: harmless */
        _exit(rc == SMOE_EFORKED ? 0 : 1);
    }
    int status;
    waitpid(pid, &status, 0);
    return status;
}

static void test_forked_handle(void) {
    static const struct {
        const char *name;
        int (*call)(smoe_ring *);
    } calls[] = {
        {"acquire", do_acquire},
        {"acquire with the ring's limit", do_acquire_default},
        {"acquire_nowait", do_acquire_nowait},
        {"acquire_cold", do_acquire_cold},
        {"fetch", do_fetch},
        {"fetch with the ring's limit", do_fetch_default},
        {"wait", do_wait},
        {"wait_any", do_wait_any},
        {"claim_specific", do_claim},
        {"speculate", do_speculate},
        {"release", do_release},
        {"hold_again", do_hold_again},
        {"census", do_census},
        {"get_info", do_info},
        {"ring_state", (int (*)(smoe_ring *))smoe_ring_state},
        {"participants", do_participants},
    };
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    held = acquire_ok(a, EXPERT);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (in_child(calls[i].call, a) != 0)
            test_fail(__FILE__, __LINE__, calls[i].name);
    CHECK_EQ(smoe_recover(t.supervisor, 0, NULL), 0); /* the parent is untouched by all of that */
    CHECK_EQ(WORD_HOLDERS(slot_word(a, held.slot)), a->bit);
    smoe_hold h;
    CHECK_EQ(smoe_hold_again(a, &held, &h), 0);
    CHECK_EQ(smoe_release(a, &h, 1), 1);
    testring_close(&t);
}

/* A child may attach for itself. */
static void test_child_attaches(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        smoe_ring *own;
        smoe_error e;
        smoe_hold h;
        bool ok = smoe_attach(t.name, SMOE_ROLE_CLIENT, 0, "child", &own, &e) == 0 && own->id != a->id &&
                  smoe_acquire(own, 0, &EXPERT, 1, &h, -1, &e) == 0 && smoe_release(own, &h, 1) == 1;
        if (ok)
            smoe_detach(own);
        _exit(ok ? 0 : 1);
    }
    int status;
    waitpid(pid, &status, 0);
    CHECK_EQ(status, 0);
    testring_close(&t);
}

/* A client forks and is killed; its child lives on and must not keep its locks. */
static void test_child_outlives(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        smoe_ring *r;
        smoe_error e;
        smoe_hold h;
        if (smoe_attach(t.name, SMOE_ROLE_CLIENT, 0, "parent", &r, &e) != 0 ||
            smoe_acquire(r, 0, &EXPERT, 1, &h, 0, &e) != 0)
            _exit(1);
        pid_t self = fork() == 0 ? getpid() : 0; /* the child tells, when its fork is over */
        if (self && write(ends[1], &self, sizeof self) != sizeof self)
            _exit(1);
        alarm(60); /* nobody's child is left over */
        for (;;)
            pause();
    }
    pid_t grandchild = -1;
    close(ends[1]);
    REQUIRE(read(ends[0], &grandchild, sizeof grandchild) == sizeof grandchild && grandchild > 0);
    close(ends[0]);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    CHECK_EQ(kill(grandchild, 0), 0);
    CHECK_EQ(smoe_recover(t.supervisor, 0, NULL), 1);
    uint32_t n[9];
    smoe_census(t.supervisor, n);
    CHECK_EQ(n[6], 0);
    CHECK_EQ(n[8], 0);
    kill(grandchild, SIGKILL);
    testring_close(&t);
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"a name that changes hands under the lock", test_lock_race},
        {"tables that do not add up are refused", test_refused_tables},
        {"geometry out of range is refused", test_refused_geometry},
        {"headers that are foreign, unfinished or ended", test_foreign_headers},
        {"segments of another size", test_foreign_sizes},
        {"names", test_names},
        {"clients map experts and tables read-only", test_read_only},
        {"a 33rd client", test_33rd_client},
        {"ids that are taken", test_taken_ids},
        {"queues of a ring that is adopted", test_adopted_queues},
        {"detaching frees everything", test_detach_frees},
        {"a dead client, recovered", test_dead_client_recovered},
        {"a dead client, followed by the next owner of its id", test_dead_client_followed},
        {"a handle in a forked child", test_forked_handle},
        {"a forked child attaches", test_child_attaches},
        {"a forked child outlives its parent", test_child_outlives},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
