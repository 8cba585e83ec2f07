/* bench_main.c: the program smoe-bench: the C sides of `smoe-mp bench`, which starts it.
 *
 *     smoe-bench stream  NAME --reads N --seed S --batch B --batches K --clients C    through the ring NAME
 *     smoe-bench bare    FILE SEGMENT --reads N --seed S --bytes B --slots M --processes P
 *     smoe-bench hit     NAME.. --rounds R --repeats N --ops N --clients C ..         rings full of residents
 *     smoe-bench miss    QUIET SERVED ..  --rounds R --misses M --hits H .. --clients C ..
 *     smoe-bench wake    NAME FILE SEGMENT --rounds R --reads N --seed S --bytes B --pause US
 *
 * stream, bare and wake read the same kind of sequence, made by `sequence` from the seed.
 * Expert i is number i of layer 0, and the B bytes at i * B of the file.
 *
 * Each figure is one line of JSON on stdout.  Exit status: 0, or 1 with one line on stderr; 2 wrong usage.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NAMES_MAX 16
#define LIST_MAX  8
#define FILL      32u /* experts at once when a ring is filled */
#define BATCH     8u  /* experts in a batch of hits */

/* Values of an option that may be given several times. */
struct list {
    uint64_t values[LIST_MAX];
    uint32_t n;
};

struct options {
    const char *names[NAMES_MAX];
    uint32_t n_names;
    struct list hits, clients;
    uint64_t reads, seed, batch, batches, bytes, slots, processes, rounds, repeats, ops, misses, pause;
};

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("smoe-bench: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    _exit(1);
}

static void die_of(const char *name, const smoe_error *e) {
    char text[512];
    smoe_error_text(NULL, e, text, sizeof text);
    die("%s: %s", name, text);
}

static void *allocate(uint64_t n, size_t size) {
    void *p = calloc(n ? n : 1, size);
    if (!p)
        die("calloc: %" PRIu64 " x %zu bytes: no memory", n, size);
    return p;
}

/* --- numbers ---------------------------------------------------------------------------------------- */

/* splitmix64 */
static uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

static uint32_t random_below(uint64_t *state, uint32_t n) {
    return (uint32_t)((random_next(state) >> 32) * n >> 32);
}

/* `reads` random experts of n, none again within `distance` reads, nor at the start one of those in `before`
 * (or NULL).  With twice a ring's slots as distance none is found resident: one whose read took long is
 * newer, and stays longer, than some that were demanded after it. */
static uint32_t *sequence(uint64_t seed, uint32_t n, uint32_t distance, uint64_t reads, const bool *before) {
    if (n <= distance + distance / 2)
        die("%u experts are too few for %u slots: a larger file is needed", n, distance / 2);
    uint32_t *order = allocate(reads, sizeof *order);
    uint64_t *last = allocate(n, sizeof *last); /* position + 1; what was there before was read at 0 */
    for (uint32_t x = 0; before && x < n; x++)
        last[x] = before[x];
    for (uint64_t i = 1; i <= reads; i++) {
        uint32_t x;
        do
            x = random_below(&seed, n);
        while (last[x] && i + 1 - last[x] <= distance);
        last[x] = i + 1;
        order[i - 1] = x;
    }
    free(last);
    return order;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, uint64_t n) {
    qsort(values, n, sizeof *values, by_size);
    return n == 0 ? 0 : n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static void signal_one(_Atomic uint32_t *word) {
    atomic_fetch_add(word, 1);
    plat_wake(word, 0);
}

static void wait_for(const _Atomic uint32_t *word, uint32_t n) {
    for (uint32_t seen; (seen = atomic_load(word)) < n;)
        (void)plat_wait(word, seen, 100000000u);
}

/* By a child, until all may begin; where its parent is gone, nobody will say so. */
static void wait_to_go(const _Atomic uint32_t *go, pid_t parent) {
    while (atomic_load(go) == 0) {
        if (getppid() != parent)
            _exit(1);
        (void)plat_wait(go, 0, 100000000u);
    }
}

static void *share(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        die("mmap: %zu bytes: %s", bytes, strerror(errno));
    return p;
}

static uint64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* What reading the clock twice costs in itself. */
static double clock_cost(void) {
    enum { N = 1001 };
    double cost[N];
    for (int i = 0; i < N; i++) {
        uint64_t t = plat_now_ns();
        cost[i] = (double)(plat_now_ns() - t);
    }
    return median(cost, N);
}

/* --- a ring as the benchmarks use it ------------------------------------------------------------------ */

struct bench_ring {
    const char *name;
    smoe_ring *r;      /* as client */
    smoe_ring *worker; /* as worker, where no process serves it: demands are served by `serve` */
    uint32_t worker_pids[SMOE_WORKERS + 1], n_workers;
    smoe_ring *recorder; /* of traces */
    smoe_info info;
    uint32_t *resident; /* expert in each slot */
    int64_t *shuffled;  /* the residents in random order */
    uint32_t at;        /* position in them */
    uint64_t *chain;    /* one record a slot, each naming the next at random: see time_chain */
    uint64_t link;      /* position in it */
    uint64_t random;
};

static smoe_ring *attach(const char *name, int role) {
    smoe_ring *r;
    smoe_error e = {0};
    int rc = smoe_attach(name, role, 0, "smoe-bench", &r, &e);
    if (rc < 0)
        die_of(name, &e);
    return r;
}

static void attach_client(struct bench_ring *b, const char *name) {
    b->r = attach(name, SMOE_ROLE_CLIENT);
    b->name = name;
    b->random = 1;
    smoe_get_info(b->r, &b->info);
    if (b->info.grid_layers != 1 || b->info.grid_experts != b->info.n_experts)
        die("%s: not a ring of smoe-mp bench", name);
}

static void find_workers(struct bench_ring *b) {
    smoe_participant_info seen[SMOE_PARTICIPANTS];
    int n = smoe_participants(b->r, seen, SMOE_PARTICIPANTS);
    for (int i = 0; i < n; i++)
        if (seen[i].role == SMOE_ROLE_WORKER)
            b->worker_pids[b->n_workers++] = seen[i].pid;
}

/* Take the worker's part in a ring that has none, so that no process sleeps on its doorbell. */
static void attach_worker(struct bench_ring *b) {
    find_workers(b);
    if (b->n_workers == 0)
        b->worker = attach(b->name, SMOE_ROLE_WORKER);
}

/* Until all worker processes sleep on the doorbell. */
static void await_sleep(const struct bench_ring *b) {
    char path[40], line[512];
    for (uint32_t i = 0; i < b->n_workers;) {
        snprintf(path, sizeof path, "/proc/%u/stat", b->worker_pids[i]);
        FILE *f = fopen(path, "r");
        if (!f) { /* another system: they spin for microseconds only */
            const struct timespec t = {.tv_nsec = 1000000};
            nanosleep(&t, NULL);
            return;
        }
        const char *end = fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;
        fclose(f);
        if (!end || end[1] == 0)
            die("%s: not as expected", path);
        if (end[2] == 'S')
            i++;
        else
            plat_relax();
    }
}

/* Publish whatever is queued, unread: nobody looks at these bytes. */
static void serve(struct bench_ring *b) {
    int s;
    while (b->worker && (s = queue_pop(demand_queue(b->worker))) >= 0) {
        uint64_t word;
        if (slot_start(b->worker, (uint32_t)s, 0, &word)) {
            lru_stamp(b->worker, (uint32_t)s);
            slot_publish(b->worker, (uint32_t)s, 0);
        }
    }
}

/* Experts 0.. of every slot; and their random order. */
static void fill(struct bench_ring *b) {
    uint32_t slots = b->info.n_slots;
    int64_t ids[FILL];
    smoe_hold holds[FILL];
    smoe_error e = {0};
    b->resident = allocate(slots, sizeof *b->resident);
    b->shuffled = allocate(slots, sizeof *b->shuffled);
    for (uint32_t from = 0; from < slots; from += FILL) {
        uint32_t n = slots - from < FILL ? slots - from : FILL;
        for (uint32_t i = 0; i < n; i++)
            ids[i] = from + i;
        int rc = smoe_acquire(b->r, 0, ids, n, holds, -1, &e);
        serve(b);
        if (rc < 0 || (rc = smoe_wait(b->r, holds, n, -1, &e)) < 0)
            die_of(b->name, &e);
        for (uint32_t i = 0; i < n; i++)
            b->resident[holds[i].slot] = holds[i].expert_index;
        smoe_release(b->r, holds, n);
    }
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t k = random_below(&b->random, i + 1);
        b->shuffled[i] = b->shuffled[k];
        b->shuffled[k] = i;
    }
}

