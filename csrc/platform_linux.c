/* platform_linux.c: platform.h for Linux 5.14 and later (older ones fall back where they can).
 *
 * Facts about the world that the choices here rest on:
 *  - O_DIRECT may be accepted at open and refused at the read, and either way by EINVAL.  Only a real
 *    read proves it; worker.c treats EINVAL and EOPNOTSUPP from both the same.
 *  - Open-file-description locks belong to the description, not to the process: a descriptor opened
 *    twice is two lockers, one inherited over fork is the same locker.  They are dropped at the last
 *    close, so by any death.
 *  - MADV_POPULATE_WRITE fails with EFAULT where tmpfs has no space, where a plain touch is a SIGBUS.
 *  - posix_fallocate on tmpfs allocates small pages, so huge pages must be asked for before it.
 *  - A time namespace, which a container may have, shifts the monotonic clock by what /proc says: taken off again,
 *    the clock is the machine's.
 */
#define _GNU_SOURCE
#include "platform.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

static uint64_t shift_ns; /* modulo 2^64, since a shift may be one back */

/* Before anybody asks for the time.  A process cannot come into another time namespace without a fork. */
__attribute__((constructor)) static void find_shift(void) {
    long long s, ns;
    FILE *f = fopen("/proc/self/timens_offsets", "re");
    if (!f)
        return;
    if (fscanf(f, "monotonic %lld %lld", &s, &ns) == 2)
        shift_ns = (uint64_t)s * 1000000000u + (uint64_t)ns;
    fclose(f);
}

uint64_t plat_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec - shift_ns;
}

int plat_wait(const _Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    struct timespec t = {.tv_sec = (time_t)(timeout_ns / 1000000000u), .tv_nsec = (long)(timeout_ns % 1000000000u)};
    /* Not FUTEX_PRIVATE: the word lies in memory that processes share. */
    if (syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, NULL, 0) == 0 || errno == EAGAIN)
        return 0;
    return -errno;
}

void plat_wake(const _Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE, count > 0 ? count : 0x7FFFFFFF, NULL, NULL, 0);
}

void plat_relax(void) {
    sched_yield();
}

int plat_populate(void *address, size_t bytes, int fd, int huge) {
    int got_huge = huge && madvise(address, bytes, MADV_HUGEPAGE) == 0;
    if (madvise(address, bytes, MADV_POPULATE_WRITE) == 0)
        return got_huge;
    if (errno != EINVAL) /* EINVAL: a kernel before 5.14 */
        return errno == EFAULT ? -ENOSPC : -errno;
    int rc = posix_fallocate(fd, 0, (off_t)bytes);
    return rc ? -rc : got_huge;
}

void plat_prefault(void *address, size_t bytes, int writable) {
    /* Best effort: the pages are there, only this map's page tables may still be empty. */
    (void)madvise(address, bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

uint64_t plat_resident(void *address, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), piece = 4096 * page;
    unsigned char seen[4096];
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
    (void)madvise(address, bytes, MADV_DONTFORK);
}

int plat_memory_level(void) {
    return -ENOSYS;
}

int plat_open_file(const char *path, int direct) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
    if (fd < 0)
        return -errno;
    if (!direct)
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* no read-ahead: experts are picked at random */
    return fd;
}

/* Local file systems on block devices: a process killed inside a read there is not reaped before the
 * transfer has ended, so a slot that it was reading into is quiet once it is gone. */
static const struct {
    long magic;
    enum plat_fs kind;
    const char *name;
} file_systems[] = {
    {EXT4_SUPER_MAGIC, PLAT_FS_BLOCK, "ext4"},
    {0x58465342, PLAT_FS_BLOCK, "xfs"},
    {BTRFS_SUPER_MAGIC, PLAT_FS_BLOCK, "btrfs"},
    {F2FS_SUPER_MAGIC, PLAT_FS_BLOCK, "f2fs"},
    {0x2FC12FC1, PLAT_FS_BLOCK, "zfs"},
    {0xCA451A4E, PLAT_FS_BLOCK, "bcachefs"},
    {0x7366746E, PLAT_FS_BLOCK, "ntfs3"},
    {0x2011BAB0, PLAT_FS_BLOCK, "exfat"},
    {MSDOS_SUPER_MAGIC, PLAT_FS_BLOCK, "vfat"},
    {ISOFS_SUPER_MAGIC, PLAT_FS_BLOCK, "iso9660"},
    {SQUASHFS_MAGIC, PLAT_FS_BLOCK, "squashfs"},
    {0xE0F5E1E2, PLAT_FS_BLOCK, "erofs"},
    {OVERLAYFS_SUPER_MAGIC, PLAT_FS_OTHER, "overlay"}, /* what lies below is not known */
    {TMPFS_MAGIC, PLAT_FS_MEMORY, "tmpfs"},
    {RAMFS_MAGIC, PLAT_FS_MEMORY, "ramfs"},
    {HUGETLBFS_MAGIC, PLAT_FS_MEMORY, "hugetlbfs"},
    {NFS_SUPER_MAGIC, PLAT_FS_OTHER, "nfs"},
    {SMB_SUPER_MAGIC, PLAT_FS_OTHER, "smb"},
    {0xFE534D42, PLAT_FS_OTHER, "smb2"},
    {0xFF534D42, PLAT_FS_OTHER, "cifs"},
    {V9FS_MAGIC, PLAT_FS_OTHER, "9p"},
    {0x65735546, PLAT_FS_OTHER, "fuse"},
    {0x00C36400, PLAT_FS_OTHER, "ceph"},
};

