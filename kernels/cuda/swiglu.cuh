// The gated activations: of the feed-forward part, and of recurrent layers.
#pragma once

#include "device.cuh"

// silu(gate) * up
DEVICE float gated(float gate, float up) {
    float e = exp2_approximate(-gate * 1.44269504f);
    return gate / (1.0f + e) * up;
}

// gelu(gate) * up, by the approximation with tanh: half of 1 + tanh(x) is 1 / (1 + exp(-2x))
DEVICE float gated_gelu(float gate, float up) {
    float twice = 1.59576912f * (gate + 0.044715f * gate * gate * gate);
    float e = exp2_approximate(-twice * 1.44269504f);
    return gate / (1.0f + e) * up;
}