/* --- other clients at once ---------------------------------------------------------------------------- */

/* Processes that take residents of a ring and give them back, as long as they are told to.  They are forked before
 * the parent attaches, and end with it. */
struct crowd {
    _Atomic uint32_t bell, active, ring;  /* ring: position among the names */
    _Atomic uint32_t heard[SMOE_CLIENTS]; /* each one's last bell */
    uint32_t n;
};
#define CROWD_OPS 64

/* claims: experts may be absent, and those are passed over. */
static void crowd_turn(struct bench_ring *b, bool claims) {
    smoe_hold hold;
    smoe_error e = {0};
    for (int i = 0; i < CROWD_OPS; i++) {
        int64_t id = random_below(&b->random, b->info.n_experts);
        int rc = claims ? smoe_claim_specific(b->r, 0, id, &hold, &e) : smoe_acquire(b->r, 0, &id, 1, &hold, -1, &e);
        if (rc < 0 || (rc == 0 && !claims))
            die("%s: expert %" PRId64 " should be resident: %s", b->name, id, e.call ? e.call : "it is not");
        if (rc)
            smoe_release(b->r, &hold, 1);
    }
}

__attribute__((noreturn)) static void crowd_member(struct crowd *c, uint32_t number, const struct options *o,
                                                   bool claims, pid_t parent) {
    struct bench_ring *rings = allocate(o->n_names, sizeof *rings);
    for (uint32_t i = 0; i < o->n_names; i++) {
        attach_client(&rings[i], o->names[i]);
        rings[i].random = number + 2;
    }
    while (getppid() == parent) {
        uint32_t bell = atomic_load(&c->bell);
        bool works = number < atomic_load(&c->active);
        if (works)
            crowd_turn(&rings[atomic_load(&c->ring)], claims);
        atomic_store(&c->heard[number], bell);
        if (!works)
            (void)plat_wait(&c->bell, bell, 100000000u);
    }
    _exit(0);
}

/* As many as the most clients at once, less the one that measures. */
static struct crowd *crowd_start(const struct options *o, bool claims) {
    struct crowd *c = share(sizeof *c);
    pid_t parent = getpid();
    for (uint32_t i = 0; i < o->clients.n; i++)
        if (o->clients.values[i] > c->n + 1)
            c->n = (uint32_t)o->clients.values[i] - 1;
    for (uint32_t i = 0; i < c->n; i++) {
        pid_t child = fork();
        if (child == 0)
            crowd_member(c, i, o, claims, parent);
        if (child < 0)
            die("fork: %s", strerror(errno));
    }
    return c;
}

