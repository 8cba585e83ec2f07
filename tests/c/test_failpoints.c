/* test_failpoints.c: somebody dies at every named step, and everybody else goes on.
 *
 * One test walks through all failpoints.  For each: a fresh ring of few slots; a client A that holds two experts
 * and may wait for a third; a forked child, with a handle of its own, that acts as client, worker or sweeper
 * until it dies at the point (one that never gets there fails the test); then recovery, a client B and
 * a living worker, in both orders:
 *
 *   SWEEP_FIRST   recovery on a quiet ring, where every bit it has to mend can be looked at; then B and a worker
 *   WORK_FIRST    B, which takes over the dead client's id, and a worker go on in the ring as it was left, and
 *                 recovery comes in the midst of that
 *
 * Afterwards every waiter has its bytes or an error, nothing is held or reserved but by A and B, and then by
 * nobody; every expert can be demanded, the whole ring at once; guesses find their room again; both queues take
 * and give all that they are made for.  A trace that was recorded has what B demanded, and lacks no more than
 * the record in which the child died; a recorder that died leaves recording off, and the next one can begin.
 */
#define _GNU_SOURCE
#include "failpoint.h"
#include "testring.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SLOTS = 8, LAYER_EXPERTS = 12, GUESSES = SLOTS / 4 };
enum { B_WANTS = 5 }; /* and A has up to three: a full ring */
static const struct shape SHAPE = {.layers = 2, .experts = LAYER_EXPERTS, .slots = SLOTS, .seed = 1};

/* Layer 0: A holds 0 and 1, 4 and 5 are idle; 2 and 3 are not in the ring. */
#define WORKER_ID   5u
#define LIMIT_MS    60000
#define LIMIT_NS    30000000000ull /* a bound for what always happens, so that a fault ends the test */
#define CHILD_ALARM 60

enum order { SWEEP_FIRST, WORK_FIRST, ORDERS };

struct scene {
    struct testring t;
    smoe_ring *a, *b;
    smoe_hold held[2], pending[2];
    uint32_t n_pending;
    int64_t target; /* an expert of layer 0 with two windows and a move */
    int64_t guess;  /* another one; neither is in the ring */
    smoe_ring *recorder;
    uint64_t recorded, lost; /* its position in the log, and cells passed over */
    struct smoe_window_rec *scribbled, saved;
};

struct point {
    const char *name;
    unsigned nth;
    void (*stage)(struct scene *s);  /* before, in the survivors' process */
    void (*victim)(struct scene *s); /* in the child, which arms the point where it is about to come */
    bool sweeper;                    /* the child is the supervisor */
    bool may_fail;                   /* waiters may get an error instead of bytes */
};

static const struct point *point; /* under test */

static void arm(void) {
    failpoint_arm(point->name, point->nth);
}

