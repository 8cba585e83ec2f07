/* test_failure.c: reads that fail, plans that are scribbled on, time limits, rings that end. */
#define _GNU_SOURCE
#include "testring.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct shape SMALL = {.layers = 2, .experts = 12, .slots = 6, .seed = 3};

static bool no_threads; /* there are none to be had */
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg) {
    return no_threads ? EAGAIN : __real_pthread_create(thread, attr, run, arg);
}

/* --- small steps ------------------------------------------------------------------------------------ */

static smoe_hold fetch_ok(struct testring *t, smoe_ring *r, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e;
    CHECK(smoe_fetch(r, 0, &expert, 1, &h, 60000, &e) >= 0);
    CHECK_EQ(h.status, SMOE_HOLD_RESIDENT);
    CHECK(testring_bytes_ok(t, r, &h));
    return h;
}

static smoe_hold acquire_ok(smoe_ring *r, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e;
    int rc = smoe_acquire(r, 0, &expert, 1, &h, 60000, &e);
    CHECK(rc == 0 || rc == 1);
    return h;
}

static void wait_fails(smoe_ring *r, smoe_hold *h, int64_t expert, int reason) {
    smoe_error e;
    CHECK_EQ(smoe_wait(r, h, 1, 60000, &e), SMOE_EREAD);
    CHECK_EQ(h->status, SMOE_HOLD_NONE);
    CHECK_EQ(e.code, SMOE_EREAD);
    CHECK_EQ(e.os_error, reason);
    CHECK_EQ(e.layer, 0);
    CHECK_EQ(e.expert, expert);
}

/* A slot that a dead worker was reading: whoever demands the expert joins, and no worker takes it until
 * requeue() does what recovery would. */
static void stuck_read(smoe_ring *r, uint32_t s, uint32_t expert) {
    atomic_store(&r->words[s], word_make(SMOE_READING, 0, 126, expert, 0));
    atomic_store(&r->homes[expert], s + 1);
}

static void requeue(smoe_ring *r, uint32_t s) {
    uint64_t w = slot_word(r, s);
    atomic_store(&r->words[s], word_make(SMOE_QUEUED, 0, 0, WORD_EXPERT(w), WORD_HOLDERS(w)));
    CHECK(queue_push(demand_queue(r), s));
    doorbell_ring(r, 0);
}

static uint32_t state_of(const smoe_ring *r, uint32_t s) {
    return WORD_STATE(slot_word(r, s));
}

/* The expert's files are no longer the ring's; and are again. */
static void break_files(struct testring *t) {
    for (uint32_t f = 0; f < t->geometry.n_files; f++)
        testring_touch(t, f, true);
}

static void repair_files(struct testring *t) {
    for (uint32_t f = 0; f < t->geometry.n_files; f++)
        testring_touch(t, f, false);
}

/* A worker that has opened all files: it has served something. */
static void start_served(struct testring *t, smoe_ring *r) {
    testring_start(t, 1);
    smoe_hold h = fetch_ok(t, r, 11);
    smoe_release(r, &h, 1);
}

/* --- errors reach whoever waits --------------------------------------------------------------------- */