/* Have `clients` - 1 of them work on ring number `ring`, and wait until they do. */
static void crowd_set(struct crowd *c, uint64_t clients, uint32_t ring) {
    if (c->n == 0)
        return;
    atomic_store(&c->active, (uint32_t)clients - 1);
    atomic_store(&c->ring, ring);
    signal_one(&c->bell);
    for (uint32_t i = 0; i < c->n;) {
        int status;
        if (atomic_load(&c->heard[i]) == atomic_load(&c->bell))
            i++;
        else if (waitpid(-1, &status, WNOHANG) > 0)
            die("one of the other clients ended with status %d", WEXITSTATUS(status));
        else
            plat_relax();
    }
}

/* --- stream: through the ring ------------------------------------------------------------------------- */

struct streamed {
    _Atomic uint32_t ready, go, done; /* futex words */
    _Atomic uint64_t next;            /* batch */
    _Atomic uint64_t cpu_ns, hits;
};

/* `batches` batches in flight; the oldest is waited for, released, and another one demanded.  Several clients take
 * the batches in order, whoever is next, with as many in flight together. */
static void stream_client(struct bench_ring *b, const struct options *o, struct streamed *shared,
                          const uint32_t *order) {
    uint32_t batch = (uint32_t)o->batch;
    uint64_t clients = o->clients.values[0], flight = (o->batches + clients - 1) / clients, n = o->reads / batch;
    smoe_hold *holds = allocate(flight * batch, sizeof *holds);
    int64_t *ids = allocate(batch, sizeof *ids);
    smoe_error e = {0};
    uint64_t cpu = cpu_ns(), hits = 0;
    for (uint64_t taken = 0, given = 0, i;;) {
        if (taken - given < flight && (i = atomic_fetch_add(&shared->next, 1)) < n) {
            for (uint32_t k = 0; k < batch; k++)
                ids[k] = order[i * batch + k];
            int rc = smoe_acquire(b->r, 0, ids, batch, &holds[taken++ % flight * batch], -1, &e);
            if (rc < 0)
                die_of(b->name, &e);
            hits += (uint64_t)rc;
        } else if (taken > given) {
            smoe_hold *h = &holds[given++ % flight * batch];
            int rc = smoe_wait(b->r, h, batch, -1, &e);
            if (rc < 0)
                die_of(b->name, &e);
            smoe_release(b->r, h, batch);
        } else {
            break;
        }
    }
    atomic_fetch_add(&shared->cpu_ns, cpu_ns() - cpu);
    atomic_fetch_add(&shared->hits, hits);
}

__attribute__((noreturn)) static void stream_child(const struct options *o, struct streamed *shared,
                                                   const uint32_t *order, pid_t parent) {
    struct bench_ring b = {0};
    attach_client(&b, o->names[0]);
    signal_one(&shared->ready);
    wait_to_go(&shared->go, parent);
    stream_client(&b, o, shared, order);
    signal_one(&shared->done);
    smoe_detach(b.r);
    _exit(0);
}

/* Wait until n children have counted themselves; one that gave up before it did has said why.  `next`: of the reads
 * that they share, where they do: the others end at once. */
static void wait_for_children(const _Atomic uint32_t *word, uint32_t n, _Atomic uint64_t *next) {
    for (uint32_t seen; (seen = atomic_load(word)) < n;) {
        int status;
        (void)plat_wait(word, seen, 100000000u);
        if (waitpid(-1, &status, WNOHANG) <= 0 || status == 0)
            continue;
        if (next)
            atomic_store(next, UINT64_MAX / 2);
        if (WIFSIGNALED(status))
            die("a process of the measurement was ended by signal %d", WTERMSIG(status));
        _exit(1);
    }
}

static int stream(const struct options *o) {
    struct bench_ring b = {0};
    struct streamed *shared = share(sizeof *shared);
    attach_client(&b, o->names[0]);
    bool *before = allocate(b.info.n_experts, sizeof *before);
    for (uint32_t x = 0; x < b.info.n_experts; x++)
        before[x] = smoe_home(b.r, x) != 0;
    uint32_t *order = sequence(o->seed, b.info.n_experts, 2 * b.info.n_slots, o->reads, before);
    uint32_t others = o->clients.values[0] > 1 ? (uint32_t)o->clients.values[0] : 0;
    for (uint32_t i = 0; i < others; i++) {
        pid_t parent = getpid(), child = fork();
        if (child == 0)
            stream_child(o, shared, order, parent);
        if (child < 0) {
            int why = errno;
            atomic_store(&shared->next, o->reads);
            atomic_store(&shared->go, 1); /* the others end at once */
            die("fork: %s", strerror(why));
        }
    }
    wait_for_children(&shared->ready, others, &shared->next);
    uint64_t began = plat_now_ns();
    signal_one(&shared->go);
    if (others == 0)
        stream_client(&b, o, shared, order);
    wait_for_children(&shared->done, others, &shared->next);
    uint64_t ns = plat_now_ns() - began;
    smoe_part part;
    smoe_expert_parts(b.r, 0, &part, 1);
    printf("{\"ns\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"cpu_ns\": %" PRIu64 ", \"hits\": %" PRIu64 "}\n", ns,
           o->reads / o->batch * o->batch * part.bytes, atomic_load(&shared->cpu_ns), atomic_load(&shared->hits));
    while (wait(NULL) > 0) {
    }
    smoe_detach(b.r);
    return 0;
}

/* --- bare: the same reads by as many processes with nothing in between ---------------------------------- */

