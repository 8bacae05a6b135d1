// One row per K/V head leaves a store: the one of the least score. The last row takes its place.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "scratch.h"

namespace {

struct Call {  // strides in bytes, but for those of positions and scores, which count elements
    char *k, *v;
    long key_head, key_row, value_head, value_row;
    int32_t *positions;  // [heads][..]
    long position_head;
    float *scores;  // [heads][group][..], or NULL
    long score_head, score_query;
    const float *ranks;  // [heads][..], in place of the scores, or NULL
    long rank_head;
    int key_bytes, value_bytes, heads, group, rows, how, keep_below, keep_from;
    // tokens so far, where scores are the sums of a row's weights and those of their squares (else 0), and
    // how many rows then stay since their weights vary most
    int seen, steady;
};

enum { MOST, MEAN, SUM };

// A row's score over the group.
inline float reduced(const float *x, long stride, int group, int how) {
    float found = x[0];
    for (int g = 1; g < group; g++) {
        const float one = x[g * stride];
        found = how != MOST ? found + one : one > found ? one : found;
    }
    return how == MEAN ? found / group : found;
}

// Ranks of a head's rows by the mean of their weights: RoCo's (kernels/select/drop.py: steady_ranks). room:
// 7 floats a row.
const float *steady_ranks(const Call &c, int head, float *room) {
    const int n = c.rows;
    const int32_t *at = c.positions + head * c.position_head;
    const float *sums = c.scores + head * c.score_head, *squares = sums + c.score_query;
    uint64_t *const keys = (uint64_t *)room, *const order = keys + n;
    float *__restrict const mean = room + 4 * n, *__restrict const own = mean + n;
    float *__restrict const deviation = own + n;
    for (int t = 0; t < n; t++) {
        const float seen = (float)(c.seen - at[t]);
        mean[t] = sums[t] / seen, deviation[t] = squares[t] / seen;
    }
    // in a loop of its own: a fused multiply and subtract would leave what torch rounds to nothing
    for (int t = 0; t < n; t++) own[t] = mean[t] * mean[t];
    asm volatile("" : : "r"(own) : "memory");
    for (int t = 0; t < n; t++) {
        const float left = deviation[t] - own[t];
        deviation[t] = at[t] >= c.keep_from ? INFINITY : sqrtf(left > 0 ? left : 0);
    }
    for (int t = 0; t < n; t++) {
        uint32_t bits;  // of a float that is not negative: they have its order
        memcpy(&bits, deviation + t, sizeof bits);
        order[t] = keys[t] = (uint64_t)bits << 32 | (uint32_t)at[t];
    }
    const int rest = n - c.steady;
    if (rest <= 0) return std::fill(mean, mean + n, INFINITY), mean;
    std::nth_element(order, order + rest, order + n);
    for (int t = 0; c.steady > 0 && t < n; t++) mean[t] = keys[t] >= order[rest] ? INFINITY : mean[t];
    return mean;
}

// Of equal scores the older row goes. Rows of positions below `keep_below`
// and from `keep_from` on rank last.
int least(const Call &c, int head, float *room) {
    const int32_t *at = c.positions + head * c.position_head;
    const float *scores = c.scores ? c.scores + head * c.score_head : nullptr;
    const float *ranks = c.seen ? steady_ranks(c, head, room) : c.ranks ? c.ranks + head * c.rank_head : nullptr;
    int found = 0;
    float best = INFINITY;
    int32_t age = INT32_MAX;
    for (int t = 0; t < c.rows; t++) {
        const bool stays = at[t] < c.keep_below || at[t] >= c.keep_from;
        const float own = ranks    ? ranks[t]
                          : scores ? reduced(scores + t, c.score_query, c.group, c.how)
                                   : 0;
        const float x = stays ? INFINITY : own;
        if (x < best || (x == best && at[t] < age)) best = x, age = at[t], found = t;
    }
    return found;
}

}  // namespace

// Returns 0, or 2 without memory.
extern "C" int omnikv_drop_least(const Call *c) {
    static thread_local Scratch scratch;
    float *const room = c->seen ? (float *)scratch.get(sizeof(float) * 7 * c->rows) : nullptr;
    if (c->seen && !room) return 2;
    for (int head = 0; head < c->heads; head++) {
        const int to = least(*c, head, room), from = c->rows - 1;
        if (to == from) continue;
        char *k = c->k + head * c->key_head, *v = c->v + head * c->value_head;
        memcpy(k + to * c->key_row, k + from * c->key_row, c->key_bytes);
        memcpy(v + to * c->value_row, v + from * c->value_row, c->value_bytes);
        int32_t *at = c->positions + head * c->position_head;
        at[to] = at[from];
        for (int g = 0; c->scores && g < c->group; g++) {
            float *x = c->scores + head * c->score_head + g * c->score_query;
            x[to] = x[from];
        }
    }
    return 0;
}

extern "C" int omnikv_sizeof_drop_call() { return sizeof(Call); }
