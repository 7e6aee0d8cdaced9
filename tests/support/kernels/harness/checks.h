// What memory-checking tools of a GPU look for, on the harness: the kernels are compiled with their loads and stores
// instrumented, where the compiler can do that, and each of these is looked at.
//
// Found are: addresses outside of shared and global memory, or not aligned to the size of what is moved; writes to
// memory that no kernel writes to; and races in shared memory: two threads touch a byte, one of them writes, and no barrier
// that both meet lies between. Lanes of a warp need one, too: shuffles and matrix operations do not order memory. What an
// asynchronous copy writes to, nobody touches until it was waited for. Not found are reads of what else the program holds: the
// kernels' own constants are there.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace harness {

// Of global memory; CONSTANT if no kernel writes to it. src/lib.rs has the same.
struct Range {
    uint8_t *from, *to;
    uint64_t constant;
};

// The one of COUNT ranges, in ascending order, that these bytes are in; null: none.
inline const Range *range_of(const Range *ranges, size_t count, const uint8_t *p, size_t bytes) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].from <= p) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low > 0 && p + bytes <= ranges[low - 1].to ? ranges + low - 1 : nullptr;
}

enum class Touch { Read, Write, Atomic };

// Ends the running fiber's launch with an error.
[[noreturn]] void stop(const char *what);

#ifdef HARNESS_CHECKED
// Turns all checks of this process on or off, before its first launch; they are on. Without them kernels run several times as fast.
void checks_enable(bool on);
// A launch begins: where its parameters are, and all global memory.
void checks_launch(const void *params, size_t bytes, const Range *global, size_t count, uint32_t shared_bytes);
// A block begins.
void checks_block();
// A block has met at a barrier.
void checks_barrier();
// A warp has met at a barrier of its own.
void checks_warp_barrier(uint32_t warp);
// A fiber is about to run on this stack.
void checks_stack(const void *from, size_t bytes);
// The running fiber touches memory other than by a load or a store.
void checks_touch(const void *at, size_t bytes, Touch touch);
// It begins to copy 16 bytes to shared memory, and has waited for that.
void checks_copy(const void *to, bool begins);
// What is between these two is looked at as a whole.
void checks_pause(bool paused);
#else
inline void checks_enable(bool) {}
inline void checks_launch(const void *, size_t, const Range *, size_t, uint32_t) {}
inline void checks_block() {}
inline void checks_barrier() {}
inline void checks_warp_barrier(uint32_t) {}
inline void checks_stack(const void *, size_t) {}
inline void checks_touch(const void *, size_t, Touch) {}
inline void checks_copy(const void *, bool) {}
inline void checks_pause(bool) {}
#endif

} // namespace harness