struct bare {
    _Atomic uint32_t ready, go, done; /* futex words */
    _Atomic uint32_t failed;          /* errno */
    _Atomic uint64_t next;            /* read */
    _Atomic uint64_t cpu_ns;
};

static int read_whole(int fd, unsigned char *to, uint64_t bytes, uint64_t offset) {
    for (uint64_t got = 0; got < bytes;) {
        ssize_t n = pread(fd, to + got, bytes - got, (off_t)(offset + got));
        if (n < 0 && errno != EINTR)
            return errno;
        if (n == 0)
            return EIO;
        if (n > 0)
            got += (uint64_t)n;
    }
    return 0;
}

__attribute__((noreturn)) static void bare_process(const struct options *o, struct bare *shared, unsigned char *slots,
                                                   const uint32_t *order, uint64_t number, pid_t parent) {
    int rc = 0, fd = plat_open_file(o->names[0], 1);
    uint64_t own = o->slots / o->processes;       /* slots of each */
    plat_prefault(slots, o->slots * o->bytes, 0); /* as the workers do */
    signal_one(&shared->ready);
    wait_to_go(&shared->go, parent);
    uint64_t cpu = cpu_ns();
    if (fd < 0)
        rc = -fd;
    for (uint64_t turn = 0; rc == 0; turn++) {
        uint64_t i = atomic_fetch_add(&shared->next, 1);
        if (i >= o->reads)
            break;
        uint64_t slot = number + o->processes * (turn % own);
        rc = read_whole(fd, slots + slot * o->bytes, o->bytes, order[i] * o->bytes);
    }
    if (rc)
        atomic_store(&shared->failed, (uint32_t)rc);
    atomic_fetch_add(&shared->cpu_ns, cpu_ns() - cpu);
    signal_one(&shared->done);
    _exit(0); /* `failed` says it */
}

/* The slots of a ring, which rests meanwhile and whose bytes nobody looks at: the very pages that the other side
 * reads into.  How far their physical addresses run on decides how many requests a direct read becomes. */
static unsigned char *slots_of(const char *name, uint64_t least, uint64_t *bytes) {
    struct stat st;
    int fd = shm_open(name, O_RDWR, 0);
    if (fd < 0)
        die("shm_open %s: %s", name, strerror(errno));
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < least)
        die("%s: smaller than the %" PRIu64 " bytes of the slots", name, least);
    *bytes = (uint64_t)st.st_size;
    void *p = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        die("mmap %s: %" PRIu64 " bytes: %s", name, *bytes, strerror(errno));
    close(fd);
    return p;
}

static int bare(const struct options *o) {
    struct stat st;
    if (stat(o->names[0], &st) != 0)
        die("%s: %s", o->names[0], strerror(errno));
    uint32_t *order =
        sequence(o->seed, (uint32_t)((uint64_t)st.st_size / o->bytes), 2 * (uint32_t)o->slots, o->reads, NULL);
    struct bare *shared = share(sizeof *shared);
    uint64_t mapped;
    unsigned char *slots = slots_of(o->names[1], o->slots * o->bytes, &mapped);
    uint32_t n = (uint32_t)o->processes;
    for (uint32_t i = 0; i < n; i++) {
        pid_t parent = getpid(), child = fork();
        if (child == 0)
            bare_process(o, shared, slots, order, i, parent);
        if (child < 0) {
            int why = errno;
            atomic_store(&shared->next, o->reads);
            atomic_store(&shared->go, 1); /* the others end at once */
            die("fork: %s", strerror(why));
        }
    }
    wait_for_children(&shared->ready, n, &shared->next);
    uint64_t began = plat_now_ns();
    signal_one(&shared->go);
    wait_for_children(&shared->done, n, &shared->next);
    uint64_t ns = plat_now_ns() - began;
    while (wait(NULL) > 0) {
    }
    if (atomic_load(&shared->failed))
        die("%s: direct read: %s", o->names[0], strerror((int)atomic_load(&shared->failed)));
    printf("{\"ns\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"cpu_ns\": %" PRIu64 "}\n", ns, o->reads * o->bytes,
           atomic_load(&shared->cpu_ns));
    return 0;
}

/* --- hit: acquire and release of residents ------------------------------------------------------------ */

enum hit_kind { HIT_HOT, HIT_RANDOM, HIT_RECORDED, HIT_BATCH, HIT_BATCH_RECORDED, HIT_LOAD, HIT_KINDS };
static const char *const hit_names[HIT_KINDS] = {
    "one hot", "random", "random, recorded", "batch of 8, random", "batch of 8, random, recorded", "one load"};

#define CHAIN_WORDS 16u /* words of a record */

static void make_chain(struct bench_ring *b) {
    uint32_t n = b->info.n_slots;
    b->chain = allocate((uint64_t)n * CHAIN_WORDS, sizeof *b->chain);
    for (uint32_t i = 0; i < n; i++)
        b->chain[(uint64_t)b->shuffled[i] * CHAIN_WORDS] = (uint64_t)b->shuffled[(i + 1) % n] * CHAIN_WORDS;
}

/* The yardstick: ns of one load of a record of 128 bytes, one of as many as there are slots, its address known
 * from the load before.  What this costs in a large ring no code can save, only avoid. */
static double time_chain(struct bench_ring *b, uint64_t ops) {
    const volatile uint64_t *chain = b->chain;
    uint64_t at = b->link, began = plat_now_ns();
    for (uint64_t i = 0; i < ops; i++)
        at = chain[at];
    uint64_t ns = plat_now_ns() - began;
    b->link = at;
    return (double)ns / (double)ops;
}

