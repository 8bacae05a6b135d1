// The team of threads that kernels share their work with. A caller opens a door, works itself, closes the
// door when no piece is left, and waits for those inside only: a thread that is asleep, or that the system
// gives no core, is not waited for. OpenMP's team waits for all of its threads, at every call.
//
// Between two calls a thread looks for the next one for a while, for to sleep and to be woken takes tens of
// microseconds, as long as a call does. It stops looking where others have its core for more than a twentieth
// of the time: then it sleeps at once, for longer and longer while that goes on.
#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

namespace {

constexpr int MOST = 256;           // threads of a call
constexpr int FAN = 4;              // threads that each thread wakes: who wakes all of 64 takes longer than a call
constexpr long LOOKS = 100'000;     // nanoseconds that a thread looks for a call; between two of a step pass 10
constexpr long LEAVES = 20'000;     // .. that a caller looks whether the last threads have left
constexpr long AWAY = 2'000'000;    // .. that others may have its core, beside one part in MAY of the time
constexpr long MAY = 20;
constexpr long ASLEEP = 5'000'000, LONGEST = 640'000'000;  // .. for which a thread then looks no more
constexpr uint64_t INSIDE = 0xffff, OPEN = 1 << 16, CALL = 1 << 17;  // parts of the door
constexpr size_t STACK = 8 << 20;

inline long now(clockid_t clock = CLOCK_MONOTONIC) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

struct alignas(64) Sleeper {
    pthread_mutex_t lock;
    pthread_cond_t woken;
    std::atomic<int> asleep;
};

// The door counts the threads inside, and the calls; the fields of a call change while nobody is inside.
std::atomic<uint64_t> door{0};
std::atomic<int> busy{0}, waits{0};
Lane lanes[MOST];
Sleeper sleepers[MOST];
Body body;
void *what;
long count, piece;
int threads, workers;  // of the call; that were started, beside callers
pthread_mutex_t last = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t left = PTHREAD_COND_INITIALIZER;

// Whether a thread may look for calls, by how long others had its core while it was not asleep. A daemon that
// runs now and then takes less than a hundredth, a busy program half.
struct Watch {
    long until = 0, rest = ASLEEP, looked = 0, ran = 0, owed = 0;

    void woken() { looked = now(), ran = now(CLOCK_THREAD_CPUTIME_ID); }
    void look(long at) {
        const long passed = at - looked;
        if (passed < 1'000'000) return;
        const long used = now(CLOCK_THREAD_CPUTIME_ID), away = passed - (used - ran);
        looked = at, ran = used;
        owed = owed > passed / MAY ? owed - passed / MAY : 0;
        if ((owed += away) > AWAY) disturbed(at);
    }
    // Sleeps for twice as long as the last time, or half where it was left alone for long since.
    void disturbed(long at) {
        rest = at - until < 4 * rest + 8 * owed ? 2 * rest : rest / 2;
        rest = rest < ASLEEP ? ASLEEP : rest < LONGEST ? rest : LONGEST;
        until = at + rest, owed = 0;
    }
};

void wake(int mine) {
    for (int i = FAN * mine + 1; i <= FAN * mine + FAN && i < threads && i <= workers; i++) {
        Sleeper &s = sleepers[i];
        if (!s.asleep.load()) continue;
        pthread_mutex_lock(&s.lock);
        s.asleep.store(0);
        pthread_cond_signal(&s.woken);
        pthread_mutex_unlock(&s.lock);
    }
}

// Waits until the door shows another call than `seen`.
void await(int mine, uint64_t seen, bool looks, Watch &watch) {
    const long began = now();
    for (long at = began; looks && at - began < LOOKS; at = now()) {
        watch.look(at);
        if (at < watch.until) break;
        for (int i = 0; i < 8; i++) {
            if (door.load(std::memory_order_relaxed) / CALL != seen) return;
            relax();
        }
    }
    Sleeper &s = sleepers[mine];
    pthread_mutex_lock(&s.lock);
    s.asleep.store(1);
    if (door.load() / CALL != seen) s.asleep.store(0);
    while (s.asleep.load()) pthread_cond_wait(&s.woken, &s.lock);
    pthread_mutex_unlock(&s.lock);
    watch.woken();
}

void *work(void *number) {
    const int mine = (int)(intptr_t)number;
    uint64_t seen = door.load() / CALL;
    bool looks = false;
    for (Watch watch;;) {
        await(mine, seen, looks, watch);
        looks = false;
        uint64_t state = door.load(std::memory_order_acquire);
        while (state & OPEN && !door.compare_exchange_weak(state, state + 1)) {}
        seen = state / CALL;
        if (!(state & OPEN)) continue;  // it came too late
        if (mine < threads) {
            looks = true;
            wake(mine);
            Pieces own = {lanes, count, piece, threads, mine, 0, 0};
            body(what, own);
            lanes[mine].taken += own.taken;  // a thread woken late by another of this call comes twice
        }
        if ((door.fetch_sub(1) & INSIDE) == 1 && waits.load()) {
            pthread_mutex_lock(&last);
            pthread_cond_signal(&left);
            pthread_mutex_unlock(&last);
        }
    }
    return nullptr;
}

// The child of a fork has none of these threads.
void forget() {
    door.store(0), busy.store(0), waits.store(0);
    workers = 0;
    last = PTHREAD_MUTEX_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
}

// Starts workers up to number `most`; fewer where the system gives no more.
void start(int most) {
    static bool told = false;
    if (!told) told = !pthread_atfork(nullptr, nullptr, forget);
    sigset_t every, old;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &old);  // signals are for the program's own threads
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (int i = workers + 1; i <= most; i++) {
        Sleeper &s = sleepers[i];
        pthread_mutex_init(&s.lock, nullptr), pthread_cond_init(&s.woken, nullptr), s.asleep.store(0);
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work, (void *)(intptr_t)i)) break;
        workers = i;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

