/* failpoint.c: see failpoint.h.  Armed by a process of one thread, for itself. */
#define _GNU_SOURCE
#include "failpoint.h"

#include "core.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

static const char *deadly, *hooked;
static unsigned passes_left;
static void (*hook_call)(void *);
static void *hook_arg;

void failpoint_arm(const char *name, unsigned nth) {
    deadly = name;
    passes_left = nth;
}

void failpoint_hook(const char *name, void (*hook)(void *), void *arg) {
    hooked = name;
    hook_call = hook;
    hook_arg = arg;
}

void failpoint(const char *name) {
    if (hooked && strcmp(name, hooked) == 0) {
        hooked = NULL; /* the hook may pass here itself */
        hook_call(hook_arg);
    }
    if (deadly && strcmp(name, deadly) == 0 && --passes_left == 0)
        for (;;) {
            kill(getpid(), SIGKILL);
            pause(); /* not one more step while the signal is on its way */
        }
}