/* ns for one acquire + release.  What is recorded nobody reads: clients wait for no recorder. */
static double time_hits(struct bench_ring *b, enum hit_kind kind, uint64_t ops) {
    uint32_t n = kind == HIT_BATCH || kind == HIT_BATCH_RECORDED ? BATCH : 1, slots = b->info.n_slots, at = b->at;
    uint64_t missed = 0;
    smoe_hold holds[BATCH];
    smoe_error e = {0};
    smoe_trace_record(b->recorder, kind == HIT_RECORDED || kind == HIT_BATCH_RECORDED);
    uint64_t began = plat_now_ns();
    for (uint64_t i = 0; i < ops; i++) {
        if (kind == HIT_HOT)
            at = 0;
        else if ((at += n) + n > slots)
            at = 0;
        missed += smoe_acquire(b->r, 0, &b->shuffled[at], n, holds, -1, &e) != (int)n;
        smoe_release(b->r, holds, n);
    }
    uint64_t ns = plat_now_ns() - began;
    if (missed)
        die("%s: %" PRIu64 " of %" PRIu64 " hits did not hit: %s", b->name, missed, ops, e.call ? e.call : "?");
    if (kind != HIT_HOT)
        b->at = at;
    return (double)ns / (double)ops;
}

static void hit_round(struct bench_ring *rings, struct crowd *crowd, const struct options *o, uint64_t round,
                      uint64_t clients, double *ns) {
    for (enum hit_kind kind = 0; kind < HIT_KINDS; kind++)
        for (uint32_t i = 0; i < o->n_names; i++) {
            if (clients > 1 && kind != HIT_HOT && kind != HIT_RANDOM && kind != HIT_BATCH)
                continue;
            crowd_set(crowd, clients, i);
            for (uint64_t k = 0; k < o->repeats; k++)
                ns[k] = kind == HIT_LOAD ? time_chain(&rings[i], o->ops) : time_hits(&rings[i], kind, o->ops);
            printf("{\"round\": %" PRIu64 ", \"slots\": %u, \"clients\": %" PRIu64
                   ", \"kind\": \"%s\", \"ns\": %.2f}\n",
                   round, rings[i].info.n_slots, clients, hit_names[kind], median(ns, o->repeats));
            fflush(stdout);
        }
}

static int hit(const struct options *o) {
    struct bench_ring rings[NAMES_MAX] = {0};
    struct crowd *crowd = crowd_start(o, false);
    double *ns = allocate(o->repeats, sizeof *ns);
    for (uint32_t i = 0; i < o->n_names; i++) {
        attach_client(&rings[i], o->names[i]);
        rings[i].recorder = attach(o->names[i], SMOE_ROLE_TRACE);
        fill(&rings[i]);
        make_chain(&rings[i]);
    }
    for (uint64_t round = 0; round < o->rounds; round++)
        for (uint32_t c = 0; c < o->clients.n; c++)
            hit_round(rings, crowd, o, round, o->clients.values[c], ns);
    crowd_set(crowd, 1, 0);
    for (uint32_t i = 0; i < o->n_names; i++) {
        smoe_detach(rings[i].recorder);
        smoe_detach(rings[i].r);
    }
    return 0;
}

/* --- miss: the issue of a miss, with eviction ---------------------------------------------------------- */

enum miss_side {
    MISS_ISSUE,  /* smoe_acquire, nobody asleep at the doorbell, as while workers are busy */
    MISS_WAKES,  /* smoe_acquire that wakes a sleeping worker process */
    MISS_SEARCH, /* only finding the victim */
    MISS_BELL,   /* only the doorbell's system call, nobody asleep */
    MISS_SCAN,   /* finding the victim by looking at every slot */
    MISS_SIDES
};
static const char *const miss_names[MISS_SIDES] = {"issue", "issue + wake", "search", "doorbell", "scan"};

/* A slot as a plain LRU has it: a record with state and tick. */
struct scan_slot {
    _Atomic uint64_t tick;
    _Atomic uint32_t state;
    uint32_t holders;
    uint8_t rest[48];
};

static void scan_copy(const struct bench_ring *b, struct scan_slot *slots) {
    for (uint32_t s = 0; s < b->info.n_slots; s++) {
        uint64_t w = slot_word(b->r, s);
        atomic_store_explicit(&slots[s].tick, smoe_slot_tick(b->r, s), memory_order_relaxed);
        atomic_store_explicit(&slots[s].state, WORD_STATE(w), memory_order_relaxed);
        slots[s].holders = WORD_HOLDERS(w) != 0;
    }
}

static int scan(const struct scan_slot *slots, uint32_t n) {
    int best = -1;
    uint64_t least = UINT64_MAX;
    for (uint32_t s = 0; s < n; s++) {
        uint32_t state = atomic_load_explicit(&slots[s].state, memory_order_acquire);
        if (state == SMOE_EMPTY)
            return (int)s;
        uint64_t tick = atomic_load_explicit(&slots[s].tick, memory_order_relaxed);
        if ((state == SMOE_READY || state == SMOE_CONSUMED) && slots[s].holders == 0 && tick < least) {
            least = tick;
            best = (int)s;
        }
    }
    return best;
}

/* Hits on random residents, as between a token's misses. */
static void hits_between(struct bench_ring *b, uint64_t n) {
    smoe_hold hold;
    smoe_error e = {0};
    for (uint64_t i = 0; i < n; i++) {
        int64_t id = b->resident[random_below(&b->random, b->info.n_slots)];
        int rc = smoe_acquire(b->r, 0, &id, 1, &hold, -1, &e);
        if (rc != 1)
            die("%s: expert %" PRId64 " should be resident: %s", b->name, id, e.call ? e.call : "it is not");
        smoe_release(b->r, &hold, 1);
    }
}