void close_door() {
    door.fetch_and(~OPEN);
    for (const long began = now(); door.load(std::memory_order_acquire) & INSIDE && now() - began < LEAVES;)
        relax();
    if (!(door.load(std::memory_order_acquire) & INSIDE)) return;
    pthread_mutex_lock(&last);
    waits.store(1);
    while (door.load() & INSIDE) pthread_cond_wait(&left, &last);
    waits.store(0);
    pthread_mutex_unlock(&last);
}

}  // namespace

// Runs body(what, own) on this thread and the team's. A second call at the same time, by another thread of
// the program, runs on that thread alone.
extern "C" void omnikv_team_run(int wanted, long of, long by, Body run, void *with) {
    const long pieces = (of + by - 1) / by;
    wanted = wanted < MOST ? wanted : MOST;
    wanted = wanted < pieces ? wanted : (int)pieces;
    if (busy.exchange(1)) {
        Lane all;
        all.next.store(0), all.stop = pieces;
        Pieces own = {&all, of, by, 1, 0, 0, 0};
        run(with, own);
        return;
    }
    if (workers < wanted - 1) start(wanted - 1);
    for (int i = 0; i < wanted; i++) {
        lanes[i].next.store(lane_from(pieces, wanted, i), std::memory_order_relaxed);
        lanes[i].stop = lane_from(pieces, wanted, i + 1), lanes[i].taken = 0;
    }
    body = run, what = with, count = of, piece = by, threads = wanted;
    door.store((door.load() / CALL + 1) * CALL | OPEN);
    wake(0);
    Pieces own = {lanes, of, by, wanted, 0, 0, 0};
    run(with, own);
    lanes[0].taken = own.taken;
    close_door();
    busy.store(0);
}

// Of the last call that was shared: pieces that its threads began with and took; returns how many threads.
extern "C" int omnikv_team_last(long *begun, long *taken) {
    const long pieces = lanes[threads > 0 ? threads - 1 : 0].stop;
    for (int i = 0; i < threads; i++)
        begun[i] = lanes[i].stop - lane_from(pieces, threads, i), taken[i] = lanes[i].taken;
    return threads;
}

// For tests: adds 1 to times[i] for i of 0 .. of - 1, and puts the number of the thread that did so into by[i].
extern "C" void omnikv_team_marks(int wanted, long of, long each, int32_t *times, int32_t *by) {
    in_pieces(wanted, of, each, [&](Pieces &own) {
        for (long first, last; own.next(first, last);)
            for (long i = first; i < last; i++) times[i]++, by[i] = own.mine;
    });
}