#define SOON(condition)                                                                                                \
    do {                                                                                                               \
        uint64_t soon_end = plat_now_ns() + LIMIT_NS;                                                                  \
        while (!(condition)) {                                                                                         \
            if (plat_now_ns() > soon_end)                                                                              \
                printf("  at %s, pass %u:\n", point->name, point->nth);                                                \
            REQUIRE(plat_now_ns() <= soon_end && #condition);                                                          \
            sched_yield();                                                                                             \
        }                                                                                                              \
    } while (0)

/* --- children --------------------------------------------------------------------------------------- */

/* Run the function in a forked child; it has to die by SIGKILL there. */
static void die_in(struct scene *s, void (*victim)(struct scene *s)) {
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        signal(SIGALRM, SIG_DFL);
        alarm(CHILD_ALARM);
        victim(s);
        _exit(0);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
        printf("  %s, pass %u: not reached (wait status 0x%x)\n", point->name, point->nth, status);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    pause();
}

static smoe_hold acquire_of(smoe_ring *r, int64_t layer, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e;
    REQUIRE(smoe_acquire(r, layer, &expert, 1, &h, LIMIT_MS, &e) >= 0);
    return h;
}

/* A demanded slot's read fails, without a worker. */
static void forge_failure(smoe_ring *r, const smoe_hold *h) {
    uint64_t word;
    REQUIRE(slot_start(r, h->slot, 126, &word));
    slot_error_set(r, h->slot, SMOE_READ_SHORT, 0, 1, 2, 3);
    slot_fail(r, h->slot, 126);
}

static int guess_of(smoe_ring *r, int64_t layer, int64_t expert) {
    smoe_error e;
    return smoe_speculate(r, layer, &expert, 1, &e);
}

/* --- victims: clients ------------------------------------------------------------------------------- */

static void v_acquire(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    arm();
    acquire_of(r, 0, s->target);
}

static void v_acquire_cold(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    smoe_hold h;
    smoe_error e;
    arm();
    smoe_acquire_cold(r, 0, &s->target, 1, &h, 1, LIMIT_MS, &e);
}

static void v_acquire_too_many(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    int64_t all[SLOTS];
    smoe_hold h[SLOTS];
    smoe_error e;
    for (int i = 0; i < SLOTS; i++)
        all[i] = i;
    arm();
    smoe_acquire(r, 1, all, SLOTS, h, LIMIT_MS, &e);
}

static void v_acquire_guess(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    arm();
    acquire_of(r, 0, s->guess);
}

struct rival {
    smoe_ring *ring;
    int64_t expert;
};

static void rival_acquires(void *arg) {
    const struct rival *other = arg;
    acquire_of(other->ring, 0, other->expert);
}

static void rival_guesses(void *arg) {
    const struct rival *other = arg;
    REQUIRE(guess_of(other->ring, 0, other->expert) == 1);
}

static void v_lose_home(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    struct rival other = {testring_client(&s->t), s->target};
    failpoint_hook("take.word", rival_acquires, &other);
    arm();
    acquire_of(r, 0, s->target);
}

static void v_guess_loses_home(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    struct rival other = {testring_client(&s->t), s->guess};
    failpoint_hook("guess.word", rival_guesses, &other);
    arm();
    guess_of(r, 0, s->guess);
}

static void v_join(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    arm();
    acquire_of(r, 0, 0);
}

static void v_claim(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    smoe_hold h;
    smoe_error e;
    arm();
    smoe_claim_specific(r, 0, 0, &h, &e);
}

static void v_acquire_two(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    const int64_t experts[2] = {s->target, 4};
    smoe_hold h[2];
    smoe_error e;
    arm();
    smoe_acquire(r, 0, experts, 2, h, LIMIT_MS, &e);
}

static void v_ranks(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    const int64_t experts[2] = {7, 4};
    smoe_error e;
    arm();
    smoe_trace_ranks(r, 0, experts, 2, &e);
}

static void v_release(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    smoe_hold h = acquire_of(r, 0, 4);
    arm();
    smoe_release(r, &h, 1);
}

static void v_see_failure(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    smoe_hold h = acquire_of(r, 0, s->target);
    smoe_error e;
    forge_failure(r, &h);
    arm();
    smoe_wait(r, &h, 1, LIMIT_MS, &e);
}

static void v_guess(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    arm();
    guess_of(r, 0, s->guess);
}

static void v_prewarm(struct scene *s) {
    smoe_ring *r = testring_attach(&s->t, SMOE_ROLE_PREWARM, 0);
    arm();
    guess_of(r, 0, s->guess);
}

static void v_busy(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    arm();
    smoe_busy(r, 1);
}

static void v_no_longer_busy(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    smoe_busy(r, 1);
    arm();
    smoe_busy(r, 0);
}

static void v_attach(struct scene *s) {
    arm();
    testring_client(&s->t);
}

static void v_detach(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    acquire_of(r, 0, 0);
    acquire_of(r, 0, 4);
    acquire_of(r, 0, s->target);
    smoe_busy(r, 1);
    arm();
    testring_detach(&s->t, r);
}

/* --- victims: recorders ----------------------------------------------------------------------------- */

static void v_record(struct scene *s) {
    smoe_ring *r = testring_attach(&s->t, SMOE_ROLE_TRACE, 0);
    arm();
    smoe_trace_record(r, 1);
    smoe_trace_record(r, 0);
}

static void v_attach_recorder(struct scene *s) {
    arm();
    testring_attach(&s->t, SMOE_ROLE_TRACE, 0);
}

static void v_detach_recorder(struct scene *s) {
    smoe_ring *r = testring_attach(&s->t, SMOE_ROLE_TRACE, 0);
    smoe_trace_record(r, 1);
    arm();
    testring_detach(&s->t, r);
}

/* --- victims: workers, sweepers --------------------------------------------------------------------- */

static void v_work(struct scene *s) {
    smoe_ring *r = testring_attach(&s->t, SMOE_ROLE_WORKER, WORKER_ID);
    const volatile int stop = 0;
    const struct worker_options options = {.watch_fd = -1, .ready_fd = -1, .stop = &stop};
    smoe_error e;
    arm();
    worker_run(r, &options, &e);
}

static void v_attach_worker(struct scene *s) {
    arm();
    testring_attach(&s->t, SMOE_ROLE_WORKER, WORKER_ID);
}

static void v_detach_worker(struct scene *s) {
    smoe_ring *r = testring_attach(&s->t, SMOE_ROLE_WORKER, WORKER_ID);
    arm();
    testring_detach(&s->t, r);
}

static smoe_ring *supervise(struct scene *s) {
    smoe_error e;
    int lock = smoe_supervisor_lock(s->t.name, &e);
    REQUIRE(lock >= 0);
    return testring_attach(&s->t, SMOE_ROLE_SUPERVISOR, (uint32_t)lock);
}

static void v_sweep(struct scene *s) {
    smoe_ring *r = supervise(s);
    arm();
    smoe_recover(r, 1, NULL);
}

static void v_give_up(struct scene *s) {
    smoe_ring *r = supervise(s);
    arm();
    smoe_give_up_queued(r);
}

/* --- stages ----------------------------------------------------------------------------------------- */

static void fetch_and_release(struct scene *s, int64_t layer, int64_t expert) {
    smoe_hold h = {0};
    smoe_error e;
    REQUIRE(smoe_fetch(s->a, layer, &expert, 1, &h, LIMIT_MS, &e) >= 0);
    CHECK(testring_bytes_ok(&s->t, s->a, &h));
    smoe_release(s->a, &h, 1);
}

static void open_scene(struct scene *s) {
    const int64_t zero_and_one[] = {0, 1};
    smoe_error e;
    memset(s, 0, sizeof *s);
    testring_open(&s->t, &SHAPE);
    s->target = s->guess = -1;
    for (uint32_t x = 6; x < LAYER_EXPERTS; x++)
        if (s->target < 0 && s->t.experts[x].n_moves && s->t.experts[x].n_windows > 1)
            s->target = x;
        else if (s->guess < 0)
            s->guess = x;
    REQUIRE(s->target >= 0 && s->guess >= 0);
    s->a = testring_client(&s->t);
    testring_start(&s->t, 1);
    REQUIRE(smoe_fetch(s->a, 0, zero_and_one, 2, s->held, LIMIT_MS, &e) >= 0);
    fetch_and_release(s, 0, 4);
    fetch_and_release(s, 0, 5);
    testring_stop(&s->t);
}

/* No slot is empty: whoever takes one evicts. */
static void s_full(struct scene *s) {
    testring_start(&s->t, 1);
    for (int64_t x = 0; x < 4; x++)
        fetch_and_release(s, 1, x);
    testring_stop(&s->t);
}

/* A waits for the target. */
static void s_demand(struct scene *s) {
    s->pending[s->n_pending++] = acquire_of(s->a, 0, s->target);
}

/* A guess is queued. */
static void s_guess(struct scene *s) {
    REQUIRE(guess_of(s->a, 0, s->guess) == 1);
}

/* Its plan leads out of its slot: the read fails. */
static void scribble(struct scene *s, int64_t expert) {
    s->scribbled = testring_window(&s->t, (uint32_t)expert, 0);
    s->saved = *s->scribbled;
    s->scribbled->slot_offset = s->t.geometry.slot_bytes;
}

static void s_demand_that_fails(struct scene *s) {
    s_demand(s);
    scribble(s, s->target);
}

static void s_guess_that_fails(struct scene *s) {
    s_guess(s);
    scribble(s, s->guess);
}

static void s_failed(struct scene *s) {
    s_demand(s);
    forge_failure(s->a, &s->pending[0]);
}

enum { ROOM = 4096 }; /* cells of the log that a scene needs */

/* What everybody asks for is recorded.  The log has been written before: with experts of layer 1, lap 9. */
static void s_recorded(struct scene *s) {
    s->recorder = testring_attach(&s->t, SMOE_ROLE_TRACE, 0);
    int64_t at = smoe_trace_record(s->recorder, 1);
    REQUIRE(at >= 0 && at + ROOM < SMOE_TRACE_CELLS);
    s->recorded = (uint64_t)at;
    for (uint64_t i = 0; i < ROOM; i++)
        atomic_store(&s->a->trace[s->recorded + i], 9u | (LAYER_EXPERTS + 1) << 13);
}

static void dead_recorder(struct scene *s) {
    smoe_trace_record(testring_attach(&s->t, SMOE_ROLE_TRACE, 0), 1);
    die();
}

static void s_dead_recorder(struct scene *s) {
    die_in(s, dead_recorder);
}

/* Somebody slept for want of space. */
static void s_wanted(struct scene *s) {
    atomic_store(&s->a->hot->space_wanted, 1);
}

static void dead_client(struct scene *s) {
    smoe_ring *r = testring_client(&s->t);
    acquire_of(r, 0, 0);
    acquire_of(r, 0, 4);
    smoe_busy(r, 1);
    failpoint_arm("take.word", 1); /* a queued slot that no queue knows */
    acquire_of(r, 0, s->target);
}

static void s_dead_client(struct scene *s) {
    die_in(s, dead_client);
}

static void work_until(struct scene *s, uint32_t id, const char *name) {
    smoe_ring *r = testring_attach(&s->t, SMOE_ROLE_WORKER, id);
    const volatile int stop = 0;
    const struct worker_options options = {.watch_fd = -1, .ready_fd = -1, .stop = &stop};
    smoe_error e;
    failpoint_arm(name, 1);
    worker_run(r, &options, &e);
}

static void dead_worker(struct scene *s) {
    work_until(s, WORKER_ID, "read.window");
}

static void s_dead_worker(struct scene *s) {
    s_demand(s);
    die_in(s, dead_worker);
}

/* One process, two clients: what a sweep finds of every kind. */
static void dead_clients(struct scene *s) {
    smoe_ring *one = testring_client(&s->t), *two = testring_client(&s->t);
    acquire_of(one, 0, 0);
    acquire_of(one, 0, 4);
    acquire_of(one, 0, 2);
    smoe_hold failed = acquire_of(one, 0, 3);
    forge_failure(one, &failed);
    smoe_busy(one, 1);
    acquire_of(two, 0, 5);
    REQUIRE(guess_of(two, 0, s->guess) == 1);
    die();
}

static void dead_second_worker(struct scene *s) {
    work_until(s, WORKER_ID + 1, "read.done");
}

/* It has counted, and published; or it was about to publish. */
static void dead_published_worker(struct scene *s) {
    work_until(s, WORKER_ID, "publish.word");
}

static void dead_unpublished_worker(struct scene *s) {
    work_until(s, WORKER_ID, "count.added");
}

static void s_published(struct scene *s) {
    s_demand(s);
    die_in(s, dead_published_worker);
}

static void s_unpublished(struct scene *s) {
    s_demand(s);
    die_in(s, dead_unpublished_worker);
}

static void s_wreck(struct scene *s) {
    s_demand(s); /* first in the queue: the first worker dies in it */
    die_in(s, dead_clients);
    die_in(s, dead_worker);
    die_in(s, dead_second_worker);
}

/* The target has killed two workers before. */
static void s_killer(struct scene *s) {
    s_demand(s);
    atomic_store(&s->a->slots[s->pending[0].slot].kills, 2);
    die_in(s, dead_worker);
}

static void s_unserved(struct scene *s) {
    s_demand(s);
    s_guess(s);
}

/* --- all points ------------------------------------------------------------------------------------- */

static void nothing(struct scene *s) {
    (void)s;
}

static const struct point POINTS[] = {
    /* reservation */
    {"reserve.added", 1, nothing, v_acquire, false, false},
    {"reserve.added", 1, nothing, v_acquire_too_many, false, false},
    {"reserve.added", 1, nothing, v_claim, false, false},
    {"reserve.undone", 1, nothing, v_acquire_too_many, false, false},
    {"reserve.wanted", 1, nothing, v_acquire_too_many, false, false},
    {"unreserve.word", 1, nothing, v_release, false, false},
    {"space.flag_cleared", 1, s_wanted, v_release, false, false},
    /* acquire */
    {"join.word", 1, nothing, v_join, false, false},
    {"join.word", 1, s_demand, v_acquire, false, false},
    {"join.word", 1, s_guess, v_acquire_guess, false, false},
    {"promote.word", 1, s_guess, v_acquire_guess, false, false},
    {"promote.guess_cleared", 1, s_guess, v_acquire_guess, false, false},
    {"promote.pushed", 1, s_guess, v_acquire_guess, false, false},
    {"retry.word", 1, s_failed, v_acquire, false, true},
    {"take.word", 1, nothing, v_acquire, false, false},
    {"take.word", 1, s_full, v_acquire, false, false},
    {"take.hint_cleared", 1, nothing, v_acquire, false, false},
    {"take.victim_home_cleared", 1, s_full, v_acquire, false, false},
    {"take.victim_home_cleared", 1, s_full, v_guess, false, false},
    {"home.lost", 1, nothing, v_lose_home, false, false},
    {"home.lost", 1, s_full, v_lose_home, false, false},
    {"giveback.word", 1, nothing, v_lose_home, false, false},
    {"giveback.word", 1, s_full, v_lose_home, false, false},
    {"giveback.word", 1, nothing, v_guess_loses_home, false, false},
    {"giveback.hinted", 1, nothing, v_guess_loses_home, false, false},
    {"home.set", 1, nothing, v_acquire, false, false},
    {"home.set", 1, s_full, v_acquire, false, false},
    {"acquire.pushed", 1, nothing, v_acquire, false, false},
    /* hints and ticks */
    {"hint.empty_cleared", 1, nothing, v_acquire, false, false},
    {"hint.empty_cleared", 1, nothing, v_guess, false, false},
    {"hint.cold_set", 1, nothing, v_acquire_cold, false, false},
    {"hint.cold_set", 1, s_full, v_acquire_cold, false, false},
    {"hint.guess_cleared", 1, s_guess, v_acquire_guess, false, false},
    {"hint.guess_cleared", 1, s_guess, v_work, false, false},
    {"stamp.drawn", 1, nothing, v_join, false, false},
    {"stamp.drawn", 1, s_demand, v_work, false, false},
    /* queues */
    {"push.cell", 1, nothing, v_acquire, false, false},
    {"push.cell", 1, s_guess, v_acquire_guess, false, false},
    {"push.cell", 1, s_failed, v_acquire, false, true},
    {"push.cell", 1, nothing, v_guess, false, false},
    {"push.tail", 1, nothing, v_acquire, false, false},
    {"push.tail", 1, nothing, v_guess, false, false},
    {"doorbell.added", 1, nothing, v_acquire, false, false},
    {"doorbell.added", 1, nothing, v_guess, false, false},
    {"sleep.marked", 1, nothing, v_work, false, false},
    {"pop.cell", 1, s_demand, v_work, false, false},
    {"pop.cell", 1, s_guess, v_work, false, false},
    {"pop.head", 1, s_demand, v_work, false, false},
    {"pop.head", 1, s_guess, v_work, false, false},
    {"pop.returned", 1, s_demand, v_work, false, false},
    {"pop.speculative", 1, s_guess, v_work, false, false},
    /* read */
    {"read.started", 1, s_demand, v_work, false, false},
    {"read.started", 1, s_guess, v_work, false, false},
    {"read.recorded", 1, s_demand, v_work, false, false},
    {"read.window", 1, s_demand, v_work, false, false},
    {"read.window", 2, s_demand, v_work, false, false},
    {"read.moved", 1, s_demand, v_work, false, false},
    {"read.done", 1, s_demand, v_work, false, false},
    {"publish.stamped", 1, s_demand, v_work, false, false},
    {"publish.word", 1, s_demand, v_work, false, false},
    {"publish.word", 1, s_guess, v_work, false, false},
    {"wake.slot", 1, s_demand, v_work, false, false},
    {"publish.done", 1, s_demand, v_work, false, false},
    {"publish.done", 1, s_guess, v_work, false, false},
    {"publish.guess_cleared", 1, s_guess, v_work, false, false},
    {"count.marked", 1, s_demand, v_work, false, false},
    {"count.marked", 1, s_demand_that_fails, v_work, false, false},
    {"count.added", 1, s_demand, v_work, false, false},
    {"count.added", 1, s_guess, v_work, false, false},
    {"count.added", 1, s_demand_that_fails, v_work, false, false},
    {"error.begun", 1, s_demand_that_fails, v_work, false, false},
    {"error.begun", 1, s_killer, v_sweep, true, true},
    {"error.begun", 1, s_unserved, v_give_up, true, true},
    {"fail.recorded", 1, s_demand_that_fails, v_work, false, false},
    {"fail.recorded", 1, s_guess_that_fails, v_work, false, false},
    {"fail.word", 1, s_demand_that_fails, v_work, false, true},
    {"fail.word", 1, s_guess_that_fails, v_work, false, false},
    /* claim, release, speculate, busy */
    {"claim.word", 1, nothing, v_claim, false, false},
    {"release.word", 1, nothing, v_release, false, false},
    {"drop.emptied", 1, nothing, v_see_failure, false, false},
    {"guess.admitted", 1, nothing, v_guess, false, false},
    {"guess.admitted", 1, s_full, v_guess, false, false},
    {"guess.word", 1, nothing, v_guess, false, false},
    {"guess.word", 1, s_full, v_guess, false, false},
    {"guess.word", 1, nothing, v_prewarm, false, false},
    {"guess.marked", 1, nothing, v_guess, false, false},
    {"guess.home_set", 1, nothing, v_guess, false, false},
    {"guess.pushed", 1, nothing, v_guess, false, false},
    {"guess.pushed", 1, s_full, v_prewarm, false, false},
    {"busy.word", 1, nothing, v_busy, false, false},
    {"busy.word", 1, nothing, v_no_longer_busy, false, false},
    /* trace */
    {"trace.drawn", 1, s_recorded, v_acquire_two, false, false},
    {"trace.begun", 1, s_recorded, v_acquire_two, false, false},
    {"trace.timed", 1, s_recorded, v_acquire_two, false, false},
    {"trace.entry", 1, s_recorded, v_acquire_two, false, false},
    {"trace.entry", 2, s_recorded, v_acquire_two, false, false},
    {"trace.drawn", 1, s_recorded, v_claim, false, false},
    {"trace.timed", 1, s_recorded, v_claim, false, false},
    {"trace.begun", 1, s_recorded, v_ranks, false, false},
    {"trace.entry", 1, s_recorded, v_ranks, false, false},
    {"trace.timed", 1, s_recorded, v_guess, false, false},
    {"guess.word", 1, s_recorded, v_guess, false, false},
    {"trace.entry", 1, s_recorded, v_prewarm, false, false},
    {"trace.drawn", 1, s_recorded, v_busy, false, false},
    {"trace.begun", 1, s_recorded, v_no_longer_busy, false, false},
    {"trace.switched", 1, nothing, v_record, false, false},
    {"trace.switched", 2, nothing, v_record, false, false},
    {"recover.trace_off", 1, nothing, v_detach_recorder, false, false},
    {"detach.freed", 1, nothing, v_detach_recorder, false, false},
    {"register.locked", 1, s_dead_recorder, v_attach_recorder, false, false},
    {"recover.trace_off", 1, s_dead_recorder, v_attach_recorder, false, false},
    {"register.filled", 1, s_dead_recorder, v_attach_recorder, false, false},
    {"recover.trace_off", 1, s_dead_recorder, v_sweep, true, false},
    {"recover.freed", 1, s_dead_recorder, v_sweep, true, false},
    /* coming and going; the second lot take over what a dead owner of the id left */
    {"register.locked", 1, nothing, v_attach, false, false},
    {"register.filled", 1, nothing, v_attach, false, false},
    {"register.done", 1, nothing, v_attach, false, false},
    {"register.locked", 1, nothing, v_attach_worker, false, false},
    {"register.done", 1, nothing, v_attach_worker, false, false},
    {"register.locked", 1, s_dead_client, v_attach, false, false},
    {"recover.slot_dropped", 3, s_dead_client, v_attach, false, false},
    {"recover.reservation_back", 1, s_dead_client, v_attach, false, false},
    {"recover.client_done", 1, s_dead_client, v_attach, false, false},
    {"register.filled", 1, s_dead_client, v_attach, false, false},
    {"register.locked", 1, s_dead_worker, v_attach_worker, false, false},
    {"recover.requeued", 1, s_dead_worker, v_attach_worker, false, false},
    {"recover.rung", 1, s_dead_worker, v_attach_worker, false, false},
    {"register.filled", 1, s_dead_worker, v_attach_worker, false, false},
    {"recover.counted", 1, s_published, v_attach_worker, false, false},
    {"recover.counted", 1, s_unpublished, v_attach_worker, false, false},
    {"recover.slot_dropped", 3, nothing, v_detach, false, false},
    {"recover.reservation_back", 1, nothing, v_detach, false, false},
    {"detach.freed", 1, nothing, v_detach, false, false},
    {"detach.freed", 1, nothing, v_detach_worker, false, false},
    /* recovery: two dead clients, two dead workers */
    {"recover.locked", 1, s_wreck, v_sweep, true, false},
    {"recover.locked", 2, s_wreck, v_sweep, true, false},
    {"recover.locked", 4, s_wreck, v_sweep, true, false},
    {"recover.slot_dropped", 1, s_wreck, v_sweep, true, false},
    {"recover.slot_dropped", 5, s_wreck, v_sweep, true, false},
    {"recover.slot_dropped", SLOTS + 1, s_wreck, v_sweep, true, false},
    {"drop.emptied", 1, s_wreck, v_sweep, true, false},
    {"recover.reservation_back", 1, s_wreck, v_sweep, true, false},
    {"recover.reservation_back", 2, s_wreck, v_sweep, true, false},
    {"recover.busy_back", 1, s_wreck, v_sweep, true, false},
    {"recover.client_done", 1, s_wreck, v_sweep, true, false},
    {"recover.client_done", 2, s_wreck, v_sweep, true, false},
    {"recover.counted", 1, s_published, v_sweep, true, false},
    {"recover.requeued", 1, s_unpublished, v_sweep, true, false},
    {"recover.counted", 1, s_unpublished, v_sweep, true, false},
    {"recover.killer_recorded", 1, s_killer, v_sweep, true, true},
    {"recover.requeued", 1, s_killer, v_sweep, true, true},
    {"recover.requeued", 1, s_wreck, v_sweep, true, false},
    {"recover.requeued", 2, s_wreck, v_sweep, true, false},
    {"recover.read_forgotten", 1, s_wreck, v_sweep, true, false},
    {"recover.read_forgotten", 2, s_wreck, v_sweep, true, false},
    {"recover.mended", 1, s_wreck, v_sweep, true, false},
    {"recover.mended", 5, s_wreck, v_sweep, true, false},
    {"recover.pushed", 1, s_wreck, v_sweep, true, false},
    {"recover.pushed", 2, s_wreck, v_sweep, true, false},
    {"recover.rung", 1, s_wreck, v_sweep, true, false},
    {"recover.freed", 1, s_wreck, v_sweep, true, false},
    {"recover.freed", 2, s_wreck, v_sweep, true, false},
    {"recover.freed", 3, s_wreck, v_sweep, true, false},
    {"recover.freed", 4, s_wreck, v_sweep, true, false},
    {"recover.unlocked", 1, s_wreck, v_sweep, true, false},
    {"recover.unlocked", 3, s_wreck, v_sweep, true, false},
    {"recover.unlocked", 4, s_wreck, v_sweep, true, false},
    {"giveup.recorded", 1, s_unserved, v_give_up, true, true},
    {"giveup.word", 1, s_unserved, v_give_up, true, true},
    {"giveup.recorded", 2, s_unserved, v_give_up, true, true},
    {"giveup.word", 2, s_unserved, v_give_up, true, true},
};

/* --- the survivors go on ---------------------------------------------------------------------------- */

struct fetcher {
    struct scene *s;
    pthread_t thread;
    smoe_hold holds[B_WANTS];
    int rc;
};

static void *fetch_in_thread(void *arg) {
    struct fetcher *f = arg;
    int64_t wanted[B_WANTS] = {f->s->target, f->s->guess, 2, 3, 6};
    smoe_error e;
    while (wanted[4] == f->s->target || wanted[4] == f->s->guess)
        wanted[4]++;
    f->rc = smoe_fetch(f->s->b, 0, wanted, B_WANTS, f->holds, LIMIT_MS, &e);
    return NULL;
}

static void b_begins(struct scene *s, struct fetcher *f) {
    f->s = s;
    s->b = testring_client(&s->t);
    REQUIRE(pthread_create(&f->thread, NULL, fetch_in_thread, f) == 0);
}

static bool hint_of(_Atomic uint64_t *bits, uint32_t s) {
    return atomic_load(&bits[s / SMOE_GROUP]) >> (s % SMOE_GROUP) & 1;
}

/* What recovery has to have mended, on a ring where nobody else is at work. */
static void check_mended(struct scene *s) {
    smoe_ring *r = s->t.supervisor;
    for (uint32_t i = 0; i < SLOTS; i++) {
        uint64_t w = slot_word(r, i);
        CHECK_EQ(WORD_HOLDERS(w) & ~s->a->bit, 0);
        CHECK(WORD_STATE(w) != SMOE_READING);
        CHECK(WORD_STATE(w) != SMOE_EMPTY || hint_of(r->empties, i));
        CHECK_EQ(hint_of(r->guesses, i), word_guess(w));
    }
    for (uint32_t c = 0; c < SMOE_CLIENTS; c++)
        CHECK(c == s->a->id || atomic_load(&r->reservations[c]) == 0);
    CHECK_EQ(smoe_busy_clients(r), 0);
    smoe_participant_info who[4];
    int recorders = s->recorder != NULL;
    CHECK_EQ(smoe_participants(r, who, 4), 2 + recorders); /* A and the supervisor */
    CHECK_EQ(*smoe_tracing(r), recorders);
}

static void sweep(struct scene *s) {
    if (point->sweeper)
        s->t.supervisor = supervise(s);
    smoe_recover(s->t.supervisor, point->sweeper, NULL);
}

/* A wait's outcome: bytes, or an error where the point allows one. */
static void check_outcome(struct scene *s, smoe_ring *r, const smoe_hold *holds, uint32_t n, int rc) {
    if (rc == SMOE_EREAD && point->may_fail)
        return;
    CHECK(rc >= 0);
    for (uint32_t i = 0; i < n && rc >= 0; i++)
        CHECK(testring_bytes_ok(&s->t, r, &holds[i]));
}

static void survive(struct scene *s, enum order order, struct fetcher *f) {
    smoe_error e;
    if (order == SWEEP_FIRST) {
        sweep(s);
        check_mended(s);
    }
    b_begins(s, f);
    testring_start(&s->t, 1);
    if (order == WORK_FIRST)
        sweep(s);
    int rc = smoe_wait(s->a, s->pending, s->n_pending, LIMIT_MS, &e);
    check_outcome(s, s->a, s->pending, s->n_pending, rc);
    pthread_join(f->thread, NULL);
    check_outcome(s, s->b, f->holds, B_WANTS, f->rc);
    for (int i = 0; i < 2; i++)
        CHECK(testring_bytes_ok(&s->t, s->a, &s->held[i]));
}

/* --- afterwards ------------------------------------------------------------------------------------- */

static uint32_t in_state(const struct scene *s, uint32_t state) {
    uint32_t n[9];
    smoe_census(s->t.supervisor, n);
    CHECK_EQ(n[0] + n[1] + n[2] + n[3] + n[4] + n[5], SLOTS);
    return n[state];
}

/* Each of the survivors has reserved as many slots as bear its bit, and nobody else has a bit. */
static void check_holders(struct scene *s) {
    const smoe_ring *survivors[] = {s->a, s->b};
    uint32_t holding[2] = {0, 0}, total = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        uint64_t w = slot_word(s->a, i);
        CHECK_EQ(WORD_HOLDERS(w) & ~(s->a->bit | s->b->bit), 0);
        for (int k = 0; k < 2; k++)
            holding[k] += (w & survivors[k]->bit) != 0;
    }
    for (uint32_t c = 0; c < SMOE_CLIENTS; c++)
        total += atomic_load(&s->a->reservations[c]);
    for (int k = 0; k < 2; k++)
        CHECK_EQ(atomic_load(&s->a->reservations[survivors[k]->id]), holding[k]);
    CHECK_EQ(total, holding[0] + holding[1]);
}

