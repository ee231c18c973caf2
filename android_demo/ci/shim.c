/* What Android's C library has and glibc has not, or has with other constants: enough to run an app's own x86-64
 * natives inside a desktop JVM, for tests. Functions named outrider_* take the place of glibc's of the same name
 * (android_demo/ci/native.py renames them in the natives). */
#define _GNU_SOURCE
#include <errno.h>
#include <ftw.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* logging */
int __android_log_vprint(int level, const char *tag, const char *format, va_list rest) {
    if (level < 5) return 0; /* warnings and errors */
    fprintf(stderr, "%s: ", tag);
    int size = vfprintf(stderr, format, rest);
    fputc('\n', stderr);
    return size;
}
int __android_log_print(int level, const char *tag, const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    int size = __android_log_vprint(level, tag, format, rest);
    va_end(rest);
    return size;
}
int __android_log_write(int level, const char *tag, const char *text) {
    return __android_log_print(level, tag, "%s", text);
}
void __android_log_assert(const char *condition, const char *tag, const char *format, ...) {
    fprintf(stderr, "%s: assertion failed: %s (%s)\n", tag, condition ? condition : "", format ? format : "");
    abort();
}
void __assert2(const char *file, int line, const char *function, const char *condition) {
    fprintf(stderr, "%s:%d: %s: assertion failed: %s\n", file, line, function, condition);
    abort();
}
void android_set_abort_message(const char *text) { fprintf(stderr, "%s\n", text); }

/* standard streams: an array of three there */
enum { FILE_SIZE = 152 };
char __sF[3 * FILE_SIZE];
static FILE *stream(void *of) {
    FILE *streams[] = {stdin, stdout, stderr};
    long at = (char *)of - __sF;
    return at >= 0 && at < (long)sizeof __sF ? streams[at / FILE_SIZE] : of;
}
int outrider_vfprintf(void *file, const char *format, va_list rest) { return vfprintf(stream(file), format, rest); }
int outrider_fprintf(void *file, const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    int size = vfprintf(stream(file), format, rest);
    va_end(rest);
    return size;
}
int outrider_fputs(const char *text, void *file) { return fputs(text, stream(file)); }
int outrider_fputc(int character, void *file) { return fputc(character, stream(file)); }
size_t outrider_fwrite(const void *data, size_t size, size_t count, void *file) {
    return fwrite(data, size, count, stream(file));
}
int outrider_fflush(void *file) { return file ? fflush(stream(file)) : 0; }

/* other names, checks of the compiler's */
int *__errno(void) { return __errno_location(); }
extern int __xpg_strerror_r(int, char *, size_t);
int outrider_strerror_r(int code, char *text, size_t size) { return __xpg_strerror_r(code, text, size); }
char *__gnu_strerror_r(int code, char *text, size_t size) { return strerror_r(code, text, size); }
char *__strchr_chk(const char *text, int character, size_t size) { (void)size; return strchr(text, character); }
char *__strrchr_chk(const char *text, int character, size_t size) { (void)size; return strrchr(text, character); }
size_t __strlen_chk(const char *text, size_t size) { (void)size; return strlen(text); }
ssize_t __write_chk(int file, const void *data, size_t count, size_t size) {
    (void)size;
    return write(file, data, count);
}
int __system_property_get(const char *name, char *value) { (void)name; *value = 0; return 0; }

/* other constants and sizes */
long outrider_sysconf(int name) {
    switch (name) {
        case 39: case 40: return sysconf(_SC_PAGESIZE);
        case 96: return sysconf(_SC_NPROCESSORS_CONF);
        case 97: return sysconf(_SC_NPROCESSORS_ONLN);
        case 98: return sysconf(_SC_PHYS_PAGES);
        default: errno = EINVAL; return -1;
    }
}
/* its signal sets have 8 bytes */
int outrider_sigfillset(unsigned long *set) { *set = ~0UL; return 0; }
int outrider_pthread_sigmask(int how, const unsigned long *set, unsigned long *old) {
    (void)how; (void)set;
    if (old) *old = 0;
    return 0;
}

/* without symbol versions glibc gives the oldest of its kind; these are the newest */
#define NEWEST(type, name, takes, ...) type outrider_##name takes { return name(__VA_ARGS__); }
typedef int visit(const char *, const struct stat *, int, struct FTW *);
NEWEST(char *, realpath, (const char *path, char *into), path, into)
NEWEST(int, nftw, (const char *path, visit *each, int files, int flags), path, each, files, flags)
NEWEST(int, pthread_cond_broadcast, (pthread_cond_t *cond), cond)
NEWEST(int, pthread_cond_destroy, (pthread_cond_t *cond), cond)
NEWEST(int, pthread_cond_signal, (pthread_cond_t *cond), cond)
NEWEST(int, pthread_cond_wait, (pthread_cond_t *cond, pthread_mutex_t *mutex), cond, mutex)
NEWEST(int, pthread_cond_timedwait, (pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *end), cond,
       mutex, end)

/* the JVM's end runs nothing of theirs */
int outrider___cxa_atexit(void (*function)(void *), void *argument, void *object) {
    (void)function; (void)argument; (void)object;
    return 0;
}
void __gcov_dump(void) {}
void __gcov_flush(void) {}