static void test_every_waiter(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *c[3];
    smoe_hold h[3], twice;
    for (int i = 0; i < 3; i++)
        c[i] = testring_client(&t);
    start_served(&t, c[0]);
    stuck_read(c[0], 3, 5);
    for (int i = 0; i < 3; i++)
        h[i] = acquire_ok(c[i], 5);
    twice = acquire_ok(c[2], 5); /* a second thread of one client is a waiter as well */
    break_files(&t);
    requeue(c[0], 3);
    for (int i = 0; i < 3; i++) {
        wait_fails(c[i], &h[i], 5, SMOE_READ_CHANGED);
        CHECK_EQ(state_of(c[0], 3), SMOE_FAILED);
    }
    CHECK_EQ(WORD_HOLDERS(slot_word(c[0], 3)), c[2]->bit);
    wait_fails(c[2], &twice, 5, SMOE_READ_CHANGED);
    CHECK_EQ(slot_word(c[0], 3), 0); /* the last holder has emptied it */
    CHECK_EQ(testring_counter(&t, SMOE_C_READ_ERRORS), 4);
    CHECK_EQ(testring_counter(&t, SMOE_C_FAILED_READS), 1);
    repair_files(&t);
    h[0] = fetch_ok(&t, c[0], 5);
    smoe_release(c[0], &h[0], 1);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_truncated(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.files = 1;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    smoe_hold h[2];
    smoe_error e;
    start_served(&t, a);
    REQUIRE(truncate(t.files[0].path, (off_t)(t.files[0].bytes / 2)) == 0);
    const int64_t experts[] = {0, 10}; /* before and behind the cut: nothing of a changed file is published */
    for (int i = 0; i < 2; i++) {
        h[i] = acquire_ok(a, experts[i]);
        CHECK_EQ(smoe_wait(a, &h[i], 1, 60000, &e), SMOE_EREAD);
        CHECK(e.os_error == SMOE_READ_CHANGED || (i == 1 && e.os_error == SMOE_READ_SHORT));
        CHECK_EQ(e.file, 0);
    }
    CHECK_EQ(smoe_fetch(a, 0, experts, 2, h, 60000, &e), SMOE_EREAD);
    CHECK(h[0].status == SMOE_HOLD_NONE && h[1].status == SMOE_HOLD_NONE);
    testring_settle(&t); /* the first one's error has ended it; the second may still be queued */
    testring_stop(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* Failed, and not all holders have seen it; the next demand tries again, for all of them. */
static void test_retry(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    smoe_error e;
    start_served(&t, a);
    break_files(&t);
    smoe_hold x = acquire_ok(a, 5), y;
    UNTIL(state_of(a, x.slot) == SMOE_FAILED);
    CHECK_EQ(smoe_claim_specific(b, 0, 5, &y, &e), 0);
    const int64_t five = 5;
    CHECK_EQ(smoe_speculate(b, 0, &five, 1, &e), 0); /* a guess leaves it alone */
    CHECK_EQ(state_of(a, x.slot), SMOE_FAILED);
    repair_files(&t);
    y = fetch_ok(&t, b, 5);
    CHECK_EQ(y.slot, x.slot);
    CHECK_EQ(smoe_wait(a, &x, 1, 60000, &e), 0);
    CHECK(testring_bytes_ok(&t, a, &x));
    CHECK_EQ(smoe_release(a, &x, 1), 1);
    CHECK_EQ(smoe_release(b, &y, 1), 1);
    testring_check_quiet(&t);
    testring_close(&t);
}

struct retrier {
    smoe_ring *ring;
    pthread_t thread;
};

static void *fail_again_and_again(void *arg) {
    struct retrier *a = arg;
    const int64_t five = 5;
    for (int i = 0; i < 300; i++) {
        smoe_hold h;
        smoe_error e;
        CHECK_EQ(smoe_fetch(a->ring, 0, &five, 1, &h, 60000, &e), SMOE_EREAD);
        CHECK_EQ(e.os_error, SMOE_READ_CHANGED);
        CHECK_EQ(e.expert, 5);
        CHECK_EQ(h.status, SMOE_HOLD_NONE);
    }
    return NULL;
}

/* One reads the error while another has it tried again and a worker writes the next. */
static void test_failing_together(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    struct retrier a[4];
    for (int i = 0; i < 4; i++)
        a[i].ring = i % 2 ? a[i - 1].ring : testring_client(&t);
    start_served(&t, a[0].ring);
    break_files(&t);
    for (int i = 0; i < 4; i++)
        REQUIRE(pthread_create(&a[i].thread, NULL, fail_again_and_again, &a[i]) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(a[i].thread, NULL);
    repair_files(&t);
    testring_stop(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* A holder that goes without having looked empties it too; and a FAILED slot is nobody's victim. */
static void test_failed_is_left_alone(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t), *b = testring_client(&t);
    start_served(&t, a);
    break_files(&t);
    smoe_hold x = acquire_ok(a, 5), y = acquire_ok(b, 6), h;
    UNTIL(state_of(a, x.slot) == SMOE_FAILED && state_of(a, y.slot) == SMOE_FAILED);
    repair_files(&t);
    for (int64_t i = 0; i < 5; i++) {
        h = fetch_ok(&t, a, i);
        CHECK(h.slot != x.slot && h.slot != y.slot);
        CHECK_EQ(smoe_release(a, &h, 1), 1);
    }
    CHECK_EQ(smoe_release(a, &x, 1), 1);
    CHECK_EQ(slot_word(a, x.slot), 0);
    testring_detach(&t, b);
    CHECK_EQ(slot_word(a, y.slot), 0);
    testring_stop(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_nobody_waits(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    start_served(&t, a);
    break_files(&t);
    const int64_t five = 5;
    CHECK_EQ(smoe_speculate(a, 0, &five, 1, &e), 1);
    UNTIL(testring_counter(&t, SMOE_C_FAILED_READS) == 1);
    testring_stop(&t);
    testring_check_quiet(&t); /* EMPTY, not FAILED for ever */
    testring_close(&t);
}

static void test_wait_any_fails(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    smoe_hold h[3];
    start_served(&t, a);
    stuck_read(a, 4, 0);
    break_files(&t);
    h[0] = acquire_ok(a, 0);
    h[1] = acquire_ok(a, 5);
    h[2] = acquire_ok(a, 6);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(smoe_wait_any(a, h, 3, 60000, &e), SMOE_EREAD);
        CHECK_EQ(e.os_error, SMOE_READ_CHANGED);
    }
    CHECK_EQ(h[0].status, SMOE_HOLD_LOADING);
    CHECK(h[1].status == SMOE_HOLD_NONE && h[2].status == SMOE_HOLD_NONE);
    repair_files(&t);
    requeue(a, 4);
    CHECK_EQ(smoe_wait_any(a, h, 3, 60000, &e), 0);
    CHECK(testring_bytes_ok(&t, a, &h[0]));
    CHECK_EQ(smoe_release(a, h, 3), 1);
    testring_stop(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void test_changed_before_start(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    testring_touch(&t, 1, true);
    struct test_worker *w = &t.workers[0];
    testring_start(&t, 1);
    pthread_join(w->thread, NULL);
    t.n_workers = 0;
    CHECK_EQ(w->rc, SMOE_EREAD);
    CHECK_EQ(w->error.os_error, SMOE_READ_CHANGED);
    CHECK_EQ(w->error.file, 1);
    testring_close(&t);
}

/* A worker that cannot watch for the supervisor's end says so. */
static void test_no_watcher(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *r = testring_attach(&t, SMOE_ROLE_WORKER, 0);
    const volatile int stop = 1;
    const struct worker_options options = {.watch_fd = 0, .ready_fd = -1, .stop = &stop};
    smoe_error e = {0};
    no_threads = true;
    errno = 0;
    CHECK_EQ(worker_run(r, &options, &e), -EAGAIN);
    no_threads = false;
    CHECK_EQ(e.os_error, EAGAIN);
    testring_close(&t);
}

/* --- how files are read ----------------------------------------------------------------------------- */

static void test_modes(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_hold h;
    const int modes[] = {SMOE_MODE_UNKNOWN, SMOE_MODE_DIRECT, SMOE_MODE_BUFFERED, SMOE_MODE_BOUNCE, SMOE_MODE_MEMORY};
    for (int i = 0; i < 5; i++) {
        for (uint32_t f = 0; f < t.geometry.n_files; f++)
            smoe_set_file_mode(t.supervisor, f, modes[i], 0);
        if (i == 0)
            testring_start(&t, 1); /* the others are switched under a running worker */
        memset(t.data, 0x5A, t.data_bytes);
        for (int64_t x = 0; x < 12; x++) {
            h = fetch_ok(&t, a, x);
            CHECK_EQ(smoe_release(a, &h, 1), 1);
        }
        if (i)
            CHECK_EQ(smoe_file_mode(a, 0), modes[i]);
    }
    testring_check_quiet(&t);
    testring_close(&t);
}

/* A worker as a process: what may end in a crash must not be a thread of the test. */
static pid_t worker_process(const struct testring *t, uint32_t id) {
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid > 0)
        return pid;
    static volatile int stop;
    const struct worker_options options = {.watch_fd = -1, .ready_fd = -1, .stop = &stop};
    smoe_ring *r;
    smoe_error e;
    alarm(60);
    if (smoe_attach(t->name, SMOE_ROLE_WORKER, id, "child", &r, &e) != 0)
        _exit(9);
    _exit(worker_run(r, &options, &e) == 0 ? 0 : 8);
}

/* A client can write any number over a file's mode; no worker may loop or crash on it. */
static void test_scribbled_mode(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    for (uint32_t f = 0; f < t.geometry.n_files; f++)
        atomic_store(&a->file_modes[f], 99);
    pid_t worker = worker_process(&t, 0);
    smoe_hold h = {0};
    smoe_error e;
    const int64_t three = 3;
    CHECK_EQ(smoe_fetch(a, 0, &three, 1, &h, 10000, &e), 0);
    if (h.status == SMOE_HOLD_RESIDENT)
        CHECK(testring_bytes_ok(&t, a, &h));
    int status;
    CHECK_EQ(waitpid(worker, &status, WNOHANG), 0); /* it lives */
    kill(worker, SIGKILL);
    waitpid(worker, &status, 0);
    testring_close(&t);
}

/* --- scribbled plans -------------------------------------------------------------------------------- */

struct scribble {
    const char *what;
    void *field; /* in the tables that are mapped */
    size_t bytes;
    uint64_t value;
    int reason;
};

static void scribble(const struct scribble *s, uint64_t *old) {
    memcpy(old, s->field, s->bytes);
    memcpy(s->field, &s->value, s->bytes);
}

/* Fetching expert x under the scribble fails and changes nothing outside its slot. */
static void fails_in_its_slot(struct testring *t, smoe_ring *a, uint32_t x, const struct scribble *s) {
    uint64_t old = 0, slot_bytes = t->geometry.slot_bytes;
    int before = test_failures();
    memset(t->data, 0xA5, t->data_bytes);
    scribble(s, &old);
    smoe_hold h = acquire_ok(a, x);
    uint32_t slot = h.slot;
    wait_fails(a, &h, x, s->reason);
    memcpy(s->field, &old, s->bytes);
    for (uint64_t i = 0; i < t->data_bytes; i++)
        if (i / slot_bytes != slot && t->data[i] != 0xA5) {
            CHECK(!"a byte outside the slot was written");
            break;
        }
    if (test_failures() != before)
        test_fail(__FILE__, __LINE__, s->what);
}

/* An expert with a move and two windows at least. */
static uint32_t pick_expert(const struct testring *t) {
    for (uint32_t x = 0; x < t->shape.experts; x++)
        if (t->experts[x].n_moves && t->experts[x].n_windows > 1)
            return x;
    REQUIRE(!"an expert with a move and two windows");
    return 0;
}

static void test_scribbled_plans(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.experts = 40;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    uint32_t x = pick_expert(&t);
    struct smoe_expert_rec *e = testring_expert(&t, x);
    struct smoe_window_rec *w = testring_window(&t, x, 0), *w2 = testring_window(&t, x, 1);
    const struct smoe_header *h = (const struct smoe_header *)t.control;
    struct smoe_move_rec *m = (struct smoe_move_rec *)(t.control + h->off_moves) + e->first_move;
    uint64_t slot = t.geometry.slot_bytes;
    const struct scribble scribbles[] = {
        {"first window", &e->first_window, 4, t.geometry.n_windows, SMOE_READ_PLAN},
        {"first window, far", &e->first_window, 4, UINT32_MAX, SMOE_READ_PLAN},
        {"windows", &e->n_windows, 4, UINT32_MAX, SMOE_READ_PLAN},
        {"first move", &e->first_move, 4, t.geometry.n_moves, SMOE_READ_PLAN},
        {"moves", &e->n_moves, 4, UINT32_MAX, SMOE_READ_PLAN},
        {"place", &w->slot_offset, 8, slot, SMOE_READ_PLAN},
        {"place, one block over the end", &w->slot_offset, 8, slot - w->length + 4096, SMOE_READ_PLAN},
        {"place, overflow", &w->slot_offset, 8, (uint64_t)-4096, SMOE_READ_PLAN},
        {"place of the second", &w2->slot_offset, 8, slot, SMOE_READ_PLAN},
        {"length", &w->length, 8, slot + 4096, SMOE_READ_PLAN},
        {"length, overflow", &w->length, 8, (uint64_t)-4096, SMOE_READ_PLAN},
        {"need", &w->need, 8, w->length + 1, SMOE_READ_PLAN},
        {"file", &w->file, 4, t.geometry.n_files, SMOE_READ_PLAN},
        {"file, far", &w->file, 4, UINT32_MAX, SMOE_READ_PLAN},
        {"move from", &m->from, 8, slot - m->bytes + 1, SMOE_READ_PLAN},
        {"move to", &m->to, 8, slot, SMOE_READ_PLAN},
        {"move to, overflow", &m->to, 8, UINT64_MAX, SMOE_READ_PLAN},
        {"move bytes", &m->bytes, 8, slot, SMOE_READ_PLAN},
        {"move bytes, overflow", &m->bytes, 8, UINT64_MAX, SMOE_READ_PLAN},
        {"file offset behind the end", &w->file_offset, 8, 1ull << 30, SMOE_READ_PLAN},
        {"file offset, overflow", &w->file_offset, 8, (uint64_t)-4096, SMOE_READ_PLAN},
        {"file offset, not aligned", &w->file_offset, 8, w->file_offset + 1, SMOE_READ_PLAN},
        {"length, not aligned", &w->length, 8, w->length - 1, SMOE_READ_PLAN},
        {"place, not aligned", &w->slot_offset, 8, 512, SMOE_READ_PLAN},
        {"need nothing", &w->need, 8, 0, SMOE_READ_PLAN},
        {"windows of others as well", &e->n_windows, 4, t.geometry.n_windows - e->first_window, SMOE_READ_PLAN},
    };
    testring_start(&t, 1);
    for (size_t i = 0; i < sizeof scribbles / sizeof *scribbles; i++)
        fails_in_its_slot(&t, a, x, &scribbles[i]);
    smoe_hold held = fetch_ok(&t, a, x); /* all is as it was */
    CHECK_EQ(smoe_release(a, &held, 1), 1);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* A plan without windows reads nothing: there is nothing to publish. */
static void test_scribbled_to_nothing(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    struct smoe_expert_rec *e = testring_expert(&t, 3);
    const struct scribble nothing = {"no windows", &e->n_windows, 4, 0, SMOE_READ_PLAN};
    e->n_moves = 0;
    testring_start(&t, 1);
    fails_in_its_slot(&t, a, 3, &nothing);
    testring_close(&t);
}

/* A file that ends in the middle of a window that is being read: offset, wanted and got say so, in every mode. */
static void test_short(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    const struct smoe_window_rec w = *testring_window(&t, 3, 0);
    struct test_file *f = &t.files[w.file];
    const int modes[] = {SMOE_MODE_DIRECT, SMOE_MODE_BUFFERED, SMOE_MODE_BOUNCE, SMOE_MODE_MEMORY};
    for (int i = 0; i < 4; i++) {
        smoe_error e;
        smoe_hold h;
        const int64_t three = 3;
        smoe_set_file_mode(t.supervisor, w.file, modes[i], 0);
        testring_start(&t, 1);
        h = fetch_ok(&t, a, 4 + i); /* not there yet: the worker is, and has the files open */
        CHECK_EQ(smoe_release(a, &h, 1), 1);
        REQUIRE(truncate(f->path, (off_t)(w.file_offset + 131)) == 0);
        CHECK_EQ(smoe_fetch(a, 0, &three, 1, &h, 60000, &e), SMOE_EREAD);
        /* What is left of a direct read is read through the cache, by a descriptor of its own. */
        CHECK_EQ(e.os_error,
                 smoe_file_mode(t.supervisor, w.file) == SMOE_MODE_DIRECT ? SMOE_READ_CHANGED : SMOE_READ_SHORT);
        CHECK_EQ(e.file, w.file);
        CHECK_EQ(e.offset, w.file_offset);
        CHECK_EQ(e.wanted, w.need);
        CHECK_EQ(e.got, 131);
        testring_stop(&t);
        int fd = open(f->path, O_WRONLY | O_CLOEXEC);
        REQUIRE(fd >= 0 && pwrite(fd, f->content, f->bytes, 0) == (ssize_t)f->bytes);
        close(fd);
        testring_touch(&t, w.file, false);
    }
    testring_check_quiet(&t);
    testring_close(&t);
}

/* An expert number in a slot word that is out of range: the worker fails the read and goes on. */
static void test_scribbled_word(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    atomic_store(&a->words[2], word_make(SMOE_QUEUED, 0, 0, SMOE_EXPERTS_MAX, 0));
    queue_push(demand_queue(a), 2);
    testring_start(&t, 1);
    UNTIL(testring_counter(&t, SMOE_C_FAILED_READS) == 1);
    smoe_hold h = fetch_ok(&t, a, 3);
    CHECK_EQ(smoe_release(a, &h, 1), 1);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* --- time limits ------------------------------------------------------------------------------------ */

static void test_timeouts(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    smoe_hold h = acquire_ok(a, 3), other = acquire_ok(a, 4);
    CHECK_EQ(smoe_wait(a, &h, 1, 1, &e), SMOE_ETIMEOUT);
    CHECK_EQ(h.status, SMOE_HOLD_NONE);
    CHECK_EQ(e.expert, 3);
    CHECK_EQ(e.got, SMOE_QUEUED);
    CHECK_EQ(WORD_HOLDERS(slot_word(a, h.slot)), 0);
    CHECK_EQ(smoe_wait_any(a, &other, 1, 1, &e), SMOE_ETIMEOUT);
    CHECK_EQ(other.status, SMOE_HOLD_NONE);
    testring_detach_supervisor(&t);
    h = acquire_ok(a, 3);
    CHECK_EQ(smoe_wait(a, &h, 1, 1, &e), SMOE_ENOSUPERVISOR);
    const int64_t five = 5;
    CHECK_EQ(smoe_fetch(a, 0, &five, 1, &h, 1, &e), SMOE_ENOSUPERVISOR);
    CHECK_EQ(h.status, SMOE_HOLD_NONE);
    uint32_t n[9];
    smoe_census(a, n);
    CHECK_EQ(n[8], 0);
    testring_close(&t);
}

/* A read that passes the ring's own deadline: its waiters go, the slot stays READING until it lands. */
static void test_read_deadline(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.deadline_ms = 30;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    smoe_hold h = acquire_ok(a, 3);
    uint64_t word;
    CHECK(slot_start(a, h.slot, 126, &word));
    atomic_store(&a->slots[h.slot].read_started_ns, smoe_now_ns());
    CHECK_EQ(smoe_wait(a, &h, 1, -1, &e), SMOE_ETIMEOUT);
    CHECK_EQ(e.got, SMOE_READING);
    CHECK_EQ(e.offset, 126); /* the worker */
    CHECK_EQ(slot_word(a, h.slot), word_make(SMOE_READING, 0, 126, 3, 0));
    slot_publish(a, h.slot, 126);
    CHECK_EQ(slot_word(a, h.slot), word_make(SMOE_READY, 0, 0, 3, 0));
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &h, &e), 1);
    CHECK_EQ(smoe_release(a, &h, 1), 1);
    queue_pop(demand_queue(a));
    testring_check_quiet(&t);
    testring_close(&t);
}

/* A queued read's deadline counts from the last landing, but from none that somebody wrote into the future. */
static void test_read_deadline_queued(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.deadline_ms = 30;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    const uint64_t landed[] = {smoe_now_ns(), UINT64_MAX, (uint64_t)INT64_MAX};
    for (int i = 0; i < 3; i++) {
        smoe_error e;
        smoe_hold h = acquire_ok(a, 3);
        atomic_store(&a->hot->landed_ns, landed[i]);
        CHECK_EQ(smoe_wait(a, &h, 1, -1, &e), SMOE_ETIMEOUT);
        CHECK_EQ(e.got, SMOE_QUEUED);
    }
    testring_close(&t);
}

/* A ring that names no read deadline, or one that no configuration gives, has one all the same. */
static void test_no_read_deadline(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    smoe_hold h = acquire_ok(a, 3);
    uint64_t word;
    const uint32_t none[] = {0, UINT32_MAX};
    CHECK(slot_start(a, h.slot, 126, &word));
    atomic_store(&a->slots[h.slot].read_started_ns, 1);
    for (int i = 0; i < 2; i++) {
        a->header->read_deadline_ms = none[i];
        smoe_hold again = h;
        CHECK_EQ(smoe_hold_again(a, &h, &again), 0);
        CHECK_EQ(smoe_wait(a, &again, 1, -1, &e), SMOE_ETIMEOUT);
        CHECK_EQ(e.got, SMOE_READING);
    }
    testring_close(&t);
}

struct demander {
    smoe_ring *ring;
    smoe_hold hold;
    int rc;
    smoe_error error;
};

static void *acquire_in_thread(void *arg) {
    struct demander *d = arg;
    const int64_t five = 5;
    d->rc = smoe_acquire(d->ring, 0, &five, 1, &d->hold, 60000, &d->error);
    return NULL;
}

/* Room by reservation, but every slot is being read for nobody: wait for one, at most so long. */
static void test_no_slot_for_a_moment(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 2;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    smoe_hold h;
    const int64_t five = 5;
    stuck_read(a, 0, 0);
    stuck_read(a, 1, 1);
    atomic_store(&a->empties[0], 0);
    CHECK_EQ(smoe_acquire(a, 0, &five, 1, &h, 1, &e), SMOE_ETIMEOUT);
    uint32_t n[9];
    smoe_census(a, n);
    CHECK_EQ(n[8], 0);
    struct demander d = {.ring = a};
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, acquire_in_thread, &d) == 0);
    UNTIL(atomic_load(&a->hot->space_wanted));
    slot_publish(a, 1, 126);
    space_freed(a);
    pthread_join(thread, NULL);
    CHECK_EQ(d.rc, 0);
    CHECK_EQ(d.hold.slot, 1);
    CHECK_EQ(smoe_release(a, &d.hold, 1), 1);
    testring_close(&t);
}

/* --- rings that end --------------------------------------------------------------------------------- */

static void test_stopping(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    smoe_hold h = acquire_ok(a, 3), c;
    const int64_t five = 5;
    smoe_set_state(t.supervisor, SMOE_STOPPING);
    CHECK_EQ(smoe_acquire(a, 0, &five, 1, &c, 0, &e), SMOE_ESTOPPING);
    CHECK_EQ(smoe_fetch(a, 0, &five, 1, &c, 0, &e), SMOE_ESTOPPING);
    CHECK_EQ(smoe_speculate(a, 0, &five, 1, &e), SMOE_ESTOPPING);
    testring_start(&t, 1); /* reads that were demanded finish */
    CHECK_EQ(smoe_wait(a, &h, 1, 60000, &e), 0);
    CHECK(testring_bytes_ok(&t, a, &h));
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &c, &e), 1);
    CHECK_EQ(smoe_release(a, &c, 1), 1);
    CHECK_EQ(smoe_release(a, &h, 1), 1);
    testring_stop(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

static void *wait_in_thread(void *arg) {
    struct demander *d = arg;
    d->rc = smoe_wait(d->ring, &d->hold, 1, -1, &d->error);
    return NULL;
}

static void test_gone(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    struct demander d = {.ring = a, .hold = acquire_ok(a, 3)};
    smoe_error e;
    smoe_hold c;
    const int64_t five = 5;
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, wait_in_thread, &d) == 0);
    CHECK_EQ(smoe_bury(t.name), 0);
    pthread_join(thread, NULL);
    CHECK_EQ(d.rc, SMOE_EGONE);
    CHECK_EQ(smoe_ring_state(a), SMOE_GONE);
    CHECK_EQ(smoe_acquire(a, 0, &five, 1, &c, 0, &e), SMOE_EGONE);
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &c, &e), SMOE_EGONE);
    CHECK_EQ(smoe_speculate(a, 0, &five, 1, &e), SMOE_EGONE);
    CHECK_EQ(smoe_wait_any(a, &d.hold, 1, -1, &e), SMOE_EGONE);
    CHECK_EQ(smoe_release(a, &d.hold, 1), 1); /* what is held of it is given up all the same */
    CHECK_EQ(WORD_HOLDERS(slot_word(a, d.hold.slot)), 0);
    testring_close(&t);
}

/* A source file changed: whoever wants bytes that it does not hold is told, and a waiter at once. */
static void test_stale(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    smoe_hold c, resident = acquire_ok(a, 1);
    const int64_t one = 1, five = 5;
    testring_start(&t, 1);
    CHECK_EQ(smoe_wait(a, &resident, 1, 60000, &e), 0);
    testring_stop(&t);
    struct demander d = {.ring = a, .hold = acquire_ok(a, 3)};
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, wait_in_thread, &d) == 0);
    CHECK_EQ(smoe_set_changed(t.supervisor, a->n_files, SMOE_CHANGED_SIZE), -EINVAL);
    CHECK_EQ(smoe_set_changed(t.supervisor, 0, 0), -EINVAL);
    CHECK_EQ(smoe_ring_state(a), SMOE_LIVE);
    CHECK_EQ(smoe_set_changed(t.supervisor, 0, SMOE_CHANGED_SIZE | SMOE_CHANGED_MTIME), 0);
    pthread_join(thread, NULL);
    CHECK_EQ(d.rc, SMOE_ECHANGED);
    CHECK_EQ(d.error.got, SMOE_CHANGED_SIZE | SMOE_CHANGED_MTIME);
    CHECK_EQ(smoe_ring_state(a), SMOE_STALE);
    CHECK_EQ(smoe_acquire(a, 0, &five, 1, &c, 0, &e), SMOE_ECHANGED);
    CHECK_EQ(e.file, 0);
    CHECK_EQ(smoe_fetch(a, 0, &one, 1, &c, 0, &e), SMOE_ECHANGED); /* a hit, too */
    CHECK_EQ(smoe_claim_specific(a, 0, 1, &c, &e), SMOE_ECHANGED);
    CHECK_EQ(smoe_speculate(a, 0, &five, 1, &e), SMOE_ECHANGED);
    CHECK_EQ(smoe_wait_any(a, &d.hold, 1, -1, &e), SMOE_ECHANGED);
    CHECK(testring_bytes_ok(&t, a, &resident)); /* what is held stays */
    smoe_ring *late = testring_client(&t);      /* a new client attaches, and is told why */
    CHECK_EQ(smoe_acquire(late, 0, &one, 1, &c, 0, &e), SMOE_ECHANGED);
    testring_start(&t, 1); /* a worker goes on: it is not its death that is wanted */
    while (!word_resident(slot_word(a, d.hold.slot)))
        plat_relax();
    CHECK_EQ(smoe_release(a, &d.hold, 1), 1);
    CHECK_EQ(smoe_release(a, &resident, 1), 1);
    testring_stop(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* A client whose lock descriptor was closed under it (closefrom): judged dead, and told so. */
static void test_lease_lost(void) {
    struct testring t;
    testring_open(&t, &SMALL);
    smoe_ring *a = testring_client(&t);
    smoe_error e;
    smoe_hold h = acquire_ok(a, 3), c;
    const int64_t five = 5;
    CHECK_EQ(smoe_busy(a, 1), 1);
    close(a->lock_fd);
    a->lock_fd = -1;
    CHECK_EQ(smoe_recover(t.supervisor, 0, NULL), 1);
    CHECK_EQ(WORD_HOLDERS(slot_word(a, h.slot)), 0);
    CHECK_EQ(smoe_busy_clients(a), 0);
    smoe_ring *b = testring_client(&t);
    CHECK_EQ(b->id, a->id);
    CHECK_EQ(smoe_busy(b, 1), 1);
    int64_t bell = smoe_prewarm_get(b, SMOE_PREWARM_BELL);
    CHECK_EQ(smoe_busy(a, 0), SMOE_ELEASE);
    CHECK_EQ(smoe_busy_clients(b), 1u << b->id);
    CHECK_EQ(smoe_prewarm_get(b, SMOE_PREWARM_BELL), bell);
    CHECK_EQ(smoe_busy(b, 0), 0);
    CHECK_EQ(smoe_busy(a, 1), SMOE_ELEASE);
    CHECK_EQ(smoe_busy_clients(b), 0);
    smoe_hold x = acquire_ok(b, 3);
    CHECK_EQ(smoe_acquire(a, 0, &five, 1, &c, 0, &e), SMOE_ELEASE);
    CHECK_EQ(smoe_claim_specific(a, 0, 3, &c, &e), SMOE_ELEASE);
    CHECK_EQ(smoe_speculate(a, 0, &five, 1, &e), SMOE_ELEASE);
    CHECK_EQ(smoe_wait(a, &h, 1, 0, &e), SMOE_ELEASE);
    CHECK_EQ(smoe_hold_again(a, &h, &c), SMOE_ELEASE);
    CHECK_EQ(c.status, SMOE_HOLD_NONE);
    CHECK_EQ(smoe_release(a, &h, 1), SMOE_ELEASE);
    testring_detach(&t, a);
    CHECK_EQ(WORD_HOLDERS(slot_word(b, x.slot)), b->bit); /* not its to clear */
    CHECK_EQ(smoe_release(b, &x, 1), 1);
    queue_pop(demand_queue(b));
    testring_close(&t);
}

/* The same while an acquire waits for a slot, its reservation made: that is taken back once, not twice. */
static void test_lease_lost_in_acquire(void) {
    struct testring t;
    struct shape shape = SMALL;
    shape.slots = 2;
    testring_open(&t, &shape);
    smoe_ring *a = testring_client(&t);
    struct demander d = {.ring = a};
    pthread_t thread;
    stuck_read(a, 0, 0);
    stuck_read(a, 1, 1);
    atomic_store(&a->empties[0], 0);
    REQUIRE(pthread_create(&thread, NULL, acquire_in_thread, &d) == 0);
    UNTIL(atomic_load(&a->hot->space_wanted));
    close(a->lock_fd);
    a->lock_fd = -1;
    CHECK_EQ(smoe_recover(t.supervisor, 0, NULL), 1);
    pthread_join(thread, NULL);
    CHECK_EQ(d.rc, SMOE_ELEASE);
    uint32_t n[9];
    smoe_census(t.supervisor, n);
    CHECK_EQ(n[8], 0);
    testring_close(&t);
}

/* --- checksums ---------------------------------------------------------------------------------------- */

static void open_with_sums(struct testring *t) {
    testring_open(t, &SMALL);
    for (uint32_t x = 0; x < t->geometry.n_experts; x++)
        testring_expert(t, x)->crc32c = smoe_crc32c(0, t->expected[x], t->experts[x].bytes);
    t->supervisor->header->verify = 1;
}

static smoe_error fetch_fails(smoe_ring *r, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e = {0};
    CHECK_EQ(smoe_fetch(r, 0, &expert, 1, &h, 60000, &e), SMOE_EREAD);
    CHECK_EQ(h.status, SMOE_HOLD_NONE);
    CHECK_EQ(e.expert, expert);
    return e;
}

/* Of one part and of three, moved ones too; what has no sum is published unchecked. */
static void test_right_sums(void) {
    struct testring t;
    open_with_sums(&t);
    smoe_ring *a = testring_client(&t);
    testring_expert(&t, 4)->crc32c = 0;
    testring_start(&t, 2);
    for (int64_t x = 0; x < SMALL.experts; x++) {
        smoe_hold h = fetch_ok(&t, a, x);
        smoe_release(a, &h, 1);
    }
    CHECK_EQ(testring_counter(&t, SMOE_C_CHECKED), SMALL.experts - 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_BAD_SUMS), 0);
    testring_close(&t);
}

