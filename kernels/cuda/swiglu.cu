// The gated activation between the two halves of the feed-forward part.
#include "params.h"
#include "swiglu.cuh"

constexpr uint32_t SWIGLU_THREADS = 256;

template <bool GELU> DEVICE float activated(float gate, float up) {
    return GELU ? gated_gelu(gate, up) : gated(gate, up);
}

// Eight numbers a thread; blocks in a row's direction first. width is a multiple of 8.
template <typename T, bool GELU> DEVICE void gate(const SwigluParams &p) {
    uint32_t eights = p.width / 8;
    uint64_t at = (uint64_t)block_index() * SWIGLU_THREADS + thread_index();
    if (at >= (uint64_t)p.rows * eights) {
        return;
    }
    uint64_t row = at / eights;
    uint32_t i = (uint32_t)(at % eights);
    const Vec16 *from = (const Vec16 *)p.gate_up + row * 2 * eights;
    Vec16 gate = from[i], up = from[i + eights], out;
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        float low = activated<GELU>(to_float(T{(uint16_t)gate.word[j]}), to_float(T{(uint16_t)up.word[j]}));
        float high = activated<GELU>(to_float(T{(uint16_t)(gate.word[j] >> 16)}), to_float(T{(uint16_t)(up.word[j] >> 16)}));
        out.word[j] = pack<T>(low, high);
    }
    ((Vec16 *)p.out)[at] = out;
}

KERNEL(swiglu_bf16, SwigluParams, SWIGLU_THREADS, 4) { gate<Bf16, false>(p); }
KERNEL(swiglu_f16, SwigluParams, SWIGLU_THREADS, 4) { gate<F16, false>(p); }
KERNEL(geglu_bf16, SwigluParams, SWIGLU_THREADS, 4) { gate<Bf16, true>(p); }
KERNEL(geglu_f16, SwigluParams, SWIGLU_THREADS, 4) { gate<F16, true>(p); }
