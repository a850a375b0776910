/* Preloaded: a clock that differs from the machine's by WRONG_CLOCK seconds, or by those in the file of that path. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void)
{
    const char *seconds = getenv("WRONG_CLOCK");
    char text[32] = "";
    int file;
    if (!seconds || *seconds != '/')
        return seconds ? atol(seconds) : 0;
    file = open(seconds, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    if (read(file, text, sizeof text - 1) < 0)
        *text = 0;
    close(file);
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise))
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}
