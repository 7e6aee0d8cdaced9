// Top-k and top-p selection over a row of logits by one thread block: sweeps over the row, sums that do not depend on the order of
// threads, and the cut, the last token in descending order of logits that the sampler may draw.
#pragma once

#include "params.h"

constexpr uint32_t SAMPLING_WARPS = SAMPLING_THREADS / WARP;
constexpr uint32_t BINS = SAMPLING_BINS;
// Bins of logits by their distance from the best, for a first cut.
constexpr float BINS_PER_UNIT = 64.0f;
// A weight of 1, which is that of the most probable token. 2^18 of them still fit 64 bits.
constexpr float UNIT = 17592186044416.0f; // 2^44

struct SamplingShared {
    uint64_t bins[BINS];
    uint64_t reduced[SAMPLING_WARPS];
    uint64_t found[4];
    uint32_t count;
};

// Tokens that may be kept, in any order, one a thread. In the place of the bins.
struct Candidates {
    uint32_t ids[SAMPLING_THREADS];
    float logits[SAMPLING_THREADS];
    uint64_t masses[SAMPLING_THREADS];
};
static_assert(sizeof(Candidates) <= sizeof(SamplingShared::bins), "candidates fit the place of the bins");

// NaN is never chosen.
DEVICE float clean(float x) { return x == x ? x : -INFINITE; }

// Tokens of a row that a block treats, from FIRST on, a multiple of 4.
struct Part {
    uint32_t first, end;
};
DEVICE bool holds(const Part &part, uint32_t id) { return part.first <= id && id < part.end; }

// Calls EACH(id, logit) for every token of a part in the order of ids within a thread: AHEAD times four in
// flight, so that loads overlap.
template <uint32_t AHEAD = 2, typename Each>
DEVICE void each_raw_logit(const float *logits, const Part &part, Each each) {
    uint32_t fours = (part.end + 3) / 4;
    for (uint32_t first = part.first / 4 + thread_index(); first < fours; first += SAMPLING_THREADS * AHEAD) {
        Float4 four[AHEAD];
        UNROLL
        for (uint32_t j = 0; j < AHEAD; j++) {
            uint32_t at = first + j * SAMPLING_THREADS;
            four[j] = at < fours ? ((const Float4 *)logits)[at] : Float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
        UNROLL
        for (uint32_t j = 0; j < AHEAD; j++) {
            float x[4] = {four[j].x, four[j].y, four[j].z, four[j].w};
            UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t id = (first + j * SAMPLING_THREADS) * 4 + i;
                if (id < part.end) {
                    each(id, x[i]);
                }
            }
        }
    }
}

// The same with NaN cleaned away.
template <uint32_t AHEAD = 2, typename Each>
DEVICE void each_logit(const float *logits, const Part &part, Each each) {
    each_raw_logit<AHEAD>(logits, part, [&](uint32_t id, float logit) { each(id, clean(logit)); });
}

template <uint32_t AHEAD = 2, typename Each>
DEVICE void each_logit(const float *logits, uint32_t vocabulary, Each each) {
    each_logit<AHEAD>(logits, Part{0, vocabulary}, each);
}

