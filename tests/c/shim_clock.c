/* shim_clock.c: a wall clock that can be set while a program runs, put under it by LD_PRELOAD.  Built by the
 * tests with cc.
 *
 *   SHIM_CLOCK=PATH  the first 8 bytes of the file are added to CLOCK_REALTIME: nanoseconds, an int64
 *
 * The file is mapped, so what is written into it counts from then on, in all programs.  Other clocks are the
 * kernel's: CLOCK_MONOTONIC cannot be set back in the life of a process, whatever happens to the wall clock.
 * The times that the kernel stamps on files are its own, too.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static _Atomic int64_t *offset;

__attribute__((constructor)) static void configure(void) {
    const char *path = getenv("SHIM_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED)
        offset = at;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    if (syscall(SYS_clock_gettime, clock, t) != 0)
        return -1;
    if (offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = t->tv_sec * SECOND + t->tv_nsec + *offset;
        *t = (struct timespec){.tv_sec = ns / SECOND, .tv_nsec = ns % SECOND};
    }
    return 0;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *t = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t)
        *t = now.tv_sec;
    return now.tv_sec;
}