static void demand_everything(struct scene *s) {
    for (int64_t layer = 0; layer < SHAPE.layers; layer++)
        for (int64_t first = 0; first < LAYER_EXPERTS; first += SLOTS) {
            uint32_t n = LAYER_EXPERTS - first < SLOTS ? (uint32_t)(LAYER_EXPERTS - first) : SLOTS;
            int64_t experts[SLOTS];
            smoe_hold holds[SLOTS];
            smoe_error e;
            for (uint32_t i = 0; i < n; i++)
                experts[i] = first + i;
            CHECK(smoe_fetch(s->b, layer, experts, n, holds, LIMIT_MS, &e) >= 0);
            for (uint32_t i = 0; i < n; i++)
                CHECK(holds[i].status == SMOE_HOLD_RESIDENT && testring_bytes_ok(&s->t, s->b, &holds[i]));
            CHECK_EQ(smoe_release(s->b, holds, n), n);
        }
}

static bool there(const struct scene *s, int64_t expert) {
    uint32_t home = smoe_home(s->b, (uint32_t)expert); /* layer 0: the index */
    return home && word_resident(slot_word(s->b, home - 1)) && WORD_EXPERT(slot_word(s->b, home - 1)) == expert;
}

/* As many guesses as ever find room, and are read. */
static void guess_to_the_limit(struct scene *s) {
    int64_t guessed[GUESSES], x = 0;
    for (int i = 0; i <= GUESSES; i++, x++) {
        while (there(s, x))
            x++;
        REQUIRE(x < LAYER_EXPERTS);
        CHECK_EQ(guess_of(s->b, 0, x), i < GUESSES);
        if (i < GUESSES)
            guessed[i] = x;
    }
    testring_start(&s->t, 1);
    for (int i = 0; i < GUESSES; i++) {
        smoe_hold h;
        smoe_error e;
        SOON(there(s, guessed[i]));
        CHECK_EQ(smoe_claim_specific(s->b, 0, guessed[i], &h, &e), 1);
        CHECK(testring_bytes_ok(&s->t, s->b, &h));
        smoe_release(s->b, &h, 1);
    }
    testring_stop(&s->t);
}

