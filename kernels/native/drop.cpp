// One row per K/V head leaves a store: the one of the least score. The last row takes its place.
#include <cmath>
#include <cstdint>
#include <cstring>

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

// Of equal scores the older row goes. Rows of positions below `keep_below`
// and from `keep_from` on rank last.
int least(const Call &c, int head) {
    const int32_t *at = c.positions + head * c.position_head;
    const float *scores = c.scores ? c.scores + head * c.score_head : nullptr;
    const float *ranks = c.ranks ? c.ranks + head * c.rank_head : nullptr;
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

extern "C" void omnikv_drop_least(const Call *c) {
    for (int head = 0; head < c->heads; head++) {
        const int to = least(*c, head), from = c->rows - 1;
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
}

extern "C" int omnikv_sizeof_drop_call() { return sizeof(Call); }
