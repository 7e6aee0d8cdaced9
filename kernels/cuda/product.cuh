// What products have in common.
#pragma once

#include "params.h"

// Stores two neighbouring outputs, or, at a row's end, the first of them alone.
template <typename T> DEVICE void store_pair(T *to, float low, float high, bool both) {
    if (both && (uintptr_t)to % 4 == 0) {
        *(uint32_t *)to = pack<T>(low, high);
        return;
    }
    to[0] = narrow<T>(low);
    if (both) {
        to[1] = narrow<T>(high);
    }
}
template <typename T> DEVICE void store_pair(float *to, float low, float high, bool both) {
    to[0] = low;
    if (both) {
        to[1] = high;
    }
}
