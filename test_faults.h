/* test_faults.h: the allocator and the system calls that files go through, replaced by ones that
   count and that fail on demand; then the rooms under test, compiled with them.

   Include it first. mem counts allocations and remembers the largest; disk counts calls. Either can
   be told to fail at one of them, or to end the process there, as a kill would. fsync is only
   counted: what is tested is that no file is closed before it. */
#ifndef TEST_FAULTS_H
#define TEST_FAULTS_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

// -------------------------------------------------------------------------------------------------
// faults

static struct {
    long calls, fail_at; // allocations so far; the one that finds no memory, -1 = none
    long live;           // not yet freed
    size_t largest;      // bytes asked for at once
} mem = {.fail_at = -1};

static void *mem_took(void *p, size_t n) {
    if (n > mem.largest) mem.largest = n;
    mem.live += p != NULL;
    return p;
}
static int mem_fails(void) { return mem.calls++ == mem.fail_at; }
static void *mem_malloc(size_t n) { return mem_took(mem_fails() ? NULL : malloc(n), n); }
static void *mem_calloc(size_t n, size_t size) {
    return mem_took(mem_fails() ? NULL : calloc(n, size), n * size);
}
static void *mem_realloc(void *old, size_t n) {
    void *p = mem_took(mem_fails() ? NULL : realloc(old, n), n);
    mem.live -= p && old;
    return p;
}
static char *mem_strdup(const char *s) { return mem_took(mem_fails() ? NULL : strdup(s), 0); }
static ssize_t mem_getline(char **text, size_t *n, FILE *f) { // never fails: libc's own memory
    const char *old = *text;
    const ssize_t got = getline(text, n, f);
    mem.live += !old && *text;
    return got;
}
static FILE *mem_stream(char **text, size_t *n) { // its text is freed like any other memory
    return mem_took(mem_fails() ? NULL : open_memstream(text, n), 0);
}
// For jansson. These never fail: its parser drops characters when they do (2.14, in lex_save).
static void *mem_parser(size_t n) { return mem_took(malloc(n), n); }
static void mem_free(void *p) {
    mem.live -= p != NULL;
    free(p);
}

enum { DIES = -1, FDS = 1024 };
static struct {
    long calls, fail_at;           // system calls so far; the one that fails, -1 = none
    int code;                      // the errno that it fails with, or DIES: the process ends there
    size_t most;                   // bytes that one write takes
    int no_exchange;               // two folders cannot change places, as on some file systems
    char unsynced[FDS];            // file descriptors with data that is not on disk
    int files, folders, forgotten; // fsyncs of either; files closed without
} disk = {.fail_at = -1, .most = SIZE_MAX};

static int fault(void) {
    if (disk.calls++ != disk.fail_at) return 0;
    if (disk.code == DIES) _exit(77);
    errno = disk.code;
    return 1;
}
static ssize_t disk_write(int fd, const void *p, size_t n) {
    if (fault()) return -1;
    disk.unsynced[(unsigned)fd % FDS] = 1;
    return write(fd, p, n < disk.most ? n : disk.most);
}
static int disk_sync(int fd) {
    struct stat st;
    if (fault() || fstat(fd, &st)) return -1;
    disk.folders += S_ISDIR(st.st_mode);
    disk.files += !S_ISDIR(st.st_mode);
    disk.unsynced[(unsigned)fd % FDS] = 0;
    return 0;
}
static int disk_close(int fd) { // a close that fails closes all the same
    disk.forgotten += disk.unsynced[(unsigned)fd % FDS];
    disk.unsynced[(unsigned)fd % FDS] = 0;
    int fails = fault(), code = errno, rc = close(fd);
    errno = code;
    return fails ? -1 : rc;
}

#undef strdup
#define malloc(n)               mem_malloc(n)
#define calloc(n, size)         mem_calloc(n, size)
#define realloc(p, n)           mem_realloc(p, n)
#define free(p)                 mem_free(p)
#define strdup(s)               mem_strdup(s)
#define open_memstream(text, n) mem_stream(text, n)
#define getline(text, n, f)     mem_getline(text, n, f)
#define write(fd, p, n)         disk_write(fd, p, n)
#define fsync(fd)               disk_sync(fd)
#define close(fd)               disk_close(fd)
#define open(...)               (fault() ? -1 : open(__VA_ARGS__))
#define read(fd, p, n)          (fault() ? -1 : read(fd, p, n))
#define mmap(...)               (fault() ? MAP_FAILED : mmap(__VA_ARGS__))
#define mkdir(path, mode)       (fault() ? -1 : mkdir(path, mode))
#define rename(from, to)        (fault() ? -1 : rename(from, to))
#define symlink(from, to)       (fault() ? -1 : symlink(from, to))
#define unlink(path)            (fault() ? -1 : unlink(path))
#define unlinkat(at, path, how) (fault() ? -1 : unlinkat(at, path, how))
#define syscall(...)            (disk.no_exchange || fault() ? -1 : syscall(__VA_ARGS__))

#include "dataloader.h"
#include "placement.h"
#include "run_folder.h"
#include "tokenizer.h"

#endif
