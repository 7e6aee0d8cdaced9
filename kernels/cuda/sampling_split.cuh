// Top-k and top-p of a row, by one thread block or by several that share the row. Both give the same bits: sums are of integers,
// and the order of candidates does not matter.
#pragma once

#include "sampling_cut.cuh"

static_assert(sizeof(SamplingSplit) == 21256, "as SAMPLING_SPLIT_BYTES says");

DEVICE Part part_of(const SamplingParams &p, uint32_t part) {
    uint32_t first = part * p.part_tokens;
    return Part{first, smaller(first + p.part_tokens, p.vocabulary)};
}

// 0: all tokens.
DEVICE uint32_t top_k_of(const SamplingRow &row, uint32_t vocabulary) { return row.top_k < vocabulary ? row.top_k : 0; }

// Whether a token is drawn from those that top-k or top-p keeps.
DEVICE bool truncates(const SamplingRow &row, uint32_t vocabulary) {
    return row.temperature > 0.0f && (top_k_of(row, vocabulary) > 0 || row.top_p < 1.0f);
}

// What the first cut measures: how many tokens there are for top-k, else their mass.
DEVICE Measure measure_for(const SamplingRow &row, uint32_t vocabulary, float best) {
    return Measure{top_k_of(row, vocabulary) == 0, best, row.temperature};
}

// The measure at which the first cut ends, and where in the histogram that is.
struct Truncation {
    uint64_t target;
    Crossing crossing;
};

// The same from the histogram of the whole row, in the bins.
DEVICE Truncation truncation_of_bins(SamplingShared &shared, const SamplingRow &row, uint32_t vocabulary) {
    uint32_t top_k = top_k_of(row, vocabulary);
    uint64_t target = top_k > 0 ? top_k : top_p_target(row.top_p, sum_of_bins(shared));
    return Truncation{target, cross(shared, target)};
}

DEVICE Truncation first_truncation(SamplingShared &shared, const float *logits, const Part &whole, const SamplingRow &row,
                                   uint32_t vocabulary, float best) {
    measure_bins(shared, logits, whole, Cut{0, ~0u}, measure_for(row, vocabulary, best));
    return truncation_of_bins(shared, row, vocabulary);
}

DEVICE Truncation split_truncation(SamplingShared &shared, const SamplingSplit &split, const SamplingRow &row, uint32_t vocabulary) {
    for (uint32_t i = thread_index(); i < BINS; i += SAMPLING_THREADS) {
        shared.bins[i] = split.bins[i];
    }
    barrier();
    return truncation_of_bins(shared, row, vocabulary);
}

// As best_of of the whole row.
DEVICE uint64_t split_best_of(const SamplingSplit &split, uint32_t parts) {
    uint64_t best = 0;
    for (uint32_t i = 0; i < MUTANT(SplitParts, parts - 1, parts); i++) {
        best = split.tops[i] > best ? split.tops[i] : best;
    }
    return best;
}

// Of a row: the sum over its parts.
DEVICE uint64_t sum_of_parts(const uint64_t *sums, uint32_t parts) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < parts; i++) {
        all += sums[i];
    }
    return all;
}

// As collect of the whole row.
DEVICE uint32_t split_candidates(SamplingShared &shared, const SamplingSplit &split) {
    Candidates &candidates = *(Candidates *)shared.bins;
    uint32_t count = split.count, own = thread_index();
    if (own < smaller(count, SAMPLING_THREADS)) {
        candidates.ids[own] = split.ids[own];
        candidates.logits[own] = split.logits[own];
    }
    barrier();
    return count;
}
