// The gated activation of the feed-forward part.
#pragma once

#include "device.cuh"

// silu(gate) * up
DEVICE float gated(float gate, float up) {
    float e = exp2_approximate(-gate * 1.44269504f);
    return gate / (1.0f + e) * up;
}
