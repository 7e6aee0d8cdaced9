/* Wall clock with an offset: preloaded into a process, it adds the nanoseconds in a file to CLOCK_REALTIME. The monotonic
 * clock is untouched, as when an operator or a time server sets the clock of a machine. The test rewrites the file while the
 * process runs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

/* Without the file the offset must not pass for zero, so the process ends. */
__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("INFLIGHT_CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (mapped == MAP_FAILED || !real_clock_gettime) _exit(99);
    close(file);
    offset = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real_clock_gettime(clock, time);
    if (status == 0 && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t seconds = *offset / 1000000000, nanoseconds = time->tv_nsec + *offset % 1000000000;
        if (nanoseconds < 0) nanoseconds += 1000000000, seconds--;
        if (nanoseconds >= 1000000000) nanoseconds -= 1000000000, seconds++;
        time->tv_sec += seconds;
        time->tv_nsec = nanoseconds;
    }
    return status;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
