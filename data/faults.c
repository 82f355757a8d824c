/* faults.c: makes one system call of a program fail. For test_crash.sh, which builds it as a shared
   library and puts it into LD_PRELOAD.

     FAULT_UNDER  only files whose path contains this text count; .lock files never do
     FAULT_CALL   write, fsync, close, open, rename, exchange (renameat2), mkdir or symlink; or
                  short: every write takes one byte, or half of what it is given
     FAULT_N      the number of the call that fails, from 1
     FAULT_ERRNO  its errno, a number
     FAULT_MARK   this file is made when the call fails, and holds its path
     FAULT_NO_EXCHANGE  set: renameat2 fails always, as on file systems that cannot

   write stands for pwrite and writev too. open counts when it is for writing, close when the file was
   open for writing; a close that fails closes all the same, as on Linux. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

// The function of libc that one here stands before.
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *setting(const char *name) {
    const char *s = getenv(name);
    return s ? s : "";
}

static int concerns(const char *call, const char *path) {
    const size_t n = strlen(path);
    const char *under = setting("FAULT_UNDER");
    if (strcmp(setting("FAULT_CALL"), call) || !*under || !strstr(path, under)) return 0;
    return n < 5 || strcmp(path + n - 5, ".lock");
}

static const char *path_of(int fd, char path[4096]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, 4095);
    path[n < 0 ? 0 : n] = 0;
    return path;
}

// Whether this call is the one that fails; errno is set then.
static int fails(const char *call, const char *path) {
    static int calls;
    if (!concerns(call, path) || ++calls != atoi(setting("FAULT_N"))) return 0;
    const int fd =
        (int)syscall(SYS_openat, AT_FDCWD, setting("FAULT_MARK"), O_WRONLY | O_CREAT, 0666);
    if (fd >= 0) {
        if (syscall(SYS_write, fd, path, strlen(path)) < 0) {}
        syscall(SYS_close, fd);
    }
    errno = atoi(setting("FAULT_ERRNO"));
    return 1;
}

static int fd_fails(const char *call, int fd) {
    char path[4096];
    return fails(call, path_of(fd, path));
}

static size_t shortened(int fd, size_t n) {
    char path[4096];
    return n > 1 && concerns("short", path_of(fd, path)) ? n / 2 : n;
}

ssize_t write(int fd, const void *data, size_t n) {
    return fd_fails("write", fd) ? -1 : NEXT(write)(fd, data, shortened(fd, n));
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    return fd_fails("write", fd) ? -1 : NEXT(pwrite)(fd, data, shortened(fd, n), at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    return fd_fails("write", fd) ? -1 : NEXT(pwrite64)(fd, data, shortened(fd, n), at);
}
ssize_t writev(int fd, const struct iovec *v, int n) {
    return fd_fails("write", fd) ? -1 : NEXT(writev)(fd, v, n);
}

int fsync(int fd) { return fd_fails("fsync", fd) ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return fd_fails("fsync", fd) ? -1 : NEXT(fdatasync)(fd); }

int close(int fd) {
    const int mode = fcntl(fd, F_GETFL), code = errno;
    const int bad = mode >= 0 && (mode & O_ACCMODE) != O_RDONLY && fd_fails("close", fd);
    const int fault = errno;
    errno = code;
    const int rc = NEXT(close)(fd);
    if (bad) errno = fault;
    return bad ? -1 : rc;
}

#define OPEN_MODE(flags, mode)                          \
    do {                                                \
        va_list ap;                                     \
        va_start(ap, flags);                            \
        if ((flags)&O_CREAT) mode = va_arg(ap, mode_t); \
        va_end(ap);                                     \
    } while (0)
static int open_fails(const char *path, int flags) {
    return (flags & (O_WRONLY | O_RDWR | O_CREAT)) && fails("open", path);
}
int open(const char *path, int flags, ...) {
    mode_t mode = 0;
    OPEN_MODE(flags, mode);
    return open_fails(path, flags) ? -1 : NEXT(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    OPEN_MODE(flags, mode);
    return open_fails(path, flags) ? -1 : NEXT(open64)(path, flags, mode);
}
int openat(int at, const char *path, int flags, ...) {
    mode_t mode = 0;
    OPEN_MODE(flags, mode);
    return open_fails(path, flags) ? -1 : NEXT(openat)(at, path, flags, mode);
}
FILE *fopen(const char *path, const char *mode) {
    return *mode != 'r' && fails("open", path) ? NULL : NEXT(fopen)(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
    return *mode != 'r' && fails("open", path) ? NULL : NEXT(fopen64)(path, mode);
}

int rename(const char *from, const char *to) {
    return fails("rename", to) ? -1 : NEXT(rename)(from, to);
}
int mkdir(const char *path, mode_t mode) {
    return fails("mkdir", path) ? -1 : NEXT(mkdir)(path, mode);
}
int symlink(const char *target, const char *path) {
    return fails("symlink", path) ? -1 : NEXT(symlink)(target, path);
}

// renameat2 comes through here where libc has no name for it.
long syscall(long number, ...) {
    static __typeof__(&syscall) next;
    long a[6];
    va_list ap;
    va_start(ap, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(ap, long);
    va_end(ap);
    if (number == SYS_renameat2) {
        if (fails("exchange", (const char *)a[3])) return -1;
        if (*setting("FAULT_NO_EXCHANGE")) {
            errno = EINVAL;
            return -1;
        }
    }
    if (!next) next = NEXT(syscall);
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
