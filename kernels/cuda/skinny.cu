// A product for the few rows of a small decode batch: out[m, n] = x[m, k] * weight[n, k]^T + bias, m at most 8.
//
// It reads every weight once, at the speed of memory, and has nothing else to do: weights go straight from memory to
// registers, in the layout of an operand. The order of k within an operand is free as long as both sides have the same, so a
// lane's 16 bytes of a row are its part of two operands, without a detour through shared memory.
//
// k is dealt out to the warps of a block in units of 64, and their sums are added in the order of the warps: the order of
// summation depends on k alone, neither on the number of rows nor on the tile. It is another one than that of gemm.cu.
//
// The first weights are under way before the kernel that makes x has ended.
//
// With an activation, a block computes as many columns of the gates (the first half of n) as of the ups (the second half) and
// writes silu(gate) * up, with the bits of the product followed by the kernel of swiglu.cu.
#include "product.cuh"
#include "swiglu.cuh"

constexpr uint32_t SKINNY_THREADS = 256;
constexpr uint32_t SKINNY_WARPS = SKINNY_THREADS / WARP;
constexpr uint32_t SKINNY_ROWS = 8;
constexpr uint32_t SKINNY_UNIT = 64;

// TILES * 8 columns a block, half as many of the output with SWIGLU. k is a multiple of 8.
template <typename T, typename Out, uint32_t TILES, bool SWIGLU> DEVICE void skinny(const GemmParams &p) {
    static_assert(!SWIGLU || TILES % 2 == 0, "as many tiles of gates as of ups");
    constexpr uint32_t COLUMNS = 8 * TILES, OUT_COLUMNS = SWIGLU ? COLUMNS / 2 : COLUMNS;
    uint32_t out_n = SWIGLU ? p.n / 2 : p.n;
    // Units of a warp that are under way: eight loads of weights a lane, whatever the tile.
    constexpr uint32_t AHEAD = 4 / TILES;
    uint32_t column = block_index() * OUT_COLUMNS;
    constexpr uint32_t STRIDE = SKINNY_WARPS * SKINNY_UNIT;
    // Of x, row LINE; of the weight, column LINE of each tile; in a unit, eight numbers from FIRST on, and eight 32 further.
    uint32_t line = lane() / 4, first = warp() * SKINNY_UNIT + lane() % 4 * 8;
    const T *x_from = (const T *)p.x + (uint64_t)line * p.k + first;
    const T *weight_from = (const T *)p.weight + (uint64_t)(column + line) * p.k + first;
    // From FIRST to the end of k; the pointers move on as it shrinks.
    int32_t left = (int32_t)(p.k - MUTANT(LastChunk, 8, 0)) - (int32_t)first;
    // A tile's first column, from the block's first one on: with SWIGLU the second half of the tiles are ups.
    auto column_of = [&](uint32_t tile) {
        uint32_t ups = SWIGLU && tile >= TILES / 2 ? out_n - OUT_COLUMNS : 0;
        return 8 * tile + ups;
    };
    bool tile_valid[TILES];
    UNROLL
    for (uint32_t tile = 0; tile < TILES; tile++) {
        tile_valid[tile] = column + 8 * tile % OUT_COLUMNS + line < out_n;
    }
    // The unit so many numbers further.
    auto load_weights = [&](uint32_t further, Vec16(&to)[TILES][2]) {
        UNROLL
        for (uint32_t tile = 0; tile < TILES; tile++) {
            UNROLL
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t k = further + half * 32;
                const T *from = weight_from + (uint64_t)column_of(tile) * p.k + k;
                to[tile][half] = load_constant(from, tile_valid[tile] && (int32_t)k < left);
            }
        }
    };
    auto load_x = [&](uint32_t further, Vec16(&to)[2]) {
        UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t k = further + half * 32;
            bool valid = line < p.m && (int32_t)k < left;
            to[half] = valid ? *(const Vec16 *)(x_from + k) : Vec16{{0, 0, 0, 0}};
        }
    };

    Vec16 weights[AHEAD][TILES][2], x[AHEAD][2];
    UNROLL
    for (uint32_t i = 0; i < AHEAD; i++) {
        load_weights(i * STRIDE, weights[i]);
    }
    if (MUTANT(EarlyRead, false, true)) {
        await_kernel_before();
    }
    UNROLL
    for (uint32_t i = 0; i < AHEAD; i++) {
        load_x(i * STRIDE, x[i]);
    }
    if (MUTANT(EarlyRead, true, false)) {
        await_kernel_before();
    }
    // Two of each, for a multiplication waits for the one before it that adds to the same sum.
    float sums[TILES][2][4] = {};
    for (uint32_t k = warp() * SKINNY_UNIT; k < p.k; k += AHEAD * STRIDE) {
        UNROLL
        for (uint32_t i = 0; i < AHEAD; i++) {
            UNROLL
            for (uint32_t half = 0; half < 2; half++) {
                UNROLL
                for (uint32_t word = 0; word < 4; word += 2) {
                    // Rows 8 to 15 of the operand are none.
                    uint32_t a[4] = {x[i][half].word[word], 0, x[i][half].word[word + 1], 0};
                    UNROLL
                    for (uint32_t tile = 0; tile < TILES; tile++) {
                        const Vec16 &b = weights[i][tile][half];
                        mma<T>(sums[tile][half], a, b.word[word], b.word[word + 1]);
                    }
                }
            }
            // Beyond the last unit zeros, which change no sum.
            load_weights((i + AHEAD) * STRIDE, weights[i]);
            load_x((i + AHEAD) * STRIDE, x[i]);
        }
        x_from += AHEAD * STRIDE;
        weight_from += AHEAD * STRIDE;
        left -= AHEAD * STRIDE;
    }

    // [warps, rows, columns]
    float *parts = (float *)shared_memory();
    UNROLL
    for (uint32_t tile = 0; tile < TILES; tile++) {
        float *to = parts + (warp() * SKINNY_ROWS + line) * COLUMNS + 8 * tile + lane() % 4 * 2;
        const float(&even)[4] = sums[tile][0], (&odd)[4] = sums[tile][1];
        *(Float2 *)to = Float2{even[0] + odd[0], even[1] + odd[1]};
    }
    barrier();
    constexpr uint32_t PAIRS = OUT_COLUMNS / 2;
    static_assert(SKINNY_ROWS * PAIRS <= SKINNY_THREADS, "a thread merges two numbers at most");
    uint32_t row = thread_index() / PAIRS, pair = thread_index() % PAIRS * 2;
    if (row >= p.m || column + pair >= out_n) {
        return;
    }
    bool both = column + pair + 1 < out_n;
    // Of the pair in the block's columns, which are those of the product from FIRST on.
    auto sum_of = [&](uint32_t in_block, uint32_t first) {
        Float2 sum = {0.0f, 0.0f};
        UNROLL
        for (uint32_t w = 0; w < SKINNY_WARPS - MUTANT(LastWarp, 1, 0); w++) {
            Float2 part = *(const Float2 *)(parts + (w * SKINNY_ROWS + row) * COLUMNS + in_block);
            sum.x += part.x;
            sum.y += part.y;
        }
        if (p.bias) {
            sum.x += p.bias[first];
            sum.y += both ? p.bias[first + 1] : 0.0f;
        }
        return sum;
    };
    Float2 sum = sum_of(pair, column + pair);
    if constexpr (SWIGLU) {
        Float2 up = sum_of(OUT_COLUMNS + pair, out_n + column + pair);
        // Rounded as the product would be.
        sum.x = gated(to_float(narrow<T>(sum.x)), to_float(narrow<T>(up.x)));
        sum.y = gated(to_float(narrow<T>(sum.y)), to_float(narrow<T>(up.y)));
    }
    store_pair<T>((Out *)p.out + (uint64_t)row * p.stride + column + pair, sum.x, sum.y, both);
}

