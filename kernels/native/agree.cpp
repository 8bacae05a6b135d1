// In how many tables the signs of tokens are those of queries (kernels/sketch/agreement.py): codes of one
// table lie token beside token, and are compared by vectors.
#include "team.h"
#include "vector.h"

namespace {

struct Agree {  // strides in elements
    const int16_t *asked;  // [heads][group][tables]
    const int16_t *codes;  // [heads][tables][..]
    long code_head, code_table;
    uint8_t *agreed;       // [heads][group][..]: how many tables
    long agreed_head, agreed_query;
    float *most;           // [heads][..]: of any query of the group
    long most_head;
    int32_t *found;        // [heads]: tokens of which the most is `least` or more
    int heads, group, tables, tokens, least, threads;
};

typedef int16_t Shorts __attribute__((vector_size(4 * W), aligned(2), may_alias));
constexpr int LANES = 2 * W;
constexpr int TILE = 1024;  // tokens whose counts are held
constexpr int AT_ONCE = 4;  // queries, and tables, that are taken together

INLINE Shorts codes_at(const int16_t *p) { return *(const Shorts *)p; }

// Adds to counts [T][TILE] where codes of `tables` tables in turn are those asked [T][all tables].
template <int T, int tables>
INLINE void compare(const Agree &c, const int16_t *codes, const int16_t *asked, int count, int16_t *counts) {
    for (int t = 0; t < count; t += LANES) {
        Shorts sums[T], own[tables];
        const int here = count - t < LANES ? count - t : LANES;
        for (int l = 0; l < tables; l++) {
            const int16_t *from = codes + l * c.code_table + t;
            if (here == LANES) {
                own[l] = codes_at(from);
                __builtin_prefetch(from + tables * c.code_table);
            } else {  // behind the last there may be no memory
                int16_t some[LANES] = {};
                memcpy(some, from, sizeof(int16_t) * here);
                own[l] = codes_at(some);
            }
        }
        for (int g = 0; g < T; g++) {
            sums[g] = *(Shorts *)(counts + g * TILE + t);
            for (int l = 0; l < tables; l++) sums[g] -= own[l] == asked[(long)g * c.tables + l];
            *(Shorts *)(counts + g * TILE + t) = sums[g];
        }
    }
}

template <int T>
void count_tables(const Agree &c, const int16_t *codes, const int16_t *asked, int count, int16_t *counts) {
    memset(counts, 0, sizeof(int16_t) * T * TILE);
    int l = 0;
    for (; l + AT_ONCE <= c.tables; l += AT_ONCE)
        compare<T, AT_ONCE>(c, codes + l * c.code_table, asked + l, count, counts);
    for (; l < c.tables; l++) compare<T, 1>(c, codes + l * c.code_table, asked + l, count, counts);
}

// Tokens first .. first + count - 1 of a head; how many of them have the least that counts.
int agree(const Agree &c, int head, int first, int count) {
    alignas(64) int16_t counts[AT_ONCE * TILE], best[TILE] = {};
    const int16_t *codes = c.codes + head * c.code_head + first;
    for (int g = 0; g < c.group;) {
        const int left = c.group - g, some = left >= AT_ONCE ? AT_ONCE : left >= 2 ? 2 : 1;
        const int16_t *asked = c.asked + ((long)head * c.group + g) * c.tables;
        if (some == AT_ONCE) count_tables<AT_ONCE>(c, codes, asked, count, counts);
        else if (some == 2) count_tables<2>(c, codes, asked, count, counts);
        else count_tables<1>(c, codes, asked, count, counts);
        for (int r = 0; r < some; r++) {
            uint8_t *out = c.agreed + head * c.agreed_head + (g + r) * c.agreed_query + first;
            const int16_t *own = counts + r * TILE;
            for (int t = 0; t < count; t++) {
                out[t] = (uint8_t)own[t];
                best[t] = own[t] > best[t] ? own[t] : best[t];
            }
        }
        g += some;
    }
    float *most = c.most + head * c.most_head + first;
    int found = 0;
    for (int t = 0; t < count; t++) most[t] = best[t], found += best[t] >= c.least;
    return found;
}

}  // namespace

extern "C" void omnikv_agree(const Agree *given) {
    const Agree &c = *given;
    share(c.threads, c.heads, 1, [&](int head) {
        int found = 0;
        for (int first = 0; first < c.tokens; first += TILE)
            found += agree(c, head, first, first + TILE < c.tokens ? TILE : c.tokens - first);
        c.found[head] = found;
    });
}

extern "C" int omnikv_sizeof_agree() { return sizeof(Agree); }