// Sorts like logits do, equal zeros included.
DEVICE uint32_t order_of(float x) {
    uint32_t bits = float_to_bits(x == 0.0f ? 0.0f : x);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// e^x; the same operations as on the CPU.
DEVICE float exponential(float x) {
    float clamped = fminf(88.37f, fmaxf(x, -87.33654f));
    float n = round_even(multiply_exact(clamped, 1.44269504f));
    float r = fma_exact(n, -0.6933594f, clamped);
    r = fma_exact(n, 2.1219444e-4f, r);
    float p = 1.9875691e-4f;
    p = fma_exact(p, r, 1.3981999e-3f);
    p = fma_exact(p, r, 8.333452e-3f);
    p = fma_exact(p, r, 4.1665796e-2f);
    p = fma_exact(p, r, 1.6666665e-1f);
    p = fma_exact(p, r, 0.5f);
    p = fma_exact(p, multiply_exact(r, r), r) + 1.0f;
    float scaled = multiply_exact(p, bits_to_float((uint32_t)((int32_t)n + 127) << 23));
    return x < -87.33654f ? 0.0f : scaled;
}

DEVICE float weight_of(float logit, float best, float temperature) {
    // Infinity minus infinity is NaN, so a logit that equals the largest one is not subtracted from it.
    return exponential(logit < best ? divide_exact(logit - best, temperature) : 0.0f);
}
DEVICE uint64_t mass_of(float weight) { return (uint64_t)multiply_exact(weight, UNIT); }

// The tokens kept: all before a place in the order of logits, largest first, and of equal logits by ascending id.
struct Cut {
    uint32_t order, id;
};
DEVICE bool keeps(const Cut &cut, uint32_t order, uint32_t id) {
    return order > cut.order || (order == cut.order && id <= cut.id);
}

DEVICE uint64_t block_sum(SamplingShared &shared, uint64_t value) {
    value = warp_sum(value);
    if (lane() == 0) {
        shared.reduced[warp()] = value;
    }
    barrier();
    uint64_t sum = 0;
    for (uint32_t i = 0; i < SAMPLING_WARPS; i++) {
        sum += shared.reduced[i];
    }
    barrier();
    return sum;
}

DEVICE uint64_t block_max(SamplingShared &shared, uint64_t value) {
    UNROLL
    for (uint32_t mask = WARP / 2; mask > 0; mask /= 2) {
        uint64_t other = shuffle_xor(value, mask);
        value = other > value ? other : value;
    }
    if (lane() == 0) {
        shared.reduced[warp()] = value;
    }
    barrier();
    uint64_t best = 0;
    for (uint32_t i = 0; i < SAMPLING_WARPS; i++) {
        best = shared.reduced[i] > best ? shared.reduced[i] : best;
    }
    barrier();
    return best;
}

// Order of a part that has logits that are not finite, above that of any logit.
constexpr uint32_t NON_FINITE = ~0u;
DEVICE bool is_non_finite(uint64_t best) { return best >> 32 == NON_FINITE; }

// The best token of a part: its order above, the complement of its id below. ADJUSTED: minus infinity may be a mask. NON_FINITE above some
// token's id where the part has a logit of NaN or plus infinity, or of minus infinity that is no mask.
DEVICE uint64_t best_of(SamplingShared &shared, const float *logits, const Part &part, bool adjusted) {
    // A thread goes by ascending ids, so the first of equals stays. It has its first token if none is above minus infinity.
    float best = -INFINITE;
    uint32_t id = part.first + 4 * thread_index();
    bool some = id < part.end, sound = true;
    each_raw_logit<4>(logits, part, [&](uint32_t i, float logit) {
        sound = sound && logit < INFINITE && (adjusted || logit > -INFINITE);
        id = logit > best ? i : id;
        best = fmaxf(logit, best);
    });
    uint32_t order = MUTANT(NonFiniteLogits, true, sound) ? order_of(best) : NON_FINITE;
    return block_max(shared, some ? (uint64_t)order << 32 | (uint32_t)~id : 0);
}

// Where in the bins, from the first on, their running sum reaches TARGET.
struct Crossing {
    uint32_t bin;
    uint64_t before, in; // sums before the bin, and of it
};

DEVICE Crossing cross(SamplingShared &shared, uint64_t target) {
    constexpr uint32_t EACH = BINS / SAMPLING_THREADS;
    uint64_t own[EACH], sum = 0;
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
        own[i] = shared.bins[thread_index() * EACH + i];
        sum += own[i];
    }
    uint64_t upto = sum;
    UNROLL
    for (uint32_t delta = 1; delta < WARP; delta *= 2) {
        uint64_t other = shuffle_up(upto, delta);
        upto += lane() >= delta ? other : 0;
    }
    if (lane() == WARP - 1) {
        shared.reduced[warp()] = upto;
    }
    barrier();
    for (uint32_t i = 0; i < warp(); i++) {
        upto += shared.reduced[i];
    }
    uint64_t before = upto - sum;
    UNROLL
    for (uint32_t i = 0; i < EACH; i++) {
        if (before < target && target <= before + own[i]) {
            shared.found[0] = thread_index() * EACH + i;
            shared.found[1] = before;
            shared.found[2] = own[i];
        }
        before += own[i];
    }
    barrier();
    Crossing crossing = {(uint32_t)shared.found[0], shared.found[1], shared.found[2]};
    barrier();
    return crossing;
}

