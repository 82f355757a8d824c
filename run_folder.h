/* run_folder.h: the folder of one run, and the checkpoints in it. It knows checkpoint.h, which says
   what is inside a checkpoint.

   What lies in OUT:
     step_00000100/     a complete checkpoint, a Hugging Face model folder
     latest, best       symbolic links to the newest one and to the one with the lowest loss
     .lock              held (flock) by the run that writes here
     .step_*.tmp .old .del   on their way in or out; never read, removed by the next run

   A name step_NNNNNNNN only ever stands for a complete folder: it is written under a dot name,
   every file and the folder are fsynced, then renamed; deleting starts with a rename to a dot name.
   So a crash, a kill or a full disk at any moment leaves the checkpoints that were there.

   Start reading at ckpt_begin and ckpt_commit. */
#ifndef RUN_FOLDER_H
#define RUN_FOLDER_H

#include "checkpoint.h"

#include <dirent.h>
#include <sys/file.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

enum { STEP_NAME = 32 };

// A checkpoint while it is written. The caller puts files into `path`.
typedef struct CkptWrite {
    char out[CKPT_PATH], path[CKPT_PATH];
    int64_t step;
} CkptWrite;

CKPT_FN void step_name(char name[STEP_NAME], int64_t step) {
    snprintf(name, STEP_NAME, "step_%08lld", (long long)step);
}

// The step that a name stands for, -1 if it is not written as step_name writes it.
CKPT_FN int64_t step_of(const char *name) {
    char again[STEP_NAME];
    if (strncmp(name, "step_", 5) || strlen(name) < 13 || strlen(name) > 22) return -1;
    int64_t step = (int64_t)strtoll(name + 5, NULL, 10);
    if (step < 0) return -1;
    step_name(again, step);
    return strcmp(again, name) ? -1 : step;
}

// Makes a folder and those above it; new names are brought to disk, as far as the system lets us.
CKPT_FN int make_folders(const char *path, Err *err) {
    char part[CKPT_PATH];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof part)
        return fail(err, "expected a folder name of 1 to %d bytes", CKPT_PATH - 1);
    for (size_t i = 1; i <= n; i++) {
        if (i < n && path[i] != '/') continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777)) {
            if (errno == EEXIST || errno == EISDIR) continue;
            return fail_os(err, part, "cannot make this folder");
        }
        Err ignored;
        char *name = strrchr(part, '/');
        if (name) name[name == part] = 0;
        sync_folder(name ? part : ".", &ignored);
    }
    struct stat st;
    if (!stat(path, &st) && S_ISDIR(st.st_mode)) return 0;
    return fail(err, "%s: expected a folder, found %s", shown(path), looks_like(path));
}

/* Removes a file, a link or a folder with all in it, relative to an open folder; links are not
   followed. A missing one is fine. Returns 0 or -1 with errno. */
CKPT_FN int remove_tree(int at, const char *name, int depth) {
    if (!unlinkat(at, name, 0) || errno == ENOENT) return 0;
    if ((errno != EISDIR && errno != EPERM) || depth > 16) return -1;
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        if (fd >= 0) close(fd);
        return -1;
    }
    int rc = 0;
    struct dirent *e;
    while (!rc && (e = readdir(dir))) {
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            rc = remove_tree(fd, e->d_name, depth + 1);
    }
    int code = errno;
    closedir(dir);
    errno = code;
    return rc ? rc : unlinkat(at, name, AT_REMOVEDIR);
}

CKPT_FN int remove_path(const char *path, Err *err) {
    if (!remove_tree(AT_FDCWD, path, 0)) return 0;
    return fail_os(err, path, "cannot remove");
}

// OUT/PREFIXstep_00000100SUFFIX
CKPT_FN int step_path(char path[CKPT_PATH], const char *out, const char *prefix, int64_t step,
    const char *suffix, Err *err) {
    char name[STEP_NAME], full[STEP_NAME + 16];
    step_name(name, step);
    snprintf(full, sizeof full, "%s%s%s", prefix, name, suffix);
    return path_join(path, out, full, err);
}

// Whether a folder has what a model needs. Its content is checked when it is read.
CKPT_FN int ckpt_complete(const char *folder) {
    static const char *const files[] = {"config.json", "model.safetensors"};
    char path[CKPT_PATH];
    struct stat st;
    Err ignored;
    if (lstat(folder, &st) || !S_ISDIR(st.st_mode)) return 0;
    for (int i = 0; i < 2; i++) {
        if (path_join(path, folder, files[i], &ignored) || stat(path, &st) || !S_ISREG(st.st_mode))
            return 0;
    }
    return 1;
}

CKPT_FN int step_compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* The steps that OUT has a complete checkpoint of, ascending, in fresh memory that the caller
   frees. No folder, no checkpoints: *n = 0. Returns -1 with errno when OUT cannot be read. */
