// A product whose bits do not depend on the number of rows: out[m, n] = x[m, k] * weight[n, k]^T + bias.
//
// Every output is summed over k in steps of 16, ascending, in one accumulator, whatever the tile; there is no split of k.
// The tile shapes differ in speed alone: few rows, some, or many.
#include "product.cuh"

constexpr uint32_t GEMM_THREADS = 128;
constexpr uint32_t GEMM_STEP = 64; // of k, in shared memory at once
// Of the pipeline. Few rows read weights at the speed of memory, from as few blocks as there are columns for, so each
// keeps many loads under way; tiles of many rows are as large as fits smaller GPUs.
constexpr uint32_t gemm_stages(uint32_t rows) { return rows <= 16 ? 8 : rows <= 64 ? 4 : 3; }

// ROWS x COLUMNS outputs a block; WARP_ROWS x WARP_COLUMNS a warp. The grid's columns are tiles of n, its rows tiles of m.
// k is a multiple of 8.
template <typename T, typename Out, uint32_t ROWS, uint32_t COLUMNS, uint32_t WARP_ROWS, uint32_t WARP_COLUMNS>
DEVICE void gemm(const GemmParams &p) {
    static_assert(ROWS / WARP_ROWS * (COLUMNS / WARP_COLUMNS) == GEMM_THREADS / WARP, "four warps fill a tile");
    using Shape = Tile<GEMM_STEP>;
    constexpr uint32_t STAGE = Shape::bytes(ROWS + COLUMNS);
    constexpr uint32_t STAGES = gemm_stages(ROWS);
    constexpr uint32_t M = WARP_ROWS / 16, N = WARP_COLUMNS / 8;
    uint8_t *stages = shared_memory();
    uint32_t row = block_row() * ROWS, column = block_index() * COLUMNS;
    uint32_t steps = (p.k + GEMM_STEP - 1) / GEMM_STEP;

    // A thread loads the same chunk of every LINES-th row, so that a step further is the same distance for all of them.
    constexpr uint32_t LINES = GEMM_THREADS / Shape::CHUNKS;
    static_assert(ROWS % LINES == 0 && COLUMNS % LINES == 0, "a turn loads either of x or of the weight");
    uint32_t own_line = thread_index() / Shape::CHUNKS, own_chunk = thread_index() % Shape::CHUNKS;
    const T *x_from = (const T *)p.x + (uint64_t)(row + own_line) * p.k + own_chunk * 8;
    const T *weight_from = (const T *)p.weight + (uint64_t)(column + own_line) * p.k + own_chunk * 8;
    // Of x, of the weight, or of both.
    auto load = [&](uint32_t step, uint8_t *stage, bool of_x, bool of_weight) {
        uint32_t k = step * GEMM_STEP;
        bool inside = k + own_chunk * 8 < p.k;
        UNROLL
        for (uint32_t line = 0; line < ROWS + COLUMNS; line += LINES) {
            bool left = line < ROWS;
            if (left ? !of_x : !of_weight) {
                continue;
            }
            uint32_t below = left ? line : line - ROWS;
            bool valid = inside && (left ? row : column) + below + own_line < (left ? p.m : p.n);
            // What is not loaded has an address that is allocated, as checkers of memory want.
            const T *from = valid ? (left ? x_from : weight_from) + (uint64_t)below * p.k + k : (const T *)p.x;
            cp_async16(Shape::at(stage, line + own_line, own_chunk), from, valid);
        }
    };
    // Weights are on their way before the kernel that makes x has ended.
    UNROLL
    for (uint32_t s = 0; s + 1 < STAGES; s++) {
        if (s < steps) {
            load(s, stages + s * STAGE, false, true);
        }
    }
    await_kernel_before();
    UNROLL
    for (uint32_t s = 0; s + 1 < STAGES; s++) {
        if (s < steps) {
            load(s, stages + s * STAGE, true, false);
        }
        cp_async_commit();
    }
    float sums[M][N][4] = {};
    uint32_t warp_row = warp() % (ROWS / WARP_ROWS) * WARP_ROWS;
    uint32_t warp_column = warp() / (ROWS / WARP_ROWS) * WARP_COLUMNS;
    uint32_t x_part = Shape::offset(warp_row + lane() % 16, lane() / 16);
    uint32_t weight_part = Shape::offset(ROWS + warp_column + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
    for (uint32_t step = 0; step < steps; step++) {
        if (MUTANT(MissingWait, false, true)) {
            cp_async_wait<STAGES - 2>();
        }
        barrier();
        uint32_t ahead = step + STAGES - 1;
        if (ahead < steps) {
            load(ahead, stages + ahead % STAGES * STAGE, true, true);
        }
        cp_async_commit();
        uint8_t *stage = stages + step % STAGES * STAGE;
        UNROLL
        for (uint32_t k = 0; k < GEMM_STEP; k += 16) {
            uint32_t a[M][4];
            UNROLL
            for (uint32_t i = 0; i < M; i++) {
                load_matrices(a[i], stage + Shape::bytes(16 * i) + Shape::further(x_part, k / 8));
            }
            UNROLL
            for (uint32_t j = 0; j < N; j += 2) {
                uint32_t b[4];
                load_matrices(b, stage + Shape::bytes(8 * j) + Shape::further(weight_part, k / 8));
                UNROLL
                for (uint32_t i = 0; i < M; i++) {
                    mma<T>(sums[i][j], a[i], b[0], b[1]);
                    mma<T>(sums[i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
    cp_async_wait<0>();
    UNROLL
    for (uint32_t i = 0; i < M; i++) {
        UNROLL
        for (uint32_t j = 0; j < N; j++) {
            UNROLL
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t to_row = row + warp_row + 16 * i + lane() / 4 + 8 * half;
                uint32_t to_column = column + warp_column + 8 * j + lane() % 4 * 2;
                if (to_row < p.m && to_column < p.n) {
                    bool both = to_column + 1 < p.n;
                    float low = sums[i][j][2 * half], high = sums[i][j][2 * half + 1];
                    if (p.bias) {
                        low += p.bias[to_column];
                        high += both ? p.bias[to_column + 1] : 0.0f;
                    }
                    store_pair<T>((Out *)p.out + (uint64_t)to_row * p.stride + to_column, low, high, both);
                }
            }
        }
    }
}

#define GEMM(T, NAME, Out, OUT)                                                                                      \
    EARLY_KERNEL(gemm_few_##NAME##_##OUT, GemmParams, GEMM_THREADS, 2) { gemm<T, Out, 16, 64, 16, 16>(p); }                \
    EARLY_KERNEL(gemm_some_##NAME##_##OUT, GemmParams, GEMM_THREADS, 2) { gemm<T, Out, 64, 64, 32, 32>(p); }               \
    EARLY_KERNEL(gemm_many_##NAME##_##OUT, GemmParams, GEMM_THREADS, 1) { gemm<T, Out, 128, 128, 64, 64>(p); }

GEMM(Bf16, bf16, Bf16, half)
GEMM(Bf16, bf16, float, f32)
GEMM(F16, f16, F16, half)
GEMM(F16, f16, float, f32)