DEVICE void clear_bins(SamplingShared &shared) {
    for (uint32_t i = thread_index(); i < BINS; i += SAMPLING_THREADS) {
        shared.bins[i] = 0;
    }
    barrier();
}

// Bins of the key's bits from SHIFT on, largest first.
template <typename Each>
DEVICE Crossing radix_round(SamplingShared &shared, const float *logits, uint32_t vocabulary, uint32_t prefix, uint32_t shift, uint32_t bits,
                            uint64_t target, Each each) {
    clear_bins(shared);
    each_logit(logits, vocabulary, [&](uint32_t i, float logit) {
        uint32_t key;
        uint64_t measure;
        if (each(i, logit, key, measure) && (shift + bits == 32 || key >> (shift + bits) == prefix)) {
            uint32_t digit = key >> shift & ((1u << bits) - 1);
            atomic_add_wide(&shared.bins[(1u << bits) - 1 - digit], measure);
        }
    });
    barrier();
    return cross(shared, target);
}

// The key at which the running sum of measures, from the largest key on, reaches TARGET; TARGET becomes what is missing
// before that key. EACH(i, logit, key, measure) says whether token i counts.
template <typename Each>
DEVICE uint32_t radix_select(SamplingShared &shared, const float *logits, uint32_t vocabulary, uint64_t &target,
                             uint64_t &in, Each each) {
    uint32_t prefix = 0;
    uint32_t shift = 32;
    for (uint32_t round = 0; round < 3; round++) {
        uint32_t bits = round == 2 ? 10 : 11;
        shift -= bits;
        Crossing crossing = radix_round(shared, logits, vocabulary, prefix, shift, bits, target, each);
        target -= crossing.before;
        in = crossing.in;
        prefix = prefix << bits | ((1u << bits) - 1 - crossing.bin);
    }
    return prefix;
}

// How much a token adds to what is measured: 1 for top-k, its mass for top-p.
struct Measure {
    bool mass;
    float best, temperature;
};
DEVICE uint64_t measure_of(const Measure &measure, float logit) {
    return measure.mass ? mass_of(weight_of(logit, measure.best, measure.temperature)) : 1;
}

DEVICE uint32_t distance_bin(float logit, float best) {
    float distance = logit < best ? multiply_exact(best - logit, BINS_PER_UNIT) : 0.0f;
    return distance < (float)(BINS - 1) ? (uint32_t)distance : BINS - 1;
}

// Histogram of a part, by distance from the largest logit, of the measures of the tokens within INSIDE.
SUBROUTINE void measure_bins(SamplingShared &shared, const float *logits, Part part, const Cut &inside, const Measure &measure) {
    float best = measure.best;
    clear_bins(shared);
    each_logit(logits, part, [&](uint32_t i, float logit) {
        uint64_t amount = measure_of(measure, logit);
        if (amount > 0 && keeps(inside, order_of(logit), i)) {
            atomic_add_wide(&shared.bins[distance_bin(logit, best)], amount);
        }
    });
    barrier();
}

DEVICE uint64_t sum_of_bins(SamplingShared &shared) {
    uint64_t sum = 0;
    for (uint32_t i = thread_index(); i < BINS; i += SAMPLING_THREADS) {
        sum += shared.bins[i];
    }
    return block_sum(shared, sum);
}

// Histogram search over the whole row: the bin in which the running sum of the measures of the tokens within INSIDE reaches
// TARGET. TARGET is at least 1 and at most the sum of these measures.
DEVICE Crossing first_cut(SamplingShared &shared, const float *logits, uint32_t vocabulary, const Cut &inside,
                          const Measure &measure, uint64_t target) {
    measure_bins(shared, logits, Part{0, vocabulary}, inside, measure);
    return cross(shared, target);
}