CKPT_FN int ckpt_list(const char *out, int64_t **steps, int *n) {
    *steps = NULL;
    *n = 0;
    DIR *dir = opendir(out);
    if (!dir) return errno == ENOENT ? 0 : -1;
    struct dirent *e;
    int rc = 0;
    while (!rc && (e = readdir(dir))) {
        char path[CKPT_PATH];
        Err ignored;
        int64_t step = step_of(e->d_name);
        if (step < 0 || path_join(path, out, e->d_name, &ignored) || !ckpt_complete(path)) continue;
        if ((*n & (*n + 1)) == 0) { // room for 1, 3, 7, ...
            int64_t *more = (int64_t *)realloc(*steps, (2 * (size_t)*n + 1) * sizeof *more);
            if (!more)
                rc = -1;
            else
                *steps = more;
        }
        if (!rc) (*steps)[(*n)++] = step;
    }
    closedir(dir);
    if (rc) {
        free(*steps);
        *steps = NULL;
        *n = 0;
        errno = ENOMEM;
    } else if (*n) {
        qsort(*steps, (size_t)*n, sizeof **steps, step_compare);
    }
    return rc;
}

/* Clears away what a killed run left: folders half written, half deleted or replaced. A replaced
   one goes back to its place when its successor never arrived there. Only the holder of the lock
   may do this. */
CKPT_FN int ckpt_tidy(const char *out, Err *err) {
    DIR *dir = opendir(out);
    if (!dir) return fail_os(err, out, "cannot read this folder");
    struct dirent *e;
    int rc = 0;
    while (!rc && (e = readdir(dir))) {
        char name[STEP_NAME], from[CKPT_PATH], to[CKPT_PATH];
        const char *dot = strrchr(e->d_name, '.');
        if (e->d_name[0] != '.' || dot - e->d_name < 2 || dot - e->d_name > STEP_NAME - 1) continue;
        snprintf(name, sizeof name, "%.*s", (int)(dot - e->d_name - 1), e->d_name + 1);
        if (step_of(name) < 0 ||
            (strcmp(dot, ".tmp") && strcmp(dot, ".old") && strcmp(dot, ".del")))
            continue;
        if (path_join(from, out, e->d_name, err) || path_join(to, out, name, err))
            rc = -1;
        else if (!strcmp(dot, ".old") && access(to, F_OK) && !rename(from, to))
            continue;
        else
            rc = remove_path(from, err);
    }
    closedir(dir);
    return rc;
}

/* Makes OUT and holds it for this process: a second run into the same folder is refused. The lock
   goes with the process, however it ends; close(*fd) gives it back. Also clears away what a killed
   run left. */
CKPT_FN int ckpt_lock(const char *out, int *fd, Err *err) {
    char path[CKPT_PATH], pid[32] = "";
    *fd = -1;
    if (make_folders(out, err) || path_join(path, out, ".lock", err)) return -1;
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0) return fail_os(err, path, "cannot create");
    if (flock(lock, LOCK_EX | LOCK_NB)) {
        if (errno == EWOULDBLOCK) {
            ssize_t n = read(lock, pid, sizeof pid - 1);
            fail(err,
                "%s: another run%s%s is writing into this folder: wait for it, or choose another "
                "--out",
                shown(out), n > 0 ? ", process " : "", n > 0 ? shown(pid) : "");
            close(lock);
            return -1;
        }
        warn("%s: this file system has no locks (%s): do not start a second run "
             "into "
             "this folder",
            shown(out), strerror(errno));
    }
    int n = snprintf(pid, sizeof pid, "%ld", (long)getpid());
    if (ftruncate(lock, 0) || write(lock, pid, (size_t)n) != n) {} // only for the message above
    *fd = lock;
    if (!ckpt_tidy(out, err)) return 0;
    close(lock);
    *fd = -1;
    return -1;
}

/* Starts the checkpoint of a step: an empty folder w->path for the caller's files. Then
   ckpt_commit, or ckpt_abort. */
CKPT_FN int ckpt_begin(CkptWrite *w, const char *out, int64_t step, Err *err) {
    memset(w, 0, sizeof *w);
    if (step < 0)
        return fail(err, "a checkpoint of step %lld: expected 0 or more", (long long)step);
    w->step = step;
    if (make_folders(out, err)) return -1;
    if (step_path(w->path, out, ".", step, ".tmp", err)) {
        w->path[0] = 0; // cut off: another path, which ckpt_abort must not remove
        return -1;
    }
    strcpy(w->out, out);
    if (remove_path(w->path, err)) return -1;
    if (!mkdir(w->path, 0777)) return 0;
    return fail_os(err, w->path, "cannot make this folder");
}

/* Removes what was written of it. Never fails: what is left behind is not read, and removed by the
   next run. */
CKPT_FN void ckpt_abort(CkptWrite *w) {
    if (w->path[0]) remove_tree(AT_FDCWD, w->path, 0);
    w->path[0] = 0;
}

// OUT/NAME becomes a link to that step, at once: a reader finds the old link or the new one.
CKPT_FN int ckpt_link(const char *out, const char *name, int64_t step, Err *err) {
    char target[STEP_NAME], tmp[CKPT_PATH], path[CKPT_PATH], hidden[STEP_NAME];
    step_name(target, step);
    snprintf(hidden, sizeof hidden, ".%s.tmp", name);
    if (path_join(tmp, out, hidden, err) || path_join(path, out, name, err)) return -1;
    unlink(tmp);
    if (symlink(target, tmp) || rename(tmp, path)) {
        fail_os(err, path, "cannot make this link");
        unlink(tmp);
        return -1;
    }
    return sync_folder(out, err);
}

