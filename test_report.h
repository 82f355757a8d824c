/* test_report.h: what the test programs say, and when. One line on stdout for each check:
     ok NAME | FAIL NAME: reason | skip NAME: reason
   begin(NAME) starts a check unless the command line leaves it out; check() adds to it; finish()
   ends it and prints. It knows moe.h's Err. */
#ifndef TEST_REPORT_H
#define TEST_REPORT_H

#include "moe.h"

#include <errno.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define TEST_FN      __attribute__((unused)) static

static const char *filter = "", *skipped;
static int failures, tried, verbose;
static char check_name[128], check_failed[1400], check_measured[256];
static Err err;
static void (*at_begin)(void), (*at_finish)(void); // what a program adds to every check, or NULL

__attribute__((format(printf, 1, 2), unused)) static int begin(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(check_name, sizeof check_name, fmt, ap);
    va_end(ap);
    check_failed[0] = check_measured[0] = err.text[0] = 0;
    skipped = NULL;
    if (at_begin) at_begin();
    const int wanted = strstr(check_name, filter) != NULL;
    tried += wanted;
    return wanted;
}

// A condition of the running check; the first one that fails gives the reason.
__attribute__((format(printf, 2, 3))) static void check(int ok, const char *fmt, ...) {
    va_list ap;
    if (ok || check_failed[0]) return;
    va_start(ap, fmt);
    vsnprintf(check_failed, sizeof check_failed, fmt, ap);
    va_end(ap);
}

TEST_FN void finish(void) {
    if (at_finish) at_finish();
    failures += check_failed[0] != 0;
    if (check_failed[0])
        printf("FAIL %s: %s\n", check_name, check_failed);
    else if (skipped)
        printf("skip %s: %s\n", check_name, skipped);
    else
        printf("ok %s%s\n", check_name, verbose ? check_measured : "");
    fflush(stdout);
}

TEST_FN void accepted(int rc) {
    check(rc == 0, "refused: %s", err.text);
    err.text[0] = 0;
}

// One line that has both words (NULL: any).
TEST_FN void refused_with(int rc, const char *word, const char *other) {
    check(rc == -1, "accepted, expected a refusal with '%s'", other ? other : word);
    check(err.text[0] && !strpbrk(err.text, "\r\n"), "expected one line: '%s'", err.text);
    check(strstr(err.text, word) != NULL, "expected '%s' in: %s", word, err.text);
    check(!other || strstr(err.text, other), "expected '%s' in: %s", other, err.text);
}

// What the tests themselves need.
TEST_FN void must(int ok, const char *what) {
    if (!ok)
        die(RUN_ERROR, "%s: not to be had for the tests: %s (%s)", what, err.text, strerror(errno));
}

// A file of n bytes.
TEST_FN void put_file(const char *path, const void *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    must(f && fwrite(bytes, 1, n, f) == n && !fclose(f), path);
}

#endif