static void check_queue(struct queue q) {
    while (queue_pop(q) >= 0) {
    }
    CHECK(queue_empty(q));
    for (uint32_t i = 0; i < q.capacity; i++)
        CHECK(queue_push(q, i % SLOTS));
    CHECK(!queue_push(q, 0));
    for (uint32_t i = 0; i < q.capacity; i++)
        CHECK_EQ(queue_pop(q), i % SLOTS);
    CHECK_EQ(queue_pop(q), -1);
}

/* Each read that was published was counted once, whoever died in it.  A client that dies in an eviction may leave
 * that one uncounted. */
static void check_counts(const struct scene *s) {
    smoe_tally t;
    uint64_t read = 0;
    REQUIRE(smoe_get_tally(s->b, -1, SMOE_OF_ALL, &t) == 0);
    for (int i = 0; i < SMOE_BUCKETS; i++)
        read += t.reads[i];
    CHECK_EQ(t.counters[SMOE_C_READS] + t.counters[SMOE_C_FAILED_READS], read);
    if (point->stage != s_full)
        CHECK_EQ(t.counters[SMOE_C_READS] - t.counters[SMOE_C_EVICTIONS],
                 in_state(s, SMOE_READY) + in_state(s, SMOE_CONSUMED));
}

/* --- the trace -------------------------------------------------------------------------------------- */

