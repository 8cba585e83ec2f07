/* shim_pread.c: faults of reading, put under a smoe-worker by LD_PRELOAD.  Built by the tests with cc.
 *
 * The program's pread and open go on to the kernel, save where a variable of the environment says
 * otherwise.  A "direct" read is one whose descriptor has O_DIRECT.  Numbers count from 1.
 *
 *   SHIM_HALVES=N          direct reads from the N-th on return half of what was asked, and leave rubbish
 *                          in the other half of the buffer
 *   SHIM_EINTR=1           every other read is interrupted
 *   SHIM_REFUSE=N:ERRNO    direct reads from the N-th on fail with ERRNO
 *   SHIM_REFUSE_OPEN=ERRNO opening with O_DIRECT fails with ERRNO
 *   SHIM_NTH=N:ERRNO       the N-th read alone fails with ERRNO
 *   SHIM_AT=OFFSET:ERRNO:TIMES[,...]
 *                          reads over byte OFFSET fail with ERRNO, TIMES times (0: always)
 *   SHIM_HANG=OFFSET:PATH  reads over byte OFFSET begin when there is no file PATH
 *   SHIM_GUARD=SLOT:PATH   a line in PATH for each read that leads out of its file (whose last block of 4096 bytes
 *                          counts whole), or to shared memory and out of a slot of SLOT bytes; and one for the first
 *   SHIM_LOG=PATH          a line for each read: d or b, offset, bytes asked, result or -errno
 *
 * The worker reads in one thread, so plain counters do.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct fault_at {
    long long offset, error, left; /* left < 0: always */
};

static long long halves_from, refuse_from, refuse_error, open_error, nth, nth_error, hang_at;
static int interrupt, log_fd = -1, guard_fd = -1;
static long long guarded_slot, guarded;
static const char *hang_file;
static struct fault_at faults[16];
static int n_faults;
static long long reads, direct_reads, calls;

static long long field(const char **text) {
    char *end;
    long long value = strtoll(*text, &end, 10);
    *text = *end ? end + 1 : end;
    return value;
}

__attribute__((constructor)) static void configure(void) {
    const char *v;
    if ((v = getenv("SHIM_HALVES")))
        halves_from = field(&v);
    if ((v = getenv("SHIM_EINTR")))
        interrupt = field(&v) != 0;
    if ((v = getenv("SHIM_REFUSE"))) {
        refuse_from = field(&v);
        refuse_error = field(&v);
    }
    if ((v = getenv("SHIM_REFUSE_OPEN")))
        open_error = field(&v);
    if ((v = getenv("SHIM_NTH"))) {
        nth = field(&v);
        nth_error = field(&v);
    }
    if ((v = getenv("SHIM_AT")))
        while (*v && n_faults < 16) {
            struct fault_at *f = &faults[n_faults++];
            f->offset = field(&v);
            f->error = field(&v);
            f->left = field(&v);
            if (f->left == 0)
                f->left = -1;
        }
    if ((v = getenv("SHIM_HANG"))) {
        hang_at = field(&v);
        hang_file = v;
    }
    if ((v = getenv("SHIM_GUARD"))) {
        guarded_slot = field(&v);
        guard_fd = (int)syscall(SYS_openat, AT_FDCWD, v, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    if ((v = getenv("SHIM_LOG")))
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, v, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int covers(long long at, off_t offset, size_t count) {
    return at >= offset && at - offset < (long long)count;
}

static void hang(off_t offset, size_t count) {
    const struct timespec nap = {.tv_nsec = 1000000};
    if (hang_file && covers(hang_at, offset, count))
        while (access(hang_file, F_OK) == 0)
            nanosleep(&nap, NULL);
}

static long long fault(off_t offset, size_t count, int direct) {
    if (direct && refuse_from && direct_reads >= refuse_from)
        return refuse_error;
    if (nth && reads == nth)
        return nth_error;
    for (int i = 0; i < n_faults; i++)
        if (covers(faults[i].offset, offset, count) && faults[i].left) {
            faults[i].left -= faults[i].left > 0;
            return faults[i].error;
        }
    return 0;
}

/* Where the map of shared memory begins that has the address, and whether it is of data; 0: none has. */
static uintptr_t map_of(uintptr_t at, int *data) {
    char line[600];
    unsigned long from, to;
    uintptr_t found = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && !found && fgets(line, sizeof line, maps))
        if (strstr(line, "/dev/shm/smoe.") && sscanf(line, "%lx-%lx", &from, &to) == 2 && at >= from && at < to) {
            found = from;
            *data = strstr(line, ".d\n") != NULL;
        }
    if (maps)
        fclose(maps);
    return found;
}

static void guard(int fd, const void *to, size_t count, off_t offset) {
    struct stat st;
    char line[200];
    int data = 0;
    uintptr_t map = map_of((uintptr_t)to, &data);
    const char *what = guarded++ ? NULL : "first";
    if (fstat(fd, &st) != 0 || offset < 0 || offset > st.st_size ||
        (long long)count > (st.st_size + 4095) / 4096 * 4096 - offset)
        what = "out of the file";
    else if (map && (!data || (long long)(((uintptr_t)to - map) % (uintptr_t)guarded_slot + count) > guarded_slot))
        what = "out of the slot";
    if (what) {
        int n = snprintf(line, sizeof line, "%s: %zu bytes at %lld to %p\n", what, count, (long long)offset, to);
        (void)!write(guard_fd, line, (size_t)n);
    }
}

static void note(int direct, off_t offset, size_t count, long long result) {
    char line[128];
    if (log_fd < 0)
        return;
    int n = snprintf(line, sizeof line, "%c %lld %zu %lld\n", direct ? 'd' : 'b', (long long)offset, count, result);
    (void)!write(log_fd, line, (size_t)n);
}

ssize_t pread(int fd, void *to, size_t count, off_t offset) {
    int flags = fcntl(fd, F_GETFL), direct = flags >= 0 && (flags & O_DIRECT);
    if (interrupt && ++calls % 2) {
        errno = EINTR;
        return -1;
    }
    if (guard_fd >= 0)
        guard(fd, to, count, offset);
    reads++;
    direct_reads += direct;
    hang(offset, count);
    long long error = fault(offset, count, direct);
    ssize_t n = -1;
    if (error) {
        errno = (int)error;
    } else {
        n = syscall(SYS_pread64, fd, to, count, offset);
        if (n > 1 && direct && halves_from && direct_reads >= halves_from) {
            memset((char *)to + n / 2, 0xEE, (size_t)(n - n / 2));
            n /= 2;
        }
    }
    int kept = errno;
    note(direct, offset, count, n < 0 ? -(long long)kept : (long long)n);
    errno = kept;
    return n;
}

ssize_t pread64(int fd, void *to, size_t count, off_t offset) {
    return pread(fd, to, count, offset);
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, unsigned) : 0;
    va_end(arguments);
    if (open_error && (flags & O_DIRECT)) {
        errno = (int)open_error;
        return -1;
    }
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, unsigned) : 0;
    va_end(arguments);
    return open(path, flags, mode);
}