/* Only that demand fails, with both sums; hits and other experts go on; and only where the ring says so. */
static void test_wrong_sum(void) {
    struct testring t;
    open_with_sums(&t);
    smoe_ring *a = testring_client(&t);
    uint32_t right = testring_expert(&t, 5)->crc32c;
    testring_expert(&t, 5)->crc32c = right ^ 1;
    start_served(&t, a);
    for (int turn = 0; turn < 2; turn++) {
        smoe_error e = fetch_fails(a, 5);
        CHECK_EQ(e.os_error, SMOE_READ_CHECKSUM);
        CHECK_EQ(e.wanted, right ^ 1);
        CHECK_EQ(e.got, right);
        CHECK_EQ(e.file, t.parts[t.experts[5].first_part].file);
        CHECK_EQ(e.offset, t.parts[t.experts[5].first_part].file_offset);
    }
    smoe_hold h = fetch_ok(&t, a, 11);
    CHECK_EQ(h.hit, 1);
    smoe_release(a, &h, 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_CHECKED), 3);
    CHECK_EQ(testring_counter(&t, SMOE_C_BAD_SUMS), 2);
    CHECK_EQ(testring_counter(&t, SMOE_C_FAILED_READS), 2);
    t.supervisor->header->verify = 0;
    h = fetch_ok(&t, a, 5);
    smoe_release(a, &h, 1);
    CHECK_EQ(testring_counter(&t, SMOE_C_CHECKED), 3);
    testring_settle(&t);
    testring_check_quiet(&t);
    testring_close(&t);
}