/* All that was recorded; what is not whole is passed over.  Returns how many cells. */
static uint32_t read_trace(struct scene *s, uint64_t cells[ROOM]) {
    uint32_t n = 0;
    while (s->recorded < smoe_trace_head(s->recorder)) {
        int64_t got = smoe_trace_read(s->recorder, 1, &s->recorded, &s->lost, cells + n, ROOM - n);
        REQUIRE(got >= 0);
        n += (uint32_t)got;
    }
    return n;
}

/* Each record is one that somebody wrote, and B's demands are all there: they are its fetch, and then every
 * expert, as many at once as the ring has slots. */
static void check_trace(struct scene *s, const struct fetcher *f) {
    uint64_t cells[ROOM];
    uint32_t n = read_trace(s, cells), expected = 0;
    for (uint32_t at = 0; at < n;) {
        uint32_t kind = cells[at] >> 13 & 7, who = cells[at] >> 16 & 0xFF, entries = cells[at] >> 24 & 0xFFFF;
        uint32_t layer = (uint32_t)(cells[at] >> 40), experts[SLOTS];
        REQUIRE(kind >= SMOE_TRACE_DEMAND && kind <= SMOE_TRACE_IDLE && who < SMOE_PARTICIPANTS);
        REQUIRE(layer < SHAPE.layers && entries <= SLOTS && at + 2 + entries <= n);
        for (uint32_t i = 0; i < entries; i++) {
            uint32_t index = cells[at + 2 + i] >> 13 & 0x1FFFFF;
            CHECK_EQ(index / LAYER_EXPERTS, layer);
            experts[i] = index % LAYER_EXPERTS;
        }
        at += 2 + entries;
        if (kind != SMOE_TRACE_DEMAND || who != s->b->id || entries < 3)
            continue; /* or of the dead one whose id B has */
        for (uint32_t i = 0; i < entries; i++)
            CHECK_EQ(experts[i], expected == 0 ? f->holds[i].expert_index : (expected - 1) % 2 * SLOTS + i);
        CHECK_EQ(layer, expected == 0 ? 0 : (expected - 1) / 2);
        expected++;
    }
    CHECK_EQ(expected, 1 + 2 * SHAPE.layers);
    CHECK(s->lost <= 4);
}

