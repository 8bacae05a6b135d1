// One row per K/V head leaves a store: the one of the least score. The last row takes its place.
#include <algorithm>
#include "scratch.h"
#include "vector.h"

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

// What rows have [group][rows, `stride` apart], over the group.
void reduce(const float *x, long stride, int group, int rows, int how, float *__restrict found) {
    memcpy(found, x, sizeof(float) * rows);
    for (int g = 1; g < group; g++) {
        x += stride;
        if (how == MOST)
            for (int t = 0; t < rows; t++) found[t] = x[t] > found[t] ? x[t] : found[t];
        else
            for (int t = 0; t < rows; t++) found[t] += x[t];
    }
    for (int t = 0; how == MEAN && t < rows; t++) found[t] /= group;
}

// In a loop of its own: with what follows, a fused multiply and sum would leave what torch rounds.
void square(const float *__restrict x, int count, float *__restrict found) {
    for (int t = 0; t < count; t++) found[t] = x[t] * x[t];
    asm volatile("" : : "r"(found) : "memory");
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
    square(mean, n, own);
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

// Of equal scores the older row goes. Rows of positions below `keep_below` and from `keep_from` on rank
// last. room: 8 floats a row.
int least(const Call &c, int head, float *room) {
    const int32_t *at = c.positions + head * c.position_head;
    float *const rank = room + 7 * c.rows;
    if (c.seen)
        memcpy(rank, steady_ranks(c, head, room), sizeof(float) * c.rows);
    else if (c.ranks)
        memcpy(rank, c.ranks + head * c.rank_head, sizeof(float) * c.rows);
    else if (c.scores)
        reduce(c.scores + head * c.score_head, c.score_query, c.group, c.rows, c.how, rank);
    else
        memset(rank, 0, sizeof(float) * c.rows);
    for (int t = 0; t < c.rows; t++)
        rank[t] = ((at[t] < c.keep_below) | (at[t] >= c.keep_from)) ? INFINITY : rank[t];
    Floats bests = all(INFINITY);
    int t = 0;
    for (; t + W <= c.rows; t += W) bests = load(rank + t) < bests ? load(rank + t) : bests;
    float best = -largest(-bests);
    for (; t < c.rows; t++) best = rank[t] < best ? rank[t] : best;
    int32_t age = INT32_MAX;
    for (int i = 0; i < c.rows; i++) age = ((rank[i] == best) & (at[i] < age)) ? at[i] : age;
    for (int i = 0; i < c.rows; i++)
        if (at[i] == age && rank[i] == best) return i;
    return 0;
}

}  // namespace

// Returns 0, or 2 without memory.
extern "C" int omnikv_drop_least(const Call *c) {
    static thread_local Scratch scratch;
    float *const room = (float *)scratch.get(sizeof(float) * 8 * c->rows);
    if (!room) return 2;
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

// What rows have received, in place of `ranks` [heads][group][rows], is added over the group to their scores,
// and its squares to the second ones. Returns 0, or 2 without memory.
extern "C" int omnikv_add_moments(const Call *c) {
    static thread_local Scratch scratch;
    float *const one = (float *)scratch.get(sizeof(float) * 2 * c->rows), *const squares = one + c->rows;
    if (!one) return 2;
    for (int head = 0; head < c->heads; head++) {
        reduce(c->ranks + head * c->rank_head, c->rows, c->group, c->rows, c->how, one);
        square(one, c->rows, squares);
        float *const sums = c->scores + head * c->score_head;
        for (int t = 0; t < c->rows; t++) sums[t] += one[t];
        for (int t = 0; t < c->rows; t++) sums[c->score_query + t] += squares[t];
    }
    return 0;
}

extern "C" int omnikv_sizeof_drop_call() { return sizeof(Call); }
