// Memory of a thread that outlives a call: a step allocates nothing.
#pragma once
#include <stdlib.h>

namespace {

struct Scratch {
    void *at = nullptr;
    size_t size = 0;
    ~Scratch() { free(at); }
    // NULL without memory.
    void *get(size_t needed) {
        if (needed > size) {
            free(at);
            size = (needed + 4095) / 4096 * 4096;
            at = aligned_alloc(64, size);
            if (!at) size = 0;
        }
        return at;
    }
};

}  // namespace