/* Whoever recorded before: the next one can, and stop. */
static void record_anew(struct scene *s) {
    uint64_t cells[ROOM];
    s_recorded(s);
    fetch_and_release(s, 0, 0);
    CHECK_EQ(read_trace(s, cells), 3);
    CHECK_EQ(cells[0] >> 13 & 7, SMOE_TRACE_DEMAND);
    smoe_trace_record(s->recorder, 0);
    fetch_and_release(s, 0, 0);
    CHECK_EQ(read_trace(s, cells), 0);
}

static void aftermath(struct scene *s, struct fetcher *f) {
    SOON(in_state(s, SMOE_QUEUED) + in_state(s, SMOE_READING) == 0); /* nothing is forgotten */
    check_holders(s);
    smoe_release(s->a, s->held, 2);
    smoe_release(s->a, s->pending, s->n_pending);
    smoe_release(s->b, f->holds, B_WANTS);
    check_holders(s);
    CHECK_EQ(in_state(s, 6) + in_state(s, 8), 0); /* held, reserved */
    CHECK_EQ(smoe_busy_clients(s->a), 0);
    demand_everything(s);
    if (s->recorder)
        check_trace(s, f);
    else
        record_anew(s);
    testring_stop(&s->t);
    guess_to_the_limit(s);
    testring_check_quiet(&s->t);
    check_counts(s);
    check_queue(demand_queue(s->b));
    check_queue(speculative_queue(s->b));
}