#define SKINNY_GEMM(T, NAME, Out, OUT)                                                                               \
    EARLY_KERNEL(skinny_gemm_8_##NAME##_##OUT, GemmParams, SKINNY_THREADS, 2) { skinny<T, Out, 1, false>(p); }       \
    EARLY_KERNEL(skinny_gemm_16_##NAME##_##OUT, GemmParams, SKINNY_THREADS, 2) { skinny<T, Out, 2, false>(p); }      \
    EARLY_KERNEL(skinny_gemm_32_##NAME##_##OUT, GemmParams, SKINNY_THREADS, 2) { skinny<T, Out, 4, false>(p); }
#define SKINNY_GEMM_SWIGLU(T, NAME)                                                                                  \
    EARLY_KERNEL(skinny_gemm_swiglu_16_##NAME, GemmParams, SKINNY_THREADS, 2) { skinny<T, T, 2, true>(p); }          \
    EARLY_KERNEL(skinny_gemm_swiglu_32_##NAME, GemmParams, SKINNY_THREADS, 2) { skinny<T, T, 4, true>(p); }

SKINNY_GEMM(Bf16, bf16, Bf16, half)
SKINNY_GEMM(Bf16, bf16, float, f32)
SKINNY_GEMM(F16, f16, F16, half)
SKINNY_GEMM(F16, f16, float, f32)
SKINNY_GEMM_SWIGLU(Bf16, bf16)
SKINNY_GEMM_SWIGLU(F16, f16)
