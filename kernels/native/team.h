// Work of a call, shared by a team of threads of our own (team.cpp): every thread begins with pieces of its
// own, equally many, and takes those of others once it has none. So a thread that has no core, or half of
// one, holds nobody up, and as long as nobody disturbs it a thread finds the same rows in each step.
#pragma once
#include <stdint.h>
#include <atomic>

namespace {

constexpr long PIECE = 48 << 10;  // bytes of a weight that a thread takes at a time: 1 to 2 microseconds

struct alignas(64) Lane {  // pieces that one thread begins with: next .. stop - 1
    std::atomic<long> next;
    long stop, taken;  // taken: by this thread, of whomever
};

// What a thread takes its pieces from. What is computed must not depend on who takes what.
struct Pieces {
    Lane *lanes;
    long count, piece;
    int threads, mine, passed;  // mine: the number of this thread; passed: lanes that are empty
    long taken;
    bool next(long &first, long &last) {
        for (; passed < threads; passed++) {
            Lane &lane = lanes[(mine + passed) % threads];
            // an empty lane is not written to: others still look at it
            if (lane.next.load(std::memory_order_relaxed) >= lane.stop) continue;
            const long at = lane.next.fetch_add(1, std::memory_order_relaxed);
            if (at >= lane.stop) continue;
            taken++;
            first = at * piece, last = first + piece < count ? first + piece : count;
            return true;
        }
        return false;
    }
};

typedef void (*Body)(void *what, Pieces &pieces);

// The pieces that thread `mine` of `threads` begins with, of `pieces`: from .. to - 1.
inline long lane_from(long pieces, int threads, int mine) { return pieces * mine / threads; }

// The part of the work that piece i stands for, where parts grow: threads are dealt them in turn, the largest
// first, so that all begin with as much and those that are left at the end are small.
inline long largest_first(long i, long pieces, int threads) {
    threads = threads < 1 ? 1 : threads < pieces ? threads : (int)pieces;
    int mine = 0;
    while (i >= lane_from(pieces, threads, mine + 1)) mine++;
    const long round = i - lane_from(pieces, threads, mine);
    long before = 0;
    for (int t = 0; t < threads; t++) {
        const long own = lane_from(pieces, threads, t + 1) - lane_from(pieces, threads, t);
        before += (own < round ? own : round) + (t < mine && own > round);
    }
    return pieces - 1 - before;
}

}  // namespace

extern "C" void omnikv_team_run(int threads, long count, long piece, Body body, void *what);

namespace {

// Runs body(pieces) on up to `threads` threads, each of which takes pieces of `piece` of the numbers
// 0 .. count - 1 until there are none.
template <class F>
inline void in_pieces(int threads, long count, long piece, const F &body) {
    if (count <= 0) return;
    if (threads > 1 && count > piece) {
        Body call = [](void *what, Pieces &pieces) { (*(const F *)what)(pieces); };
        omnikv_team_run(threads, count, piece, call, (void *)&body);
        return;
    }
    Lane all;
    all.next.store(0, std::memory_order_relaxed), all.stop = 1;
    Pieces pieces = {&all, count, count, 1, 0, 0, 0};
    body(pieces);
}

// Runs part(i) for i of 0 .. count - 1 on up to `threads` threads.
template <class F>
inline void share(int threads, long count, long piece, const F &part) {
    in_pieces(threads, count, piece, [&](Pieces &pieces) {
        for (long first, last; pieces.next(first, last);)
            for (long i = first; i < last; i++) part(i);
    });
}

}  // namespace