static int64_t any_absent(struct bench_ring *b) {
    for (;;) {
        uint32_t x = random_below(&b->random, b->info.n_experts), home = smoe_home(b->r, x);
        if (!home || b->resident[home - 1] != x)
            return x;
    }
}

/* One miss: demanded, served, released.  Returns the ns of the demand. */
static double issue(struct bench_ring *b) {
    int64_t id = any_absent(b);
    smoe_hold hold;
    smoe_error e = {0};
    await_sleep(b);
    uint64_t began = plat_now_ns();
    int rc = smoe_acquire(b->r, 0, &id, 1, &hold, -1, &e);
    uint64_t ns = plat_now_ns() - began;
    if (rc != 0)
        die("%s: a miss should miss: %d %s", b->name, rc, e.call ? e.call : "");
    serve(b);
    rc = smoe_wait(b->r, &hold, 1, -1, &e);
    if (rc < 0)
        die_of(b->name, &e);
    b->resident[hold.slot] = hold.expert_index;
    smoe_release(b->r, &hold, 1);
    return (double)ns;
}

static double miss_once(struct bench_ring *quiet, struct bench_ring *served, enum miss_side side,
                        struct scan_slot *slots, uint64_t hits) {
    struct bench_ring *b = side == MISS_WAKES ? served : quiet;
    uint64_t word, began, ns;
    int found;
    hits_between(b, hits);
    switch (side) {
    case MISS_SEARCH:
        began = plat_now_ns();
        found = lru_find_empty(b->r);
        if (found < 0)
            found = lru_victim(b->r, &word);
        ns = plat_now_ns() - began;
        issue(b); /* the ring goes on as with the other sides */
        break;
    case MISS_BELL:
        began = plat_now_ns();
        plat_wake(&b->r->hot->doorbell, 1);
        ns = plat_now_ns() - began;
        found = 0;
        break;
    case MISS_SCAN:
        scan_copy(b, slots);
        began = plat_now_ns();
        found = scan(slots, b->info.n_slots);
        ns = plat_now_ns() - began;
        if (found >= 0 && found != lru_victim(b->r, &word))
            die("%s: the search and the scan disagree", b->name);
        issue(b);
        break;
    default:
        return issue(b);
    }
    if (found < 0)
        die("%s: no victim", b->name);
    return (double)ns;
}

/* With other clients at once only the issue: they would hold what the search looks for. */
static void miss_round(struct bench_ring *pair, const struct options *o, uint64_t round, uint64_t hits,
                       uint64_t clients, double cost) {
    enum miss_side sides = clients > 1 ? MISS_ISSUE + 1 : MISS_SIDES;
    double *ns[MISS_SIDES];
    struct scan_slot *slots = allocate(pair->info.n_slots, sizeof *slots);
    for (enum miss_side side = 0; side < sides; side++)
        ns[side] = allocate(o->misses, sizeof **ns);
    for (uint64_t i = 0; i < o->misses; i++)
        for (enum miss_side side = 0; side < sides; side++)
            ns[side][i] = miss_once(&pair[0], &pair[1], side, slots, hits);
    for (enum miss_side side = 0; side < sides; side++) {
        double m = median(ns[side], o->misses) - cost;
        printf("{\"round\": %" PRIu64 ", \"slots\": %u, \"hits\": %" PRIu64 ", \"clients\": %" PRIu64
               ", \"side\": \"%s\", \"ns\": %.1f}\n",
               round, pair->info.n_slots, hits, clients, miss_names[side], m > 1 ? m : 1);
        free(ns[side]);
    }
    fflush(stdout);
    free(slots);
}

static int miss(const struct options *o) {
    struct bench_ring rings[NAMES_MAX] = {0};
    struct crowd *crowd = crowd_start(o, true);
    double cost = clock_cost();
    if (o->n_names % 2)
        die("miss takes rings in pairs: one without workers, one with");
    for (uint32_t i = 0; i < o->n_names; i++) {
        attach_client(&rings[i], o->names[i]);
        attach_worker(&rings[i]);
        if ((i % 2 == 0) != (rings[i].worker != NULL))
            die("%s: of a pair the first ring has no workers, the second has", o->names[i]);
        fill(&rings[i]);
    }
    printf("{\"clock_ns\": %.1f}\n", cost);
    for (uint64_t round = 0; round < o->rounds; round++)
        for (uint32_t c = 0; c < o->clients.n; c++)
            for (uint32_t h = 0; h < o->hits.n; h++)
                for (uint32_t i = 0; i < o->n_names; i += 2) {
                    crowd_set(crowd, o->clients.values[c], i);
                    miss_round(&rings[i], o, round, o->hits.values[h], o->clients.values[c], cost);
                }
    crowd_set(crowd, 1, 0);
    for (uint32_t i = 0; i < o->n_names; i++) {
        smoe_detach(rings[i].worker);
        smoe_detach(rings[i].r);
    }
    return 0;
}

/* --- wake: from demand to bytes, over a bare read ------------------------------------------------------- */

/* What is timed of a side where another process reads. */
enum wake_part {
    WAKE_ALL,    /* demand to bytes */
    WAKE_MORE,   /* over the bare read */
    WAKE_ISSUED, /* until the demand is issued */
    WAKE_WOKEN,  /* likewise from the demand: until the reader has it */
    WAKE_READ,   /* from there: its read */
    WAKE_TOLD,   /* from there: until the client has seen it */
    WAKE_PARTS
};
static const char *const wake_names[WAKE_PARTS] = {"all", "more", "issued", "woken", "read", "told"};
/* The relay: a process that is woken for the bare read, with nothing else between. */
enum wake_side { WAKE_RING, WAKE_RELAY, WAKE_SIDES };
static const char *const wake_sides[WAKE_SIDES] = {"ring", "relay"};

