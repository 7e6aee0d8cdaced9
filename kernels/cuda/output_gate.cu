// The gate behind attention: each element of the output times the sigmoid of its gate.
#include "params.h"

constexpr uint32_t GATE_THREADS = 256;

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp2_approximate(-x * 1.44269504f)); }

// Eight numbers a thread, in place. The number of elements is a multiple of 8.
template <typename T> DEVICE void multiply(const OutputGateParams &p) {
    uint64_t at = (uint64_t)block_index() * GATE_THREADS + thread_index();
    if (at >= p.elements / 8) {
        return;
    }
    Vec16 gate = ((const Vec16 *)p.gates)[at], x = ((const Vec16 *)p.x)[at];
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        float low = sigmoid(to_float(T{(uint16_t)gate.word[j]})), high = sigmoid(to_float(T{(uint16_t)(gate.word[j] >> 16)}));
        x.word[j] = pack<T>(to_float(T{(uint16_t)x.word[j]}) * low, to_float(T{(uint16_t)(x.word[j] >> 16)}) * high);
    }
    ((Vec16 *)p.x)[at] = x;
}

KERNEL(output_gate_bf16, OutputGateParams, GATE_THREADS, 4) { multiply<Bf16>(p); }
KERNEL(output_gate_f16, OutputGateParams, GATE_THREADS, 4) { multiply<F16>(p); }