void plat_file_info(int fd, struct plat_file_info *info) {
    struct statfs fs;
    info->kind = PLAT_FS_OTHER;
    info->mem_align = info->offset_align = 4096;
    snprintf(info->fs, sizeof info->fs, "unknown");
    if (fstatfs(fd, &fs) == 0) {
        snprintf(info->fs, sizeof info->fs, "type 0x%lx", (unsigned long)fs.f_type);
        for (size_t i = 0; i < sizeof file_systems / sizeof *file_systems; i++)
            if ((unsigned int)file_systems[i].magic == (unsigned int)fs.f_type) {
                info->kind = file_systems[i].kind;
                snprintf(info->fs, sizeof info->fs, "%s", file_systems[i].name);
            }
    }
#ifdef STATX_DIOALIGN
    struct statx x;
    memset(&x, 0, sizeof x);
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &x) == 0 && (x.stx_mask & STATX_DIOALIGN) &&
        x.stx_dio_offset_align) {
        info->mem_align = x.stx_dio_mem_align;
        info->offset_align = x.stx_dio_offset_align;
    }
#endif
}

void plat_drop_cache(int fd, uint64_t offset, uint64_t bytes) {
    /* Outward to 1 MiB: partial pages are not dropped, and file systems with blocks of their own (squashfs,
     * compressed extents of btrfs) bring all of a block in. */
    const uint64_t unit = 1u << 20, from = offset / unit * unit, to = (offset + bytes + unit - 1) / unit * unit;
    (void)posix_fadvise(fd, (off_t)from, (off_t)(to - from), POSIX_FADV_DONTNEED);
}

/* By mincore: a trial read with RWF_NOWAIT would start read-ahead and so answer itself.  The kernel says
 * "resident" of everything to who may not write the file; then nothing can be told. */
_Bool plat_is_cached(int fd, uint64_t offset) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char resident = 0;
    void *map = mmap(NULL, page, PROT_READ, MAP_SHARED, fd, (off_t)offset);
    if (map == MAP_FAILED)
        return 0;
    if (mincore(map, page, &resident) != 0)
        resident = 0;
    munmap(map, page);
    return resident & 1;
}

int plat_refuses_direct(int os_error) {
    return os_error == EINVAL || os_error == EOPNOTSUPP;
}

int64_t plat_mtime_ns(const void *stat_buffer) {
    const struct stat *s = stat_buffer;
    return (int64_t)s->st_mtim.tv_sec * 1000000000 + s->st_mtim.tv_nsec;
}

int plat_lock_open(const char *segment_name) {
    int fd = shm_open(segment_name, O_RDWR, 0);
    return fd < 0 ? -errno : fd; /* shm_open sets close-on-exec */
}

void plat_lock_close(int lock_fd) {
    close(lock_fd);
}

_Bool plat_lock_is_of(int lock_fd, const char *segment_name) {
    struct stat locked, named;
    int fd = shm_open(segment_name, O_RDONLY, 0);
    _Bool same = fd >= 0 && fstat(fd, &named) == 0 && fstat(lock_fd, &locked) == 0 && named.st_dev == locked.st_dev &&
                 named.st_ino == locked.st_ino;
    if (fd >= 0)
        close(fd);
    return same;
}

static int lock_op(int fd, int op, uint32_t id, short type, struct flock *out) {
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = id, .l_len = 1};
    if (fcntl(fd, op, &l) != 0)
        return errno == EACCES ? -EAGAIN : -errno;
    if (out)
        *out = l;
    return 0;
}

int plat_lock_try(int lock_fd, uint32_t id) {
    return lock_op(lock_fd, F_OFD_SETLK, id, F_WRLCK, NULL);
}

int plat_lock_drop(int lock_fd, uint32_t id) {
    return lock_op(lock_fd, F_OFD_SETLK, id, F_UNLCK, NULL);
}

int plat_lock_query(int lock_fd, uint32_t id) {
    struct flock l = {.l_type = F_UNLCK};
    int rc = lock_op(lock_fd, F_OFD_GETLK, id, F_WRLCK, &l);
    return rc ? rc : l.l_type != F_UNLCK;
}

uint64_t plat_pid_namespace(void) {
    struct stat s;
    return stat("/proc/self/ns/pid", &s) == 0 ? s.st_ino : 0;
}

/* On arm64 the kernel says it in the auxiliary vector; elsewhere nobody asks. */
_Bool plat_has_crc32c(void) {
#ifdef __aarch64__
    return getauxval(AT_HWCAP) & HWCAP_CRC32;
#else
    return 0;
#endif
}

uint64_t plat_raise_nofile(void) {
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0)
        return 0;
    if (r.rlim_cur < r.rlim_max) {
        struct rlimit raised = {.rlim_cur = r.rlim_max, .rlim_max = r.rlim_max};
        if (setrlimit(RLIMIT_NOFILE, &raised) == 0)
            r = raised;
    }
    return r.rlim_cur;
}