/* How long the client spins before it sleeps: as by default, and for as long as it takes. */
enum { WAKE_KINDS = 2 };
static const char *const wake_kinds[WAKE_KINDS] = {"sleeps", "spins"};
static const uint32_t wake_spin_us[WAKE_KINDS] = {20, 1000000};

/* What is told to the relay, and by it. */
struct relay {
    _Atomic uint32_t asked, answered; /* futex words */
    uint64_t offset, slot_offset, woken_ns, landed_ns;
    int rc;
};

struct wake {
    struct bench_ring ring;
    const char *file;
    int fd;
    unsigned char *slots;
    uint64_t slots_bytes, bytes, pause_ns, spin_ns;
    struct relay *relay;
};

/* All workers sleep, and the client computes for a while, so that their cores sleep, too. */
static void wake_rest(const struct wake *w) {
    await_sleep(&w->ring);
    for (uint64_t until = plat_now_ns() + w->pause_ns; plat_now_ns() < until;) {
    }
}

static double wake_bare(const struct wake *w, uint32_t expert) {
    unsigned char *to = w->slots + expert % w->ring.info.n_slots * w->ring.info.slot_bytes;
    wake_rest(w);
    uint64_t began = plat_now_ns();
    int rc = read_whole(w->fd, to, w->bytes, expert * w->bytes);
    uint64_t ns = plat_now_ns() - began;
    if (rc)
        die("%s: direct read: %s", w->file, strerror(rc));
    return (double)ns;
}

__attribute__((noreturn)) static void relay_process(const struct wake *w, pid_t parent) {
    struct relay *r = w->relay;
    int fd = plat_open_file(w->file, 1), rc = fd < 0 ? -fd : 0;
    plat_prefault(w->slots, w->slots_bytes, 0);
    signal_one(&r->answered); /* ready */
    for (uint32_t done = 0; getppid() == parent;) {
        (void)plat_wait(&r->asked, done, 100000000u);
        if (atomic_load(&r->asked) == done)
            continue;
        done++;
        r->woken_ns = plat_now_ns();
        r->rc = rc ? rc : read_whole(fd, w->slots + r->slot_offset, w->bytes, r->offset);
        r->landed_ns = plat_now_ns();
        signal_one(&r->answered);
    }
    _exit(0);
}

static void wake_parts(double *parts, uint64_t began, uint64_t issued, uint64_t woken, uint64_t landed, uint64_t told) {
    parts[WAKE_ALL] = (double)(told - began);
    parts[WAKE_ISSUED] = (double)(issued - began);
    parts[WAKE_WOKEN] = (double)(woken - began);
    parts[WAKE_READ] = (double)(landed - woken);
    parts[WAKE_TOLD] = (double)(told - landed);
}

/* The parent waits as a client does: it spins, then sleeps. */
static void wake_relay(struct wake *w, uint32_t expert, double *parts) {
    struct relay *r = w->relay;
    r->offset = expert * w->bytes;
    r->slot_offset = expert % w->ring.info.n_slots * w->ring.info.slot_bytes;
    wake_rest(w);
    uint32_t seen = atomic_load(&r->answered);
    uint64_t began = plat_now_ns();
    signal_one(&r->asked);
    uint64_t issued = plat_now_ns();
    while (atomic_load(&r->answered) == seen && plat_now_ns() - issued < w->spin_ns) {
    }
    wait_for(&r->answered, seen + 1);
    uint64_t told = plat_now_ns();
    if (r->rc)
        die("%s: direct read: %s", w->file, strerror(r->rc));
    wake_parts(parts, began, issued, r->woken_ns, r->landed_ns, told);
}

/* One demand to bytes; its parts by the stamps that the worker leaves in the ring. */
static void wake_ring(struct wake *w, uint32_t expert, double *parts) {
    smoe_ring *r = w->ring.r;
    int64_t id = expert;
    smoe_hold hold;
    smoe_error e = {0};
    uint64_t read_ns = smoe_counter_value(r, SMOE_C_READ_NS, -1);
    wake_rest(w);
    uint64_t began = plat_now_ns();
    int rc = smoe_acquire(r, 0, &id, 1, &hold, -1, &e);
    uint64_t issued = plat_now_ns();
    if (rc != 0)
        die("%s: a miss should miss: %d %s", w->ring.name, rc, e.call ? e.call : "");
    rc = smoe_wait(r, &hold, 1, -1, &e);
    uint64_t told = plat_now_ns();
    if (rc < 0)
        die_of(w->ring.name, &e);
    uint64_t landed = atomic_load(&r->hot->landed_ns);
    read_ns = smoe_counter_value(r, SMOE_C_READ_NS, -1) - read_ns;
    smoe_release(r, &hold, 1);
    wake_parts(parts, began, issued, landed - read_ns, landed, told);
}

/* A place is first read once uncounted, so that a cache below the device, where there is one, answers all sides
 * alike; then by each, another one first each time. */
