/* platform_macos.c: platform.h for macOS 14.4 and later, arm64 and x86-64.
 *
 * Facts about the world that the choices here rest on:
 *  - F_NOCACHE asks for uncached reads and cannot be proved: a read that is not aligned, or whose pages
 *    happen to be cached, is served through the cache all the same, and no error says so.  It also holds
 *    for cached reads: what they bring in is dropped behind them.
 *  - os_sync_wait_on_address sleeps on memory that processes share only where both sides say SHARED; then
 *    the key is the memory object and the offset in it, whatever the mapping's address.  Its time-outs are
 *    relative and in nanoseconds, although the only clock that it takes is called MACH_ABSOLUTE_TIME.
 *    It is new in 14.4; before, a program that calls it does not start.
 *  - POSIX shared memory is not in a file system.  It has no size limit that one could ask for, no device
 *    and no inode (fstat says 0 and 0), and takes neither locks nor fchmod nor fstatvfs.  It is swapped.
 *  - flock(2) locks belong to the open file description, as Linux's OFD locks do.  They cover whole files
 *    and cannot be asked after, only tried: so one file for each participant, and a way of trying that
 *    nobody takes for a claim (see "locks").
 */
#define _DARWIN_C_SOURCE
#include "platform.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <mach/vm_inherit.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/param.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysctl.h>
#include <time.h>
#include <unistd.h>

/* <os/os_sync_wait_on_address.h>, which SDKs before 14.4 and the cross compiler's headers lack. */
#define WAIT_SHARED              1u  /* OS_SYNC_WAIT_ON_ADDRESS_SHARED and OS_SYNC_WAKE_BY_ADDRESS_SHARED */
#define CLOCK_MACH_ABSOLUTE_TIME 32u /* OS_CLOCK_MACH_ABSOLUTE_TIME */
extern int os_sync_wait_on_address_with_timeout(void *address, uint64_t value, size_t size, uint32_t flags,
                                                uint32_t clock, uint64_t timeout_ns);
extern int os_sync_wake_by_address_any(void *address, size_t size, uint32_t flags);
extern int os_sync_wake_by_address_all(void *address, size_t size, uint32_t flags);

/* --- time, sleeping --------------------------------------------------------------------------------- */

/* The clock that plat_wait's time-outs count by, in nanoseconds, so that both halt while the machine
 * sleeps, as CLOCK_MONOTONIC does on Linux: a lid closed for an hour is no read that took an hour.
 * CLOCK_MONOTONIC and CLOCK_MONOTONIC_RAW go on counting here. */
uint64_t plat_now_ns(void) {
    return clock_gettime_nsec_np(CLOCK_UPTIME_RAW);
}

static void nap_ns(long ns) {
    const struct timespec t = {.tv_sec = 0, .tv_nsec = ns};
    (void)nanosleep(&t, NULL);
}

int plat_wait(const _Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    if (timeout_ns == 0) /* which the call refuses */
        timeout_ns = 1;
    if (os_sync_wait_on_address_with_timeout((void *)word, expected, sizeof *word, WAIT_SHARED,
                                             CLOCK_MACH_ABSOLUTE_TIME, timeout_ns) >= 0)
        return 0; /* how many others sleep there still */
    int os_error = errno;
    if (os_error == EFAULT) /* the page was swapped out: the caller's next look gets it back */
        return 0;
    /* Callers look again after any error.  One that does not sleep must not make them spin. */
    if (os_error != ETIMEDOUT && os_error != EINTR)
        nap_ns(timeout_ns < 1000000u ? (long)timeout_ns : 1000000);
    return -os_error;
}

void plat_wake(const _Atomic uint32_t *word, int count) {
    if (count <= 0) {
        while (os_sync_wake_by_address_all((void *)word, sizeof *word, WAIT_SHARED) != 0 && errno == EINTR) {
        }
        return;
    }
    for (int woken = 0; woken < count;)
        if (os_sync_wake_by_address_any((void *)word, sizeof *word, WAIT_SHARED) == 0)
            woken++;
        else if (errno != EINTR) /* ENOENT: nobody sleeps there */
            return;
}

void plat_relax(void) {
    sched_yield();
}

/* --- memory ----------------------------------------------------------------------------------------- */

static int sysctl_number(const char *name, void *number, size_t bytes) {
    size_t got = bytes;
    if (sysctlbyname(name, number, &got, NULL, 0) != 0)
        return -errno;
    return got == bytes ? 0 : -EINVAL;
}

static size_t page_bytes(void) {
    return (size_t)getpagesize(); /* 16 KiB on arm64, 4 KiB on x86-64, under Rosetta too */
}

