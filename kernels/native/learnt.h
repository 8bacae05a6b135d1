// What one call of learn.cpp is told.
#pragma once
#include <stdint.h>

namespace {

struct Learnt {
    const char *row;          // the token's K, or V, of each head: strides in bytes
    const int64_t *channels;  // [heads][rows]: of each row of the index; NULL: its number
    const float *centroids;   // [heads][rows][sums][dim / rows], of codes
    char *index;              // [heads][rows][tokens]: K by channel, or uint8 codes; strides in bytes
    double *prefix, *blocks;  // [heads][block][dim] and [heads][..][dim], strides in elements
    float *mean;              // [heads][dim]: of the V of the token and those before
    long row_token;           // bytes from a token's row to the next one's; read by choose.cpp alone
    long row_head, index_head, index_row, centroid_head, centroid_part, prefix_head, block_head;
    int heads, dim, rows, sums, token, block, kind;
};

}  // namespace