static void wake_round(struct wake *w, const struct options *o, uint64_t round, int kind, const uint32_t *order) {
    uint64_t n = o->reads;
    double *bare = allocate(n, sizeof *bare), *ns[WAKE_SIDES][WAKE_PARTS], now[WAKE_SIDES][WAKE_PARTS] = {{0}};
    for (int side = 0; side < WAKE_SIDES; side++)
        for (int part = 0; part < WAKE_PARTS; part++)
            ns[side][part] = allocate(n, sizeof *bare);
    smoe_set_spin_us(w->ring.r, wake_spin_us[kind]);
    w->spin_ns = wake_spin_us[kind] * 1000ull;
    for (uint64_t i = 0; i < n; i++) {
        (void)wake_bare(w, order[i]);
        for (uint64_t turn = i; turn < i + 3; turn++) {
            if (turn % 3 == 0)
                wake_ring(w, order[i], now[WAKE_RING]);
            else if (turn % 3 == 1)
                bare[i] = wake_bare(w, order[i]);
            else
                wake_relay(w, order[i], now[WAKE_RELAY]);
        }
        for (int side = 0; side < WAKE_SIDES; side++) {
            now[side][WAKE_MORE] = now[side][WAKE_ALL] - bare[i];
            for (int part = 0; part < WAKE_PARTS; part++)
                ns[side][part][i] = now[side][part];
        }
    }
    printf("{\"round\": %" PRIu64 ", \"client\": \"%s\", \"bare\": {\"all\": %.0f}", round, wake_kinds[kind],
           median(bare, n));
    for (int side = 0; side < WAKE_SIDES; side++) {
        printf(", \"%s\": {", wake_sides[side]);
        for (int part = 0; part < WAKE_PARTS; part++) {
            printf("%s\"%s\": %.0f", part ? ", " : "", wake_names[part], median(ns[side][part], n));
            free(ns[side][part]);
        }
        printf("}");
    }
    printf("}\n");
    fflush(stdout);
    free(bare);
}

static int wake(const struct options *o) {
    struct wake w = {.file = o->names[1], .bytes = o->bytes, .pause_ns = o->pause * 1000};
    w.slots = slots_of(o->names[2], o->bytes, &w.slots_bytes);
    w.relay = share(sizeof *w.relay);
    pid_t parent = getpid(), child = fork();
    if (child == 0)
        relay_process(&w, parent);
    if (child < 0)
        die("fork: %s", strerror(errno));
    wait_for_children(&w.relay->answered, 1, NULL);
    attach_client(&w.ring, o->names[0]);
    find_workers(&w.ring);
    w.ring.worker_pids[w.ring.n_workers++] = (uint32_t)child; /* it, too, has to sleep */
    w.fd = plat_open_file(w.file, 1);
    if (w.fd < 0)
        die("%s: %s", w.file, strerror(-w.fd));
    plat_prefault(w.slots, w.slots_bytes, 0);
    uint32_t *order =
        sequence(o->seed, w.ring.info.n_experts, 2 * w.ring.info.n_slots, WAKE_KINDS * o->rounds * o->reads, NULL);
    for (uint64_t round = 0; round < o->rounds; round++)
        for (int kind = 0; kind < WAKE_KINDS; kind++, order += o->reads)
            wake_round(&w, o, round, kind, order);
    smoe_detach(w.ring.r);
    return 0;
}

/* --- the program ---------------------------------------------------------------------------------------- */

static int usage(void) {
    fprintf(stderr, "smoe-bench: usage: smoe-bench stream|bare|hit|miss|wake NAME.. --OPTION N ..; "
                    "it is started by `smoe-mp bench`\n");
    return 2;
}

static bool number(const char *text, uint64_t *out) {
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return errno == 0 && *text >= '0' && *text <= '9' && !*end;
}

static bool take_option(struct options *o, const char *name, const char *value) {
    const struct {
        const char *name;
        uint64_t *value;
    } all[] = {
        {"--reads", &o->reads},     {"--seed", &o->seed},     {"--batch", &o->batch},   {"--batches", &o->batches},
        {"--bytes", &o->bytes},     {"--slots", &o->slots},   {"--rounds", &o->rounds}, {"--processes", &o->processes},
        {"--repeats", &o->repeats}, {"--misses", &o->misses}, {"--ops", &o->ops},       {"--pause", &o->pause},
    };
    if (!value)
        return false;
    struct list *list = !strcmp(name, "--hits") ? &o->hits : !strcmp(name, "--clients") ? &o->clients : NULL;
    if (list)
        return list->n < LIST_MAX && number(value, &list->values[list->n++]);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(name, all[i].name))
            return number(value, all[i].value);
    return false;
}

static bool parse(struct options *o, int argc, char **argv) {
    for (int i = 2; i < argc; i++) {
        if (argv[i][0] != '-') {
            if (o->n_names == NAMES_MAX)
                return false;
            o->names[o->n_names++] = argv[i];
        } else if (!take_option(o, argv[i], i + 1 < argc ? argv[i + 1] : NULL)) {
            return false;
        } else {
            i++;
        }
    }
    return o->n_names > 0;
}

int main(int argc, char **argv) {
    struct options o = {0};
    if (argc < 2 || !parse(&o, argc, argv))
        return usage();
    if (o.clients.n == 0)
        o.clients = (struct list){{1}, 1};
    for (uint32_t i = 0; i < o.clients.n; i++)
        if (o.clients.values[i] < 1 || o.clients.values[i] > SMOE_CLIENTS)
            return usage();
    if (!strcmp(argv[1], "stream") && o.n_names == 1 && o.batch && o.batches && o.reads % o.batch == 0)
        return stream(&o);
    if (!strcmp(argv[1], "bare") && o.n_names == 2 && o.bytes && o.processes && o.slots >= o.processes)
        return bare(&o);
    if (!strcmp(argv[1], "hit") && o.repeats && o.ops)
        return hit(&o);
    if (!strcmp(argv[1], "miss") && o.misses && o.hits.n)
        return miss(&o);
    if (!strcmp(argv[1], "wake") && o.n_names == 3 && o.bytes && o.reads)
        return wake(&o);
    return usage();
}