/* There is no call that reserves, and no free space to look at before: pages are had by writing one byte
 * of each.  Beyond the machine's memory that would end in the kernel's killing whom it likes, so it is
 * refused; below, what others leave of it is judged beforehand, by plat_memory_level.  The rest is the
 * swap's: a page that was there once is never missing, at worst it is slow. */
int plat_populate(void *address, size_t bytes, int fd, int huge) {
    uint64_t memory = 0;
    (void)fd;
    (void)huge; /* shared memory has none here */
    if (sysctl_number("hw.memsize", &memory, sizeof memory) == 0 && bytes > memory)
        return -ENOMEM;
    volatile unsigned char *page = address;
    for (size_t at = 0; at < bytes; at += page_bytes())
        page[at] = page[at]; /* nobody else is here yet */
    return 0;
}

/* Reading is enough to map a page that exists, and the only thing that others may not notice. */
void plat_prefault(void *address, size_t bytes, int writable) {
    const volatile unsigned char *page = address;
    (void)writable;
    for (size_t at = 0; at < bytes; at += page_bytes())
        (void)page[at];
}

uint64_t plat_resident(void *address, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), piece = 4096 * page;
    char seen[4096];
    uint64_t resident = 0;
    for (size_t at = 0; at < bytes; at += piece) {
        size_t now = bytes - at < piece ? bytes - at : piece;
        if (mincore((char *)address + at, now, seen) != 0)
            return 0;
        for (size_t i = 0; i < (now + page - 1) / page; i++)
            resident += (seen[i] & 1) * page;
    }
    return resident < bytes ? resident : bytes;
}

void plat_dontfork(void *address, size_t bytes) {
    (void)minherit(address, bytes, VM_INHERIT_NONE);
}

int plat_memory_level(void) {
    int percent;
    int rc = sysctl_number("kern.memorystatus_level", &percent, sizeof percent);
    if (rc)
        return rc;
    return percent < 0 ? 0 : percent > 100 ? 100 : percent;
}

/* --- files ------------------------------------------------------------------------------------------ */

int plat_open_file(const char *path, int direct) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    (void)fcntl(fd, F_RDAHEAD, 0); /* experts are picked at random */
    /* For cached reads too: it is what drops their pages. */
    if (fcntl(fd, F_NOCACHE, 1) < 0 && direct) {
        int os_error = errno;
        close(fd);
        return -os_error;
    }
    return fd;
}

/* Local file systems inside the kernel: a process killed inside a read there is not reaped before the
 * transfer has ended.  Those of FSKit and macFUSE (exfat and msdos lately) are processes: other. */
static const struct {
    const char *name;
    enum plat_fs kind;
} file_systems[] = {
    {"apfs", PLAT_FS_BLOCK},
    {"hfs", PLAT_FS_BLOCK}, /* also what `hdiutil attach ram://` makes: to its reader a block device */
    {"tmpfs", PLAT_FS_MEMORY},
};

void plat_file_info(int fd, struct plat_file_info *info) {
    struct statfs fs;
    info->kind = PLAT_FS_OTHER; /* nfs, smbfs, webdav, afpfs, macfuse, lifs, ... */
    /* APFS's block.  Nothing is refused for its alignment, it is only read through the cache. */
    info->mem_align = info->offset_align = 4096;
    snprintf(info->fs, sizeof info->fs, "unknown");
    if (fstatfs(fd, &fs) != 0)
        return;
    snprintf(info->fs, sizeof info->fs, "%s", fs.f_fstypename);
    for (size_t i = 0; i < sizeof file_systems / sizeof *file_systems; i++)
        if ((fs.f_flags & MNT_LOCAL) && strcmp(fs.f_fstypename, file_systems[i].name) == 0)
            info->kind = file_systems[i].kind;
}

void plat_drop_cache(int fd, uint64_t offset, uint64_t bytes) {
    (void)fd; /* F_NOCACHE, set at open, has dropped them */
    (void)offset;
    (void)bytes;
}

/* mincore would tell, but whether a page lay in the cache before, and whether a read of less than a 16 KiB
 * page leaves it there for good, it does not: better no answer than that every file is "buffered". */
_Bool plat_is_cached(int fd, uint64_t offset) {
    (void)fd;
    (void)offset;
    return 0;
}

int plat_refuses_direct(int os_error) {
    return os_error == EINVAL || os_error == ENOTSUP || os_error == EOPNOTSUPP || os_error == ENOTTY;
}

int64_t plat_mtime_ns(const void *stat_buffer) {
    const struct stat *s = stat_buffer;
    return (int64_t)s->st_mtimespec.tv_sec * 1000000000 + s->st_mtimespec.tv_nsec;
}

