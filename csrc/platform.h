/* platform.h: what differs between operating systems, behind one set of functions.
 *
 * platform_linux.c and platform_macos.c each define all of them; no other file has an OS #ifdef.
 * Functions return a value >= 0 or -errno.
 */
#ifndef SMOE_PLATFORM_H
#define SMOE_PLATFORM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Monotonic time, the same for every process of the machine. */
uint64_t plat_now_ns(void);

/* Sleep while *word == expected, at most timeout_ns.  0: woken or changed; -ETIMEDOUT; -EINTR.
 * The word may lie in memory shared between processes. */
int plat_wait(const _Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
void plat_wake(const _Atomic uint32_t *word, int count); /* count <= 0: everyone */

/* Let other threads run for a moment inside a spin. */
void plat_relax(void);

/* Get every page of a shared mapping, so that no access can fail later.  huge: ask for huge pages
 * first.  -ENOSPC or -ENOMEM where the space is not there.  Returns 1 if huge pages were not refused. */
int plat_populate(void *address, size_t bytes, int fd, int huge);
/* Map pages that exist already, so that a first access does not fault. */
void plat_prefault(void *address, size_t bytes, int writable);
/* Bytes of a mapping that are in memory: not swapped out, not compressed. */
uint64_t plat_resident(void *address, size_t bytes);
/* Keep a mapping out of forked children. */
void plat_dontfork(void *address, size_t bytes);
/* Percent of the machine's memory that can be had without hurting others, where the system says so in one
 * number; -ENOSYS on Linux, where it has to be worked out from /proc and the cgroups. */
int plat_memory_level(void);

/* Files that experts are read from. */
enum plat_fs { PLAT_FS_BLOCK, PLAT_FS_MEMORY, PLAT_FS_OTHER };
struct plat_file_info {
    enum plat_fs kind;
    char fs[32];           /* name of the file-system type */
    uint32_t mem_align;    /* of a direct read's address */
    uint32_t offset_align; /* of its offset and length */
};
int plat_open_file(const char *path, int direct); /* close-on-exec descriptor */
void plat_file_info(int fd, struct plat_file_info *info);
/* Forget the cached pages of a range just read through the cache. */
void plat_drop_cache(int fd, uint64_t offset, uint64_t bytes);
/* Is the file's page at this offset in the page cache?  Looks without reading; false where that cannot be
 * told. */
_Bool plat_is_cached(int fd, uint64_t offset);
/* Is this errno a refusal of direct reads, rather than a fault of the file? */
int plat_refuses_direct(int os_error);
int64_t plat_mtime_ns(const void *stat_buffer); /* struct stat */

/* Locks that the kernel drops at their holder's death: one a participant id.
 * The lock descriptor is one of its own, and its locks live until plat_lock_close (not close: there may be
 * more behind it than a descriptor).  In a forked child plat_lock_close leaves the parent its locks. */
int plat_lock_open(const char *segment_name);
void plat_lock_close(int lock_fd);
/* Is the lock still that of the segment that has this name now? */
_Bool plat_lock_is_of(int lock_fd, const char *segment_name);
int plat_lock_try(int lock_fd, uint32_t id); /* 0: it is ours; -EAGAIN: another's */
int plat_lock_drop(int lock_fd, uint32_t id);
int plat_lock_query(int lock_fd, uint32_t id); /* 1: held by somebody else, 0: not */

uint64_t plat_pid_namespace(void); /* 0 where there is no such thing */
/* Does the processor have the CRC-32C instructions that its architecture leaves optional?  Asked on arm64. */
_Bool plat_has_crc32c(void);
/* Raise the limit of open files to what is allowed; returns the limit. */
uint64_t plat_raise_nofile(void);

#endif
