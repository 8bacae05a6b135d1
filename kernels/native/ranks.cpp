// What the processes of one model leave for each other in a segment of shared memory: sums of all ranks, in
// the order of ranks, and lists of what each has (kernels/ranks/join.py).
#include <sched.h>
#include <time.h>

#include <atomic>

#include "rounding.h"

namespace {

enum Join { SUM_FLOAT32, SUM_BFLOAT16, LIST };
enum Ended { WELL = 0, ABORTED = 3, LATE = 4 };
constexpr long LINE = 64;   // bytes that no two ranks write to
constexpr int SPINS = 4000;  // looks before a rank lets others run: some 20 microseconds
constexpr int YIELDS = 100;

struct Call {
    char *segment;  // a line for each rank, one for the end; then [2][ranks][slot]
    long slot;      // bytes
    int rank, ranks, join;
    const char *own;
    char *out;  // a sum of `bytes`, or a list of ranks * bytes
    long bytes;
    uint64_t serial;  // of the first piece; each piece of a slot has the next
    double patience;  // seconds
};

using Flag = std::atomic<uint64_t>;

INLINE Flag &flag(const Call &c, int rank) { return *(Flag *)(c.segment + rank * LINE); }

INLINE char *slot(const Call &c, uint64_t serial, int rank) {
    return c.segment + (c.ranks + 1) * LINE + ((long)(serial & 1) * c.ranks + rank) * c.slot;
}

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Wait until a rank has left what belongs to `serial`. It spins, lets others run, and then sleeps.
int come(const Call &c, int rank, uint64_t serial) {
    const Flag &theirs = flag(c, rank), &end = flag(c, c.ranks);
    double until = 0;
    for (long look = 0; theirs.load(std::memory_order_acquire) < serial; look++) {
        if (look < SPINS) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            continue;
        }
        if (end.load(std::memory_order_relaxed)) return ABORTED;
        if (look < SPINS + YIELDS) {
            sched_yield();
            continue;
        }
        if (!until) until = now() + c.patience;
        if (now() > until) return LATE;
        const timespec nap = {0, look < SPINS + 10 * YIELDS ? 50000 : 1000000};
        nanosleep(&nap, nullptr);
    }
    return WELL;
}

template <class K>
void add(const Call &c, uint64_t serial, long bytes, char *out) {
    const long count = bytes / K::bytes;
    for (long i = 0; i < count; i += W) {
        Floats sum = read_some<K>(slot(c, serial, 0), i, count - i);
        for (int r = 1; r < c.ranks; r++) sum += read_some<K>(slot(c, serial, r), i, count - i);
        write_some<K>(out, i, count - i, sum);
    }
}

}  // namespace

extern "C" int omnikv_sizeof_ranks_call() { return sizeof(Call); }

// Returns 0; 3 where the end was called, 4 where a rank did not come. Two sets of slots take turns: a rank
// that has seen the others' flags of one piece knows that they have read the piece before it.
extern "C" int omnikv_join_ranks(const Call *call) {
    const Call &c = *call;
    uint64_t serial = c.serial;
    for (long at = 0; at < c.bytes; at += c.slot, serial++) {
        const long bytes = c.bytes - at < c.slot ? c.bytes - at : c.slot;
        memcpy(slot(c, serial, c.rank), c.own + at, bytes);
        flag(c, c.rank).store(serial, std::memory_order_release);
        for (int r = 0; r < c.ranks; r++)
            if (int why = come(c, r, serial)) return why;
        if (c.join == SUM_FLOAT32) add<Float32>(c, serial, bytes, c.out + at);
        if (c.join == SUM_BFLOAT16) add<BFloat16>(c, serial, bytes, c.out + at);
        if (c.join == LIST)
            for (int r = 0; r < c.ranks; r++) memcpy(c.out + r * c.bytes + at, slot(c, serial, r), bytes);
    }
    return WELL;
}

// Whoever waits in this segment, or will, leaves.
extern "C" void omnikv_end_ranks(const Call *call) {
    flag(*call, call->ranks).store(1, std::memory_order_release);
}
