// Kernels that are wrong, each in one way, to see that the harness finds it; no device ever runs them.
#include "device.cuh"

struct FaultyParams {
    // 64 bytes of global memory.
    uint32_t *memory;
};

KERNEL(faulty_read_outside, FaultyParams, 64, 1) { p.memory[thread_index() % 2] = p.memory[16 + thread_index()]; }

KERNEL(faulty_write_outside, FaultyParams, 64, 1) { p.memory[thread_index()] = 1; }

KERNEL(faulty_alignment, FaultyParams, 64, 1) {
    *(Vec16 *)p.memory = *(const Vec16 *)(p.memory + 1);
}

KERNEL(faulty_atomic_outside, FaultyParams, 64, 1) { atomic_add(p.memory + 16, 1u); }

// Two lanes of a warp, and nothing between them.
KERNEL(faulty_race_of_lanes, FaultyParams, 64, 1) {
    uint32_t *shared = (uint32_t *)shared_memory();
    shared[thread_index()] = thread_index();
    uint32_t other = shared[thread_index() ^ 1];
    p.memory[thread_index() % 16] = other;
}

// The lanes of each warp wait for each other, but its neighbour does not wait for them.
KERNEL(faulty_race_of_warps, FaultyParams, 64, 1) {
    uint32_t *shared = (uint32_t *)shared_memory();
    shared[thread_index()] = thread_index();
    warp_barrier();
    uint32_t other = shared[thread_index() ^ 33];
    p.memory[thread_index() % 16] = other;
}

// A copy begins where another warp may still read.
KERNEL(faulty_race_of_a_copy, FaultyParams, 64, 1) {
    uint32_t *shared = (uint32_t *)shared_memory();
    shared[thread_index()] = thread_index();
    barrier();
    uint32_t other = shared[thread_index() ^ 32];
    if (thread_index() % 4 == 0) {
        cp_async16(shared + thread_index(), p.memory, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
    p.memory[thread_index() % 16] = other;
}

// What a copy writes to is read before that was waited for, by the thread that copies.
KERNEL(faulty_early_read, FaultyParams, 64, 1) {
    uint32_t *shared = (uint32_t *)shared_memory();
    if (thread_index() % 4 == 0) {
        cp_async16(shared + thread_index(), p.memory, true);
        p.memory[0] = shared[thread_index()];
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// Threads have waited for the kernel before, and not for each other.
EARLY_KERNEL(faulty_kernel_wait, FaultyParams, 64, 1) {
    uint32_t *shared = (uint32_t *)shared_memory();
    shared[thread_index()] = thread_index();
    await_kernel_before();
    p.memory[thread_index() % 16] = shared[thread_index() ^ 32];
}

// What the others do wrong, done right.
KERNEL(faulty_not_at_all, FaultyParams, 64, 1) {
    uint32_t *shared = (uint32_t *)shared_memory();
    shared[thread_index()] = thread_index();
    warp_barrier();
    uint32_t beside = shared[thread_index() ^ 1];
    barrier();
    atomic_add(shared, beside);
    barrier();
    if (thread_index() < 16) {
        p.memory[thread_index()] = shared[0] + shared[63 - thread_index()];
    }
}