/* --- locks ------------------------------------------------------------------------------------------
 *
 * A file for each participant, CACHE/smoe-mp/locks/SEGMENT/ID, made at its first use, mode 0600, never
 * unlinked: were it, two processes could hold the "same" lock, on two files.  CACHE is the user's folder
 * under /var/folders that confstr names, whatever the environment: made by the system, mode 0700, and not
 * swept as /tmp is (after three days without an access).  It may be emptied at a start of the machine,
 * which no ring outlives either.  Since the folder is the user's, a ring of another user is refused, even
 * to root, who would look in a folder of his own and take everybody for dead.
 *
 * Exclusive is the claim.  A query takes the file shared, on a descriptor of its own, for the moment
 * between two system calls: refused means held, and nobody can be misled by it, for shared is never a
 * claim.  It is not "trying the lock": that would be taking it exclusively, and whoever did could be taken
 * for its owner.  What is left is that a claim may meet a query's moment: plat_lock_try then sees that the
 * file can be shared, so that nobody has it, and comes again.
 *
 * A lock handle is the descriptor of the segment's folder.  The files locked under it are in a table of
 * this process, without a mutex: a forked child, where handles are closed, would find it locked by a
 * thread that it has not got.  Entries of one handle are its user's; two threads never use the same one. */

#define HELD_MAX   1024
#define HELD_TAKEN UINT64_MAX

static struct {
    _Atomic uint64_t key; /* handle + 1 and id; 0: free; HELD_TAKEN: being filled */
    _Atomic int fd;
} held[HELD_MAX];

static uint64_t key_of(int handle, uint32_t id) {
    return ((uint64_t)handle + 1) << 32 | id;
}

/* Not by printf: a forked child comes here, where nothing that takes a lock may be called. */
static void lock_file_name(char out[12], uint32_t id) {
    char *end = out;
    for (uint32_t n = id; end == out || n; n /= 10)
        end++;
    *end = 0;
    for (uint32_t n = id; end > out; n /= 10)
        *--end = (char)('0' + n % 10);
}

/* Is the descriptor still that file?  closefrom and its like may have closed it behind us, and its number
 * may be somebody else's now. */