static void die_at(const struct point *p, enum order order) {
    struct scene s;
    struct fetcher f = {.rc = 0};
    point = p;
    open_scene(&s);
    p->stage(&s);
    if (p->sweeper)
        testring_detach_supervisor(&s.t);
    die_in(&s, p->victim);
    if (s.scribbled)
        *s.scribbled = s.saved;
    survive(&s, order, &f);
    aftermath(&s, &f);
    testring_close(&s.t);
}

static void test_die_everywhere(void) {
    const char *only = getenv("SMOE_FAILPOINT");
    for (size_t i = 0; i < sizeof POINTS / sizeof *POINTS; i++)
        for (enum order order = SWEEP_FIRST; order < ORDERS; order++) {
            int before = test_failures();
            if (only && strcmp(only, POINTS[i].name) != 0)
                continue;
            die_at(&POINTS[i], order);
            if (test_failures() != before)
                printf("  at %s, pass %u, row %zu, %s\n", POINTS[i].name, POINTS[i].nth, i,
                       order == SWEEP_FIRST ? "sweep first" : "work first");
        }
}

/* A demand met a full queue, and whoever made it went away: no queue knows the slot and nobody waits for it.
 * A sweep that finds nobody dead sees to it all the same, once the queue has been emptied. */
static void test_forgotten(void) {
    static const struct point here = {.name = "a forgotten slot"};
    struct scene s;
    point = &here;
    open_scene(&s);
    while (queue_push(demand_queue(s.a), s.held[0].slot)) {
    }
    while (queue_push(speculative_queue(s.a), s.held[0].slot)) {
    }
    smoe_hold h = acquire_of(s.a, 0, s.target);
    CHECK_EQ(smoe_release(s.a, &h, 1), 1);
    CHECK_EQ(smoe_recover(s.t.supervisor, 0, NULL), 0);
    testring_start(&s.t, 1);
    SOON(queue_empty(demand_queue(s.a)) && queue_empty(speculative_queue(s.a)));
    CHECK_EQ(in_state(&s, SMOE_QUEUED), 1);
    CHECK_EQ(smoe_recover(s.t.supervisor, 0, NULL), 0);
    SOON(in_state(&s, SMOE_QUEUED) + in_state(&s, SMOE_READING) == 0);
    smoe_release(s.a, s.held, 2);
    testring_stop(&s.t);
    testring_check_quiet(&s.t);
    testring_close(&s.t);
}