/* Puts the folder `from` in the place of the folder `to`, which exists. Linux exchanges the two in
   one step. Elsewhere, and where the file system cannot, `to` steps aside first, under a name from
   which ckpt_tidy brings it back if the second rename never happens. The old one ends as `old`. */
CKPT_FN int ckpt_replace(const char *from, const char *to, const char *old) {
#if defined(__linux__) && defined(SYS_renameat2)
    enum { EXCHANGE = 2 };
    if (!syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, EXCHANGE)) {
        if (!rename(from, old)) return 0;
        int why = errno; // `from` is the old one now, which the caller would remove
        if (syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, EXCHANGE)) {}
        errno = why;
        return -1;
    }
#endif
    if (rename(to, old)) return -1;
    if (!rename(from, to)) return 0;
    int code = errno;
    if (rename(old, to)) {}
    errno = code;
    return -1;
}

/* Finishes a checkpoint: brings it to disk, gives it its name, and points OUT/latest at it. A
   checkpoint of the same step that is there already is replaced. When this fails, what was there is
   untouched (or, if only the link failed, both are there). */
CKPT_FN int ckpt_commit(CkptWrite *w, Err *err) {
    char path[CKPT_PATH], old[CKPT_PATH];
    int replaced = 0;
    if (step_path(path, w->out, "", w->step, "", err) ||
        step_path(old, w->out, ".", w->step, ".old", err) || sync_folder(w->path, err)) {
        ckpt_abort(w);
        return -1;
    }
    int rc = rename(w->path, path);
    if (rc && (errno == EEXIST || errno == ENOTEMPTY)) {
        if (remove_path(old, err)) {
            ckpt_abort(w);
            return -1;
        }
        rc = ckpt_replace(w->path, path, old);
        replaced = 1;
    }
    if (rc) {
        fail_os(err, path, "cannot give the new checkpoint this name");
        ckpt_abort(w);
        return -1;
    }
    w->path[0] = 0;
    if (sync_folder(w->out, err) || ckpt_link(w->out, "latest", w->step, err)) return -1;
    return replaced ? remove_path(old, err) : 0;
}

// Points OUT/best at the checkpoint of a step, which must be there.
CKPT_FN int ckpt_mark_best(const char *out, int64_t step, Err *err) {
    char path[CKPT_PATH];
    if (step_path(path, out, "", step, "", err)) return -1;
    if (!ckpt_complete(path))
        return fail(
            err, "%s: expected a complete checkpoint, found %s", shown(path), looks_like(path));
    return ckpt_link(out, "best", step, err);
}

// The step that the link OUT/NAME (latest, best) stands for, -1 if there is none.
CKPT_FN int64_t ckpt_linked(const char *out, const char *name) {
    char path[CKPT_PATH], target[STEP_NAME];
    Err ignored;
    if (path_join(path, out, name, &ignored)) return -1;
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0) return -1;
    target[n] = 0;
    return step_of(target);
}

// Deletes one checkpoint: first its name goes, then its files.
CKPT_FN int ckpt_delete(const char *out, int64_t step, Err *err) {
    char path[CKPT_PATH], gone[CKPT_PATH];
    if (step_path(path, out, "", step, "", err) || step_path(gone, out, ".", step, ".del", err))
        return -1;
    if (remove_path(gone, err)) return -1;
    if (rename(path, gone)) return fail_os(err, path, "cannot remove");
    return remove_path(gone, err);
}

/* Deletes all but the `keep` newest checkpoints (0: keeps all) and those that best and latest stand
   for. */
CKPT_FN int ckpt_prune(const char *out, int keep, Err *err) {
    int64_t *steps, best = ckpt_linked(out, "best"), latest = ckpt_linked(out, "latest");
    int n, rc = 0;
    if (keep <= 0) return 0;
    if (ckpt_list(out, &steps, &n)) return fail_os(err, out, "cannot list the checkpoints");
    for (int i = 0; i < n - keep && !rc; i++) {
        if (steps[i] != best && steps[i] != latest) rc = ckpt_delete(out, steps[i], err);
    }
    free(steps);
    return rc;
}

/* Deletes every checkpoint of OUT and its links, for --overwrite. Other files there are the
   caller's. */
CKPT_FN int ckpt_clear(const char *out, Err *err) {
    int64_t *steps;
    int n, rc = 0;
    if (ckpt_list(out, &steps, &n)) return fail_os(err, out, "cannot list the checkpoints");
    static const char *const links[] = {"latest", "best"};
    for (int i = 0; i < 2 && !rc; i++) {
        char path[CKPT_PATH];
        rc = path_join(path, out, links[i], err);
        if (!rc && ckpt_linked(out, links[i]) >= 0 && unlink(path))
            rc = fail_os(err, path, "cannot remove");
    }
    for (int i = 0; i < n && !rc; i++) rc = ckpt_delete(out, steps[i], err);
    free(steps);
    return rc;
}

#endif