/* The worker reads nothing by a scribbled table that is not the slot's. */
static void test_sum_over_scribbled_parts(void) {
    struct testring t;
    open_with_sums(&t);
    smoe_ring *a = testring_client(&t);
    struct smoe_expert_rec *x = testring_expert(&t, 3);
    start_served(&t, a);
    const struct smoe_expert_rec was = *x;
    const struct smoe_expert_rec bad[] = {
        {.first_part = t.geometry.n_parts, .n_parts = 1},
        {.first_part = UINT32_MAX, .n_parts = 1},
        {.first_part = 0, .n_parts = 0},
        {.first_part = 0, .n_parts = UINT32_MAX},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        x->first_part = bad[i].first_part;
        x->n_parts = bad[i].n_parts;
        CHECK_EQ(fetch_fails(a, 3).os_error, SMOE_READ_PLAN);
    }
    *x = was;
    struct smoe_part_rec *p = (struct smoe_part_rec *)(t.control + t.supervisor->header->off_parts) + x->first_part;
    const struct smoe_part_rec part_was = *p;
    p->slot_offset = UINT64_MAX;
    CHECK_EQ(fetch_fails(a, 3).os_error, SMOE_READ_PLAN);
    *p = part_was;
    p->bytes = t.geometry.slot_bytes + 1;
    CHECK_EQ(fetch_fails(a, 3).os_error, SMOE_READ_PLAN);
    *p = part_was;
    p->file = t.geometry.n_files;
    CHECK_EQ(fetch_fails(a, 3).os_error, SMOE_READ_PLAN);
    *p = part_was;
    smoe_hold h = fetch_ok(&t, a, 3);
    smoe_release(a, &h, 1);
    testring_close(&t);
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"an error reaches every waiter", test_every_waiter},
        {"a truncated file", test_truncated},
        {"the next demand after a failure", test_retry},
        {"many fail together", test_failing_together},
        {"a failed slot is left alone", test_failed_is_left_alone},
        {"a failed read that nobody waits for", test_nobody_waits},
        {"wait_any and errors", test_wait_any_fails},
        {"a file that changed before the start", test_changed_before_start},
        {"a worker without a watcher", test_no_watcher},
        {"every file mode gives the same bytes", test_modes},
        {"a scribbled file mode", test_scribbled_mode},
        {"scribbled plans", test_scribbled_plans},
        {"a plan scribbled to nothing", test_scribbled_to_nothing},
        {"a file shorter than planned", test_short},
        {"a scribbled slot word", test_scribbled_word},
        {"time limits", test_timeouts},
        {"the ring's read deadline", test_read_deadline},
        {"the read deadline of a queued read", test_read_deadline_queued},
        {"a ring without a read deadline", test_no_read_deadline},
        {"no slot for a moment", test_no_slot_for_a_moment},
        {"a ring that is being stopped", test_stopping},
        {"a ring that is gone", test_gone},
        {"a source file that changed", test_stale},
        {"a lost lease", test_lease_lost},
        {"a lost lease in the middle of an acquire", test_lease_lost_in_acquire},
        {"right checksums", test_right_sums},
        {"a wrong checksum", test_wrong_sum},
        {"a checksum over scribbled parts", test_sum_over_scribbled_parts},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
