/* worker_main.c: the program smoe-worker: one I/O worker of a ring, started by the supervisor.
 *
 *     smoe-worker --name NAME --id N --creation HEX [--files HEX] [--watch-fd FD] [--ready-fd FD]
 *
 * --files: the checksum of the files' records as the supervisor has them.  By those a worker opens files, and one that
 * starts later may find them written over.
 *
 * Exit status: 0 told to end, 1 it could not start (one line on stderr says why), 2 wrong usage,
 * 3 the supervisor died.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static volatile sig_atomic_t stop;

static void on_term(int sig) {
    (void)sig;
    stop = 1;
}

static int usage(void) {
    fprintf(stderr, "smoe-worker: usage: smoe-worker --name NAME --id N --creation HEX [--files HEX] "
                    "[--watch-fd FD] [--ready-fd FD]; it is started by `smoe-mp up`\n");
    return 2;
}

static int number(const char *text, long least, long most, long *out) {
    char *end;
    *out = strtol(text, &end, 10);
    return *text && !*end && *out >= least && *out <= most;
}

static void catch_signals(void) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    sigemptyset(&a.sa_mask);
    a.sa_handler = on_term; /* no SA_RESTART: a sleep ends, a read is resumed by its caller */
    sigaction(SIGTERM, &a, NULL);
    a.sa_handler = SIG_IGN; /* Ctrl-C is the supervisor's to handle */
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGHUP, &a, NULL);
    sigaction(SIGPIPE, &a, NULL);
}

int main(int argc, char **argv) {
    const char *name = NULL, *creation = NULL, *files = NULL;
    long id = -1, watch_fd = -1, ready_fd = -1;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 >= argc)
            return usage();
        if (!strcmp(argv[i], "--name"))
            name = argv[i + 1];
        else if (!strcmp(argv[i], "--creation"))
            creation = argv[i + 1];
        else if (!strcmp(argv[i], "--files"))
            files = argv[i + 1];
        else if (!(!strcmp(argv[i], "--id") && number(argv[i + 1], 0, SMOE_WORKERS - 1, &id)) &&
                 !(!strcmp(argv[i], "--watch-fd") && number(argv[i + 1], 0, 1 << 20, &watch_fd)) &&
                 !(!strcmp(argv[i], "--ready-fd") && number(argv[i + 1], 0, 1 << 20, &ready_fd)))
            return usage();
    }
    if (!name || id < 0 || !creation)
        return usage();
    catch_signals();

    smoe_ring *ring;
    smoe_error e = {0};
    char label[32];
    snprintf(label, sizeof label, "worker %ld", id);
    int rc = smoe_attach(name, SMOE_ROLE_WORKER, (uint32_t)id, label, &ring, &e);
    if (rc < 0) {
        char text[512];
        smoe_error_text(NULL, &e, text, sizeof text);
        fprintf(stderr, "smoe-worker: ring %s: %s\n", name, text);
        return 1;
    }
    char hex[33];
    snprintf(hex, sizeof hex, "%016" PRIx64 "%016" PRIx64, ring->header->creation[0], ring->header->creation[1]);
    if (strcmp(hex, creation) != 0) {
        fprintf(stderr, "smoe-worker: ring %s: is %s, not %s: it was replaced\n", name, hex, creation);
        smoe_detach(ring);
        return 1;
    }
    snprintf(hex, sizeof hex, "%08" PRIx32, smoe_files_sum(ring));
    if (files && strcmp(hex, files) != 0) {
        fprintf(stderr,
                "smoe-worker: ring %s: somebody has written over its shared memory: the records of its files have "
                "the checksum %s, not %s: stop the system and start it anew\n",
                name, hex, files);
        smoe_detach(ring);
        return 1;
    }
    const struct worker_options options = {.watch_fd = (int)watch_fd, .ready_fd = (int)ready_fd, .stop = &stop};
    rc = worker_run(ring, &options, &e);
    if (rc < 0) {
        fprintf(stderr, "smoe-worker: %s: %s: %s", rc == SMOE_EREAD ? smoe_file_path(ring, e.file) : name, e.call,
                e.os_error == SMOE_READ_CHANGED ? "the file is not the one that the ring was made for"
                                                : strerror(e.os_error));
        if (e.os_error == EMFILE)
            fprintf(stderr, ": the limit is %" PRIu64 " open files, a worker needs 16: raise `ulimit -n`", e.wanted);
        fprintf(stderr, "\n");
    }
    smoe_detach(ring);
    return rc < 0 ? 1 : 0;
}