// The exact cut: the shortest prefix of the descending order, within INSIDE, whose measures add up to TARGET. CROSSING is the
// histogram bin in which the running sum reaches TARGET; only tokens of that bin are compared exactly.
SUBROUTINE Cut cut_at(SamplingShared &shared, const float *logits, uint32_t vocabulary, const Cut &inside,
                      const Measure &measure, uint64_t target, const Crossing &crossing) {
    float best = measure.best;
    target -= crossing.before;
    uint32_t bin = crossing.bin;
    uint64_t in = 0;
    auto in_bin = [&](uint32_t i, float logit, uint32_t &key, uint64_t &amount) {
        if (distance_bin(logit, best) != bin) {
            return false;
        }
        key = order_of(logit);
        amount = measure_of(measure, logit);
        return keeps(inside, key, i);
    };
    uint32_t order = radix_select(shared, logits, vocabulary, target, in, in_bin);
    // Of the tokens with the last logit, all weigh the same; as few as needed, by ascending id.
    uint64_t one = 1;
    if (measure.mass) {
        uint32_t bits = order >> 31 ? order & ~(1u << 31) : ~order;
        one = mass_of(weight_of(bits_to_float(bits), best, measure.temperature));
    }
    uint64_t needed = (target + one - 1) / one, there = in / one;
    if (needed >= there) {
        return order == inside.order ? inside : Cut{order, ~0u};
    }
    auto last = [&](uint32_t i, float logit, uint32_t &key, uint64_t &amount) {
        key = ~i;
        amount = 1;
        return order_of(logit) == order && keeps(inside, order, i);
    };
    return Cut{order, ~radix_select(shared, logits, vocabulary, needed, in, last)};
}

// Collects the tokens of a part that are IN. Returns how many there are; if more than threads, they are not all there.
template <typename In> DEVICE uint32_t collect_if(SamplingShared &shared, const float *logits, const Part &part, In in) {
    Candidates &candidates = *(Candidates *)shared.bins;
    if (thread_index() == 0) {
        shared.count = 0;
    }
    barrier();
    each_logit(logits, part, [&](uint32_t i, float logit) {
        if (in(i, logit)) {
            uint32_t at = atomic_add(&shared.count, 1u);
            if (at < SAMPLING_THREADS) {
                candidates.ids[at] = i;
                candidates.logits[at] = logit;
            }
        }
    });
    barrier();
    uint32_t count = shared.count;
    barrier();
    return count;
}
// Those up to a bin of distances.
SUBROUTINE uint32_t collect(SamplingShared &shared, const float *logits, Part part, float best, uint32_t bin) {
    return collect_if(shared, logits, part, [&](uint32_t, float logit) { return distance_bin(logit, best) <= bin; });
}
// Those before a cut.
SUBROUTINE uint32_t collect_kept(SamplingShared &shared, const float *logits, uint32_t vocabulary, const Cut &cut) {
    return collect_if(shared, logits, Part{0, vocabulary}, [&](uint32_t i, float logit) { return keeps(cut, order_of(logit), i); });
}

// How many of the first COUNT candidates precede this thread's in the order, and the sum of their masses with MASSES.
template <bool MASSES> DEVICE uint64_t preceding(const Candidates &candidates, uint32_t count, uint32_t order, uint32_t id) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t other = order_of(candidates.logits[i]);
        bool precedes = other > order || (other == order && candidates.ids[i] < id);
        sum += precedes ? (MASSES ? candidates.masses[i] : 1) : 0;
    }
    return sum;
}

// Probability mass that top-p keeps, of a total mass SUM.
DEVICE uint64_t top_p_target(float top_p, uint64_t sum) {
    double goal = (double)top_p * (double)sum;
    uint64_t target = (uint64_t)goal;
    target += (double)target < goal;
    return target < 1 ? 1 : target > sum ? sum : target;
}
