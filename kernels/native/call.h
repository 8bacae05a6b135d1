// What one call of attention.cpp is told.
#pragma once
#include <stdint.h>

namespace {

struct Call {
    const float *q;  // [heads][queries * group][dim]
    const char *k, *v;
    long key_head, key_row, value_head, value_row;  // strides in bytes
    const int32_t *index;                           // or NULL
    long index_head;                                // elements from one head's to the next's
    float *out, *lse;  // [heads][queries * group][dim] and [..]; out NULL: no value is read
    float *parts;                                   // [heads][splits][queries * group][dim + 2]
    float *logits;                                  // [heads][group][ahead], of the last query, or NULL
    long ahead;
    // [heads] each, in place of `start` and `visited`, of which the latter is the most then, where heads
    // have rows of their own in one run of them; or NULL. lengths beside an index: so many rows a head
    // reads, of which the last visited - kept are from `start` on
    const int64_t *starts, *lengths;
    const float *logs;  // added to the logit of each row of that run, or NULL
    int heads, queries, group, dim, kept, start, visited, split, threads;
    int shared;  // heads in turn that read the same K and V, each by an index of its own; mostly 1
    float scale;  // of logits
    float cap;  // logits become cap * tanh(logits / cap); 0: they stay
    int unit;   // rows in turn that an entry of the index stands for; 0: one
};

}  // namespace