static bool still_ours(uint64_t key, int fd) {
    char name[12];
    struct stat a, b;
    lock_file_name(name, (uint32_t)key);
    return fstat(fd, &a) == 0 && fstatat((int)(key >> 32) - 1, name, &b, AT_SYMLINK_NOFOLLOW) == 0 &&
           a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Index of the file held under this handle, or -1. */
static int held_find(int handle, uint32_t id) {
    uint64_t key = key_of(handle, id);
    for (int i = 0; i < HELD_MAX; i++) {
        if (atomic_load_explicit(&held[i].key, memory_order_acquire) != key)
            continue;
        if (still_ours(key, atomic_load_explicit(&held[i].fd, memory_order_relaxed)))
            return i;
        atomic_store_explicit(&held[i].key, 0, memory_order_release);
    }
    return -1;
}

static int held_add(int handle, uint32_t id, int fd) {
    for (int i = 0; i < HELD_MAX; i++) {
        uint64_t none = 0;
        if (!atomic_compare_exchange_strong_explicit(&held[i].key, &none, HELD_TAKEN, memory_order_acquire,
                                                     memory_order_relaxed))
            continue;
        atomic_store_explicit(&held[i].fd, fd, memory_order_relaxed);
        atomic_store_explicit(&held[i].key, key_of(handle, id), memory_order_release);
        return i;
    }
    return -ENFILE;
}

static void held_remove(int i) {
    int fd = atomic_load_explicit(&held[i].fd, memory_order_relaxed);
    atomic_store_explicit(&held[i].key, 0, memory_order_release);
    close(fd);
}

/* The files locked under a handle number, closed but not unlocked: in a forked child they are the parent's. */
static void held_forget(int handle) {
    for (int i = 0; i < HELD_MAX; i++) {
        uint64_t key = atomic_load_explicit(&held[i].key, memory_order_acquire);
        if (key == HELD_TAKEN || key >> 32 != (uint64_t)handle + 1)
            continue;
        if (still_ours(key, atomic_load_explicit(&held[i].fd, memory_order_relaxed)))
            held_remove(i);
        else
            atomic_store_explicit(&held[i].key, 0, memory_order_release);
    }
}

/* A folder of this user's and nobody else's, made if it is missing. */
static int open_folder(int parent, const char *name) {
    struct stat st;
    if (mkdirat(parent, name, 0700) != 0 && errno != EEXIST)
        return -errno;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = fstat(fd, &st) != 0 ? -errno : st.st_uid != geteuid() || (st.st_mode & 077) ? -EPERM : 0;
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}

static int open_lock_folder(const char *segment) {
    const char *const below[] = {"smoe-mp", "locks", segment};
    char cache[PATH_MAX];
    size_t n = confstr(_CS_DARWIN_USER_CACHE_DIR, cache, sizeof cache);
    if (n == 0 || n > sizeof cache)
        return -ENOENT;
    int fd = open(cache, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    for (size_t i = 0; i < sizeof below / sizeof *below; i++) {
        int parent = fd;
        fd = open_folder(parent, below[i]);
        close(parent);
        if (fd < 0)
            return fd;
    }
    return fd;
}

/* Is there such a segment, and is it this user's? */
static int check_owner(const char *segment_name) {
    struct stat st;
    int fd = shm_open(segment_name, O_RDWR);
    if (fd < 0)
        return -errno;
    int rc = fstat(fd, &st) != 0 ? -errno : st.st_uid != geteuid() ? -EPERM : 0;
    close(fd);
    return rc;
}

int plat_lock_open(const char *segment_name) {
    int rc = check_owner(segment_name);
    if (rc)
        return rc;
    int handle = open_lock_folder(segment_name + strspn(segment_name, "/"));
    if (handle >= 0)
        held_forget(handle); /* an earlier handle of this number, closed behind us */
    return handle;
}

void plat_lock_close(int lock_fd) {
    held_forget(lock_fd);
    close(lock_fd);
}

_Bool plat_lock_is_of(int lock_fd, const char *segment_name) {
    (void)lock_fd; /* lock files go by the segment's name and are never removed */
    (void)segment_name;
    return 1;
}

static int open_lock_file(int handle, uint32_t id, int flags) {
    char name[12];
    lock_file_name(name, id);
    int fd = openat(handle, name, flags | O_CLOEXEC | O_NOFOLLOW, 0600);
    return fd < 0 ? -errno : fd;
}

static int flock_now(int fd, int how) {
    while (flock(fd, how | LOCK_NB) != 0)
        if (errno != EINTR)
            return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    return 0;
}

/* Exclusively, past those who only look. */
static int claim(int fd) {
    for (int tries = 0; tries < 1000; tries++) {
        int rc = flock_now(fd, LOCK_EX);
        if (rc != -EAGAIN)
            return rc;
        rc = flock_now(fd, LOCK_SH);
        if (rc)
            return rc; /* -EAGAIN: somebody has it exclusively */
        flock(fd, LOCK_UN);
        nap_ns(20000 + 1000l * (getpid() % 64)); /* two that claim must not go on meeting */
    }
    return -EAGAIN;
}

int plat_lock_try(int lock_fd, uint32_t id) {
    if (held_find(lock_fd, id) >= 0)
        return 0;
    int fd = open_lock_file(lock_fd, id, O_RDWR | O_CREAT);
    if (fd < 0)
        return fd;
    int i = held_add(lock_fd, id, fd); /* first, so that a child forked meanwhile closes it */
    if (i < 0) {
        close(fd);
        return i;
    }
    int rc = claim(fd);
    if (rc)
        held_remove(i);
    return rc;
}

int plat_lock_drop(int lock_fd, uint32_t id) {
    int i = held_find(lock_fd, id);
    if (i < 0)
        return 0;
    /* Not by the close alone: a child forked by another library's thread may have the descriptor still. */
    flock(atomic_load_explicit(&held[i].fd, memory_order_relaxed), LOCK_UN);
    held_remove(i);
    return 0;
}

int plat_lock_query(int lock_fd, uint32_t id) {
    if (held_find(lock_fd, id) >= 0)
        return 0;
    int fd = open_lock_file(lock_fd, id, O_RDONLY);
    if (fd < 0)
        return fd == -ENOENT ? 0 : fd; /* nobody ever had it */
    int rc = flock_now(fd, LOCK_SH);
    if (rc == 0)
        flock(fd, LOCK_UN);
    close(fd);
    return rc == -EAGAIN ? 1 : rc;
}

/* --- limits ----------------------------------------------------------------------------------------- */

uint64_t plat_pid_namespace(void) {
    return 0;
}

_Bool plat_has_crc32c(void) {
    int has = 0;
    return sysctl_number("hw.optional.armv8_crc32", &has, sizeof has) == 0 && has;
}

/* A hard limit of "infinity" may not be asked for; kern.maxfilesperproc is what there is. */
uint64_t plat_raise_nofile(void) {
    struct rlimit r;
    int most = 0;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0)
        return 0;
    if (sysctl_number("kern.maxfilesperproc", &most, sizeof most) != 0 || most <= 0)
        most = OPEN_MAX;
    rlim_t limit = r.rlim_max < (rlim_t)most ? r.rlim_max : (rlim_t)most;
    if (r.rlim_cur < limit) {
        struct rlimit raised = {.rlim_cur = limit, .rlim_max = r.rlim_max};
        if (setrlimit(RLIMIT_NOFILE, &raised) == 0)
            r = raised;
    }
    return r.rlim_cur < limit ? r.rlim_cur : limit;
}