/* A client whose share is swept between its adding and its taking back, while another one's attempt makes the sum
 * too large: nothing is taken from what the next owner of its id has reserved, and nothing from zero. */
struct swept {
    struct testring *t;
    smoe_ring *loser, *third;
};

static void sweep_and_follow(void *arg) {
    struct swept *s = arg;
    close(s->loser->lock_fd);
    s->loser->lock_fd = -1;
    CHECK_EQ(smoe_recover(s->t->supervisor, 0, NULL), 1);
    smoe_ring *next = testring_client(s->t);
    CHECK_EQ(next->id, s->loser->id);
    acquire_of(next, 0, 2);
    atomic_store(&s->third->reservations[s->third->id], SLOTS);
}

/* The sweep has come to the share, and not yet to the lease. */
static void sweep_share(void *arg) {
    struct swept *s = arg;
    atomic_store(&s->loser->reservations[s->loser->id], 0);
    atomic_store(&s->third->reservations[s->third->id], SLOTS + 1);
}

static void test_swept_share(void) {
    static void (*const hooks[])(void *) = {sweep_share, sweep_and_follow};
    for (uint32_t i = 0; i < 2; i++) {
        struct testring t;
        testring_open(&t, &SHAPE);
        struct swept s = {&t, testring_client(&t), testring_client(&t)};
        const int64_t two[] = {4, 5};
        smoe_hold h[2];
        smoe_error e;
        failpoint_hook("reserve.added", hooks[i], &s);
        CHECK_EQ(smoe_acquire_nowait(s.loser, 0, two, 2, h, &e), SMOE_EBUSY);
        CHECK_EQ(atomic_load(&s.third->reservations[s.loser->id]), i);
        testring_close(&t);
    }
}

/* Every name of the table has its row. */
static void test_every_name_has_a_row(void) {
#define NAME(name) name,
    static const char *const names[] = {FAILPOINT_NAMES(NAME)};
#undef NAME
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        bool found = false;
        for (size_t i = 0; i < sizeof POINTS / sizeof *POINTS; i++)
            found = found || strcmp(POINTS[i].name, names[n]) == 0;
        if (!found)
            test_fail(__FILE__, __LINE__, names[n]);
    }
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"every failpoint has a row", test_every_name_has_a_row},
        {"a slot that is queued and forgotten", test_forgotten},
        {"a share that was swept before it was taken back", test_swept_share},
        {"somebody dies at every step", test_die_everywhere},
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
