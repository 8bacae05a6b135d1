// Heads name their best tokens in turns (kernels/select/turns.py).
#include <algorithm>

#include "scratch.h"
#include "vector.h"

extern "C" void omnikv_topk(const float *scores, long stride, int rows, int columns, const int32_t *lo,
                            const int32_t *hi, const int32_t *k, int32_t *out, int room, int32_t *counts);

namespace {

// In the order of ranks: the larger logit first, of equal ones the lower token; -0 is 0, NaN the lowest.
INLINE uint64_t rank_of(float logit, int token) {
    const float plain = logit == logit ? logit + 0.f : -INFINITY;
    uint32_t bits;
    memcpy(&bits, &plain, sizeof bits);
    const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)~ascending << 32 | (uint32_t)token;
}

}  // namespace

// logits [heads][..], `row` apart; out takes tokens 0 .. first - 1 and then `count` of first .. stop - 1,
// ascending. Returns 0, 2 without memory.
extern "C" int omnikv_take_turns(const float *logits, long row, int heads, int first, int stop, int count,
                                 int32_t *out) {
    static thread_local Scratch scratch;
    const int words = (stop + 63) / 64;
    uint64_t *const named = (uint64_t *)scratch.get(sizeof(uint64_t) * (words + (long)heads * count) +
                                                    sizeof(int32_t) * (count + 1));
    if (!named) return 2;
    uint64_t *const ranked = named + words;
    int32_t *const best = (int32_t *)(ranked + (long)heads * count);
    for (int h = 0; h < heads; h++) {
        uint64_t *const own = ranked + (long)h * count;
        int32_t found;
        omnikv_topk(logits + h * row, row, 1, stop, &first, &stop, &count, best, count, &found);
        for (int i = 0; i < count; i++) own[i] = rank_of(logits[h * row + best[i]], best[i]);
        std::sort(own, own + count);
    }
    memset(named, 0, sizeof(uint64_t) * words);
    int taken = 0;
    for (int place = 0; taken < count; place++)
        for (int h = 0; h < heads && taken < count; h++) {
            const uint32_t token = (uint32_t)ranked[(long)h * count + place];
            const uint64_t bit = (uint64_t)1 << token % 64;
            taken += !(named[token / 64] & bit);
            named[token / 64] |= bit;
        }
    for (int t = 0; t < first; t++) *out++ = t;
    for (int w = 0; w < words; w++)
        for (uint64_t left = named[w]; left; left &= left - 1) *out++ = w * 64 + __builtin_ctzll(left);
    return 0;
}
