/* _reader_process.py in C, where a compiler is at hand: half the CPU, the same memory.

   Arguments: file descriptor of the ring, interval in ns, rows, 1 for real time, the numbers of
   interfaces, files and slow files, then interface indices and paths. See _reader_process.py for
   what a row is. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ANSWER = 96, TEXT = 24, HEADER = 64, GETSTATS = 94, LINK_64 = 1 };

struct request {
    struct nlmsghdr head;
    uint8_t family, pad;
    uint16_t pad2;
    uint32_t index, mask;
};

struct counter {
    int file;
    char *slot;
};

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

/* Read one counter; close it and return 0 where its device has gone. */
static int take(struct counter *one)
{
    if (pread(one->file, one->slot, TEXT, 0) >= 0)
        return 1;
    close(one->file);
    return 0;
}

int main(int count, char **words)
{
    if (count < 8)
        return 2;
    int fd = atoi(words[1]), real_time = atoi(words[4]);
    int64_t interval = atoll(words[2]), rows = atoll(words[3]);
    int interfaces = atoi(words[5]), fast = atoi(words[6]), slow = atoi(words[7]);
    if (interval <= 0 || rows <= 0 || count != 8 + interfaces + fast + slow)
        return 2;
    size_t row = 16 + ANSWER * (size_t)interfaces + TEXT * (size_t)(fast + slow);
    char *memory = mmap(NULL, HEADER + rows * row, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_POPULATE, fd, 0);
    if (memory == MAP_FAILED)
        fail("mmap");
    char *scratch = calloc(1, row);
    struct request *requests = calloc(interfaces + 1, sizeof *requests);
    struct iovec *vectors = calloc(interfaces + 1, sizeof *vectors);
    struct mmsghdr *answers = calloc(interfaces + 1, sizeof *answers);
    struct counter *counters = calloc(fast + slow + 1, sizeof *counters);
    if (!scratch || !requests || !vectors || !answers || !counters)
        fail("memory");
    int line = -1;
    if (interfaces) {
        struct sockaddr_nl own = {.nl_family = AF_NETLINK};
        line = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 0);
        if (line < 0 || bind(line, (struct sockaddr *)&own, sizeof own))
            fail("netlink");
    }
    for (int n = 0; n < interfaces; n++) {
        requests[n] = (struct request){
            .head = {.nlmsg_len = sizeof *requests, .nlmsg_type = GETSTATS,
                     .nlmsg_flags = NLM_F_REQUEST, .nlmsg_seq = n},
            .index = atoi(words[8 + n]), .mask = LINK_64,
        };
        vectors[n] = (struct iovec){scratch + 16 + n * ANSWER, ANSWER};
        answers[n].msg_hdr.msg_iov = &vectors[n];
        answers[n].msg_hdr.msg_iovlen = 1;
    }
    for (int n = 0; n < fast + slow; n++) {
        counters[n].slot = scratch + 16 + ANSWER * interfaces + TEXT * n;
        counters[n].file = open(words[8 + interfaces + n], O_RDONLY | O_CLOEXEC);
        if (counters[n].file < 0 || pread(counters[n].file, counters[n].slot, TEXT, 0) < 0)
            fail(words[8 + interfaces + n]);
    }
    struct counter *rest = counters + fast;
    signal(SIGINT, SIG_IGN); /* whoever started this ends it */
    prctl(PR_SET_TIMERSLACK, 1UL);
    if (real_time) {
        struct sched_param first = {.sched_priority = 1};
        if (sched_setscheduler(0, SCHED_FIFO, &first) && nice(-10) == -1)
            errno = 0; /* without the right the machine's rules apply */
    }
    pid_t parent = getppid();
    int64_t written = 0, due = now();
    int turn = 0;
    for (;;) {
        due += interval;
        int64_t late = now() - due;
        if (late < 0) {
            struct timespec at = {due / 1000000000, due % 1000000000};
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
        } else if (late > interval) {
            due += late / interval * interval; /* readings are lost, not bunched */
        }
        int64_t before = now();
        int whole = 1;
        if (interfaces) {
            /* The kernel answers each request within the send: the receive never waits. */
            whole = send(line, requests, interfaces * sizeof *requests, 0) >= 0;
            if (whole)
                recvmmsg(line, answers, interfaces, 0, NULL);
        }
        for (int n = 0; n < fast; n++)
            if (!take(&counters[n])) { /* its last value stays, the others are read on */
                counters[n--] = counters[--fast];
                whole = 0;
            }
        if (slow) { /* one of the others in turn, so that every reading costs the same */
            turn = turn + 1 < slow ? turn + 1 : 0;
            if (!take(&rest[turn])) {
                rest[turn] = rest[--slow];
                turn = 0;
                whole = 0;
            }
        }
        if (!whole)
            continue;
        int64_t after = now();
        memcpy(scratch, &before, 8);
        memcpy(scratch + 8, &after, 8);
        memcpy(memory + HEADER + written % rows * row, scratch, row);
        __atomic_store_n((int64_t *)memory, ++written, __ATOMIC_RELEASE);
        if ((written & 255) == 0 && getppid() != parent)
            return 0;
    }
}
