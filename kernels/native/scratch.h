// Memory of a thread that outlives a call: a step allocates nothing.
#pragma once
#include <stdlib.h>

namespace {

struct Scratch {
    void *at = nullptr;
    size_t size = 0;
    ~Scratch() { free(at); }
    void *get(size_t needed) {
        if (needed > size) {
            free(at);
            at = aligned_alloc(64, size = (needed + 4095) / 4096 * 4096);
        }
        return at;
    }
};

}  // namespace
