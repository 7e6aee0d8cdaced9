// Log probabilities of given tokens, and choosing a token from each row of logits: penalties, biases, masks, then the most probable token or a draw after
// temperature, top-k, top-p and min-p; log probabilities where asked for. No sort: what is kept is found by counting. A sweep
// counts logits by their distance from the best; where few are as near as the last one kept, which is the rule, another sweep
// collects these, one a thread, and the rest is done among them. Else further sweeps find what is kept, digit by digit.
//
// The rules are those of the CPU's kernels, and so are the random numbers. Weights e^((logit - best) / temperature) have
// the CPU's bits where it has a fused multiply-add; their sums are of fixed-point numbers, which are exact, so neither
// neither the order of threads nor the shape of a block shows in a choice.
//
// Few rows are split into parts, one thread block each (`sampling_split.cuh`). sample_best adjusts the logits and finds the best token
// of each part. sample_measure sums the softmax masses of each part; for rows with top-k or top-p it makes a histogram instead, and
// sample_collect collects their candidates. sample then draws the token: for a row without top-k and top-p it reads only the part
// that the random number selects.
#include "sampling_adjust.cuh"
#include "sampling_split.cuh"

// Philox 4x32-10; the lower 53 of the bits that a uniform number in [0, 1) is made of.
DEVICE uint64_t draw(uint64_t seed, uint32_t choice, uint32_t position) {
    uint32_t c0 = position, c1 = choice, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (uint32_t round = 0; round < 10; round++) {
        if (round > 0) {
            k0 += 0x9E3779B9;
            k1 += 0xBB67AE85;
        }
        uint64_t a = (uint64_t)0xD2511F53 * c0, b = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
    }
    return ((uint64_t)c1 << 32 | c0) >> 11;
}

// The tokens of a row that take part in the draw.
struct Kept {
    const float *logits;
    Cut cut;
    float best, temperature, min_p;
};
DEVICE uint64_t kept_mass(const Kept &kept, uint32_t i, float logit) {
    if (!keeps(kept.cut, order_of(logit), i)) {
        return 0;
    }
    float weight = weight_of(logit, kept.best, kept.temperature);
    return weight < kept.min_p ? 0 : mass_of(weight);
}

// Sums of the kept masses over one range of ids for each warp, from FROM on, EACH ids long, both multiples of 4.
DEVICE void range_sums(SamplingShared &shared, const Kept &kept, uint32_t from, uint32_t each, uint32_t end) {
    uint32_t first = from + warp() * each, last = smaller(first + each, end);
    uint64_t sum = 0;
    UNROLL_BY(1)
    for (uint32_t i = first + 4 * lane(); i < last; i += 4 * WARP) {
        Float4 four = *(const Float4 *)(kept.logits + i);
        float x[4] = {four.x, four.y, four.z, four.w};
        UNROLL
        for (uint32_t j = 0; j < 4; j++) {
            sum += i + j < last ? kept_mass(kept, i + j, clean(x[j])) : 0;
        }
    }
    sum = warp_sum(sum);
    if (lane() == 0) {
        shared.reduced[warp()] = sum;
    }
    barrier();
}

// Which warp's range holds TARGET; TARGET becomes the place within it.
DEVICE uint32_t range_of(SamplingShared &shared, uint64_t &target) {
    uint32_t range = 0;
    while (range + 1 < SAMPLING_WARPS && shared.reduced[range] <= target) {
        target -= shared.reduced[range];
        range++;
    }
    barrier();
    return range;
}

// Ids of a range for each warp, of that many ids in all.
DEVICE uint32_t range_ids(uint32_t ids) { return (ids + 4 * SAMPLING_WARPS - 1) / (4 * SAMPLING_WARPS) * 4; }

// bits / 2^53 of the total
DEVICE uint64_t drawn_place(uint64_t bits, uint64_t total) { return multiply_high(bits << 11, total); }

// Kept tokens lie on a line in the order of their ids, each as long as its mass: the one at the drawn part of it. All kept tokens
// count, or with SPLIT, which has the masses of all parts, those of the part PART, in which TARGET is the place.
DEVICE uint32_t pick(SamplingShared &shared, const Kept &kept, const Part &part, uint64_t bits, bool split, uint64_t target) {
    uint32_t each = range_ids(part.end - part.first);
    range_sums(shared, kept, part.first, each, part.end);
    if (!split) {
        uint64_t total = 0;
        for (uint32_t i = 0; i < SAMPLING_WARPS; i++) {
            total += shared.reduced[i];
        }
        target = drawn_place(bits, total);
    }
    uint32_t from = part.first + range_of(shared, target) * each;
    uint32_t end = smaller(from + each, part.end);
    uint32_t within = range_ids(each);
    range_sums(shared, kept, from, within, end);
    from += range_of(shared, target) * within;
    end = smaller(from + within, end);
    if (warp() == 0) {
        for (uint32_t first = from; first < end; first += WARP) {
            uint32_t i = first + lane();
            uint64_t mass = i < end ? kept_mass(kept, i, clean(kept.logits[i])) : 0;
            uint64_t upto = mass;
            UNROLL
            for (uint32_t delta = 1; delta < WARP; delta *= 2) {
                uint64_t other = shuffle_up(upto, delta);
                upto += lane() >= delta ? other : 0;
            }
            uint64_t all = warp_sum(mass);
            if (target < all) {
                if (upto - mass <= target && target < upto) {
                    shared.found[0] = i;
                }
                break;
            }
            target -= all;
        }
    }
    barrier();
    uint32_t token = (uint32_t)shared.found[0];
    barrier();
    return token;
}

// The same among the first COUNT candidates, with top-k and top-p among them: TOP_K 0 keeps all; TARGET is what top-p keeps of
// the mass of all tokens, 0 if it is yet to be told from those that top-k keeps.
SUBROUTINE uint32_t pick_candidate(SamplingShared &shared, const SamplingRow &row, uint32_t count, float best, uint32_t top_k,
                                   uint64_t target, uint64_t bits) {
    Candidates &candidates = *(Candidates *)shared.bins;
    uint32_t own = thread_index();
    bool kept = own < count;
    uint32_t id = kept ? candidates.ids[own] : 0;
    float logit = kept ? candidates.logits[own] : -INFINITE;
    uint32_t order = order_of(logit);
    if (top_k > 0) {
        kept = kept && preceding<false>(candidates, count, order, id) < top_k;
    }
    float weight = kept ? weight_of(logit, best, row.temperature) : 0.0f;
    uint64_t mass = kept ? mass_of(weight) : 0;
    if (row.top_p < 1.0f) {
        candidates.masses[own] = mass;
        // Behind the barriers within all masses are there.
        uint64_t sum = block_sum(shared, mass);
        target = target > 0 ? target : top_p_target(row.top_p, sum);
        bool inside = preceding<true>(candidates, count, order, id) < target;
        mass = inside ? mass : 0;
        barrier();
    }
    mass = weight < row.min_p ? 0 : mass;
    candidates.masses[own] = mass;
    uint64_t place = multiply_high(bits << 11, block_sum(shared, mass)), before = 0;
    for (uint32_t i = 0; i < count; i++) {
        before += candidates.ids[i] < id ? candidates.masses[i] : 0;
    }
    if (mass > 0 && before <= place && place < before + mass) {
        shared.found[0] = id;
    }
    barrier();
    uint32_t token = (uint32_t)shared.found[0];
    barrier();
    return token;
}

// ln of a token's probability, given ln of the sum of all.
DEVICE float logprob_of(float logit, double total) {
    float logprob = (float)((double)logit - total);
    // Both infinite: the token shares all the probability there is, or there is none.
    return logprob == logprob ? logprob : 0.0f;
}

// The mass of all tokens of a part at temperature 1.
DEVICE uint64_t total_of(SamplingShared &shared, const float *logits, const Part &part, float best) {
    uint64_t sum = 0;
    each_logit(logits, part, [&](uint32_t, float logit) { sum += mass_of(weight_of(logit, best, 1.0f)); });
    return block_sum(shared, sum);
}

// The result of a row of logits that are not all finite.
DEVICE void mark_non_finite(SamplingResult &result, uint32_t token) {
    result.non_finite = 1;
    result.token = token;
    result.logprob = 0.0f;
    result.top = 0;
    result.rank = 0;
}

// SUM is the mass of all tokens at temperature 1.
DEVICE void report(SamplingShared &shared, uint32_t alternatives, const float *logits, uint32_t vocabulary, float best,
                   uint64_t sum, uint32_t token, SamplingResult &result) {
    uint32_t wanted = smaller(smaller(alternatives, TOP_MAX), vocabulary);
    bool infinite = best - best != 0.0f;
    double total = infinite ? (double)best : (double)best + log_double((double)sum / (double)UNIT);
    if (thread_index() == 0) {
        result.logprob = logprob_of(clean(logits[token]), total);
        result.top = wanted;
    }
    if (wanted == 0) {
        return;
    }
    const Candidates &candidates = *(const Candidates *)shared.bins;
    Cut all = {0, ~0u};
    Measure measure = {false, best, 1.0f};
    Crossing crossing = first_cut(shared, logits, vocabulary, all, measure, wanted);
    uint32_t count = collect(shared, logits, Part{0, vocabulary}, best, crossing.bin);
    if (count > SAMPLING_THREADS) {
        Cut cut = cut_at(shared, logits, vocabulary, all, measure, wanted, crossing);
        count = collect_kept(shared, logits, vocabulary, cut);
    }
    if (thread_index() < count) {
        uint32_t id = candidates.ids[thread_index()];
        float logit = candidates.logits[thread_index()];
        uint32_t rank = (uint32_t)preceding<false>(candidates, count, order_of(logit), id);
        if (rank < wanted) {
            result.tokens[rank] = id;
            result.logprobs[rank] = logprob_of(logit, total);
        }
    }
}

// Chooses a token by temperature, top-k, top-p and min-p. SPLIT has what the kernels before have done; null: nothing.
DEVICE uint32_t choose(SamplingShared &shared, const SamplingRow &row, const float *logits, const SamplingParams &p, float best,
                           const SamplingSplit *split) {
    uint32_t vocabulary = p.vocabulary;
    uint64_t bits = draw(row.seed, row.choice, MUTANT(DrawPosition, row.position + 1, row.position));
    uint32_t top_k = top_k_of(row, vocabulary);
    Part whole = {0, vocabulary};
    Cut cut = {0, ~0u};
    if (truncates(row, vocabulary)) {
        Truncation truncation = split ? split_truncation(shared, *split, row, vocabulary)
                                      : first_truncation(shared, logits, whole, row, vocabulary, best);
        uint32_t count = split ? split_candidates(shared, *split)
                               : collect(shared, logits, whole, best, truncation.crossing.bin);
        if (count <= SAMPLING_THREADS) {
            return pick_candidate(shared, row, count, best, top_k, top_k > 0 ? 0 : truncation.target, bits);
        }
        Measure measure = measure_for(row, vocabulary, best);
        cut = cut_at(shared, logits, vocabulary, cut, measure, truncation.target, truncation.crossing);
    }
    if (top_k > 0 && row.top_p < 1.0f) {
        Measure measure = {true, best, row.temperature};
        measure_bins(shared, logits, whole, cut, measure);
        uint64_t target = top_p_target(row.top_p, sum_of_bins(shared));
        cut = cut_at(shared, logits, vocabulary, cut, measure, target, cross(shared, target));
    }
    Kept kept = {logits, cut, best, row.temperature, row.min_p};
    if (!split || truncates(row, vocabulary)) {
        return pick(shared, kept, whole, bits, false, 0);
    }
    uint64_t target = drawn_place(bits, sum_of_parts(split->masses, p.parts));
    uint32_t part = 0;
    while (part + 1 < p.parts && split->masses[part] <= target) {
        target -= split->masses[part];
        part++;
    }
    return pick(shared, kept, part_of(p, part), bits, true, target);
}

// Before `sample` where rows are split: a block a part and row.
KERNEL(sample_best, SamplingParams, SAMPLING_THREADS, 2) {
    SamplingShared &shared = *(SamplingShared *)shared_memory();
    const SamplingRow &row = p.rows[block_index()];
    if (row.rows == 0) {
        return;
    }
    Part part = part_of(p, block_row());
    float *logits = p.logits + (uint64_t)block_index() * p.stride;
    bool adjusted = adjusts(row);
    if (adjusted) {
        adjust(row, p.tokens + row.draft, logits, part);
    }
    uint64_t top = best_of(shared, logits, part, adjusted);
    SamplingSplit &split = p.split[block_index()];
    if (thread_index() == 0) {
        split.tops[block_row()] = top;
        if (block_row() == 0) {
            split.count = 0;
        }
    }
    for (uint32_t i = block_row() * SAMPLING_THREADS + thread_index(); i < BINS; i += p.parts * SAMPLING_THREADS) {
        split.bins[i] = 0;
    }
}

// The next: the masses of each part; with top-k or top-p the histogram of each part, added to that of its row.
KERNEL(sample_measure, SamplingParams, SAMPLING_THREADS, 2) {
    SamplingShared &shared = *(SamplingShared *)shared_memory();
    const SamplingRow &row = p.rows[block_index()];
    if (row.rows == 0 || (row.temperature <= 0.0f && row.logprobs == 0)) {
        return;
    }
    const float *logits = p.logits + (uint64_t)block_index() * p.stride;
    SamplingSplit &split = p.split[block_index()];
    Part part = part_of(p, block_row());
    uint64_t top = split_best_of(split, p.parts);
    if (is_non_finite(top)) {
        return;
    }
    float best = logits[~(uint32_t)top];
    if (row.logprobs) {
        uint64_t sum = total_of(shared, logits, part, best);
        if (thread_index() == 0) {
            split.totals[block_row()] = sum;
        }
    }
    if (!truncates(row, p.vocabulary)) {
        if (row.temperature > 0.0f) {
            Kept kept = {logits, Cut{0, ~0u}, best, row.temperature, row.min_p};
            uint64_t sum = 0;
            each_logit<4>(logits, part, [&](uint32_t i, float logit) { sum += kept_mass(kept, i, logit); });
            sum = block_sum(shared, sum);
            if (thread_index() == 0) {
                split.masses[block_row()] = MUTANT(SplitMasses, sum / 2, sum);
            }
        }
        return;
    }
    measure_bins(shared, logits, part, Cut{0, ~0u}, measure_for(row, p.vocabulary, best));
    for (uint32_t i = thread_index(); i < BINS; i += SAMPLING_THREADS) {
        uint64_t sum = shared.bins[i];
        if (sum > 0) {
            atomic_add_wide(&split.bins[i], MUTANT(SplitBins, sum / 2, sum));
        }
    }
}

// The last before `sample`: the candidates of each part, those up to the bin in which top-k or top-p ends.
KERNEL(sample_collect, SamplingParams, SAMPLING_THREADS, 2) {
    SamplingShared &shared = *(SamplingShared *)shared_memory();
    const SamplingRow &row = p.rows[block_index()];
    if (row.rows == 0 || !truncates(row, p.vocabulary)) {
        return;
    }
    const float *logits = p.logits + (uint64_t)block_index() * p.stride;
    SamplingSplit &split = p.split[block_index()];
    uint64_t top = split_best_of(split, p.parts);
    if (is_non_finite(top)) {
        return;
    }
    float best = logits[~(uint32_t)top];
    Truncation truncation = split_truncation(shared, split, row, p.vocabulary);
    uint32_t count = collect(shared, logits, part_of(p, block_row()), best, truncation.crossing.bin);
    if (thread_index() == 0) {
        shared.found[0] = atomic_add(&split.count, count);
    }
    barrier();
    uint64_t at = shared.found[0] + thread_index();
    if (thread_index() < count && at < SAMPLING_THREADS) {
        const Candidates &candidates = *(const Candidates *)shared.bins;
        split.ids[at] = candidates.ids[thread_index()];
        split.logits[at] = candidates.logits[thread_index()];
    }
}

// One block a row. Rows of a slot with drafts are drawn at once, each as if all drafts before it stood, and only read the slot's
// history and output; accept_drafts counts their tokens.
KERNEL(sample, SamplingParams, SAMPLING_THREADS, 1) {
    SamplingShared &shared = *(SamplingShared *)shared_memory();
    const SamplingRow &row = p.rows[block_index()];
    if (row.rows == 0) {
        return;
    }
    uint32_t vocabulary = p.vocabulary;
    float *logits = p.logits + (uint64_t)block_index() * p.stride;
    const SamplingSplit *split = p.parts > 0 ? p.split + block_index() : nullptr;
    Part whole = {0, vocabulary};
    uint64_t top;
    if (split) {
        top = split_best_of(*split, p.parts);
    } else {
        bool adjusted = adjusts(row);
        if (adjusted) {
            adjust(row, p.tokens + row.draft, logits, whole);
        }
        top = best_of(shared, logits, whole, adjusted);
    }
    uint32_t token = ~(uint32_t)top;
    if (thread_index() == 0) {
        p.results[block_index()].non_finite = 0;
    }
    if (is_non_finite(top)) {
        // A token all the same: the next step, which may be launched, reads it before the host knows of this.
        if (thread_index() == 0) {
            mark_non_finite(p.results[block_index()], token);
            p.sampled[block_index()] = token;
        }
        return;
    }
    float best = logits[token];
    if (best == -INFINITE && row.fallback < vocabulary) {
        token = row.fallback;
    } else if (row.temperature > 0.0f) {
        token = choose(shared, row, logits, p, best, split);
    }
    SamplingResult &result = p.results[block_index()];
    if (row.logprobs) {
        uint64_t sum = split ? sum_of_parts(split->totals, p.parts) : total_of(shared, logits, whole, best);
        report(shared, row.logprobs - 1, logits, vocabulary, best, sum, token, result);
    }
    if (thread_index() == 0) {
        result.token = token;
        p.sampled[block_index()] = token;
        if (row.rows == 1 && row.history) {
            row.history[token] += 1;
        }
        if (row.rows == 1 && row.output) {
            row.output->recent[row.output->generated % RECENT_TOKENS] = token;
            row.output->generated += 1;
        }
    }
}

constexpr uint32_t ACCEPT_THREADS = WARP;

// One block a row; that of a slot's first row of several counts the slot's tokens: each but the first counts if all before it
// equal the drafts behind them.
KERNEL(accept_drafts, SamplingParams, ACCEPT_THREADS, 1) {
    const SamplingRow &row = p.rows[block_index()];
    if (row.rows < 2 || row.nth > 0) {
        return;
    }
    const uint32_t *sampled = p.sampled + block_index(), *drafts = p.tokens + row.draft;
    uint32_t count = row.rows;
    for (uint32_t i = lane(); i + 1 < row.rows; i += WARP) {
        count = sampled[i] == drafts[i] ? count : smaller(count, i + 1);
    }
    count = MUTANT(RejectedCounts, row.rows, warp_min(count));
    uint32_t generated = row.output ? row.output->generated : 0;
    for (uint32_t i = lane(); i < count; i += WARP) {
        if (row.history) {
            atomic_add(row.history + sampled[i], 1u);
        }
        // Each place of the ring is its last token's.
        if (row.output && i + RECENT_TOKENS >= count) {
            row.output->recent[(generated + i) % RECENT_TOKENS] = sampled[i];
        }
    }
    warp_barrier();
    if (row.output && lane() == 0) {
        row.output->generated = generated + count;
    }
}

// The log probability and the rank of a given token. One block a row.
KERNEL(score, ScoreParams, SAMPLING_THREADS, 1) {
    SamplingShared &shared = *(SamplingShared *)shared_memory();
    const ScoreRow row = p.rows[block_index()];
    const float *logits = p.logits + (uint64_t)block_index() * p.stride;
    SamplingResult &result = p.results[block_index()];
    uint64_t top = best_of(shared, logits, Part{0, p.vocabulary}, false);
    if (is_non_finite(top)) {
        if (thread_index() == 0) {
            mark_non_finite(result, row.token);
        }
        return;
    }
    float best = logits[~(uint32_t)top];
    uint32_t order = order_of(clean(logits[row.token]));
    uint64_t before = 0;
    each_logit(logits, p.vocabulary, [&](uint32_t i, float logit) {
        uint32_t other = order_of(logit);
        before += other > order || (other == order && i < row.token);
    });
    before = block_sum(shared, before);
    uint64_t sum = total_of(shared, logits, Part{0, p.vocabulary}, best);
    report(shared, row.top, logits, p.vocabulary, best, sum, row.token, result);
    if (thread_index() == 0) {
        result.non_finite = 0;
        result.token = row.token;
        result.rank = (uint32_t)before + 1;
    }
}

// Counts the tokens of a sequence's prompt and output. One block.
KERNEL(count_history, HistoryParams, SAMPLING_THREADS, 1) {
    for (uint32_t i = thread_index(); i < p.vocabulary; i += SAMPLING_THREADS) {
        p.history[i] = 0;
    }
    barrier();
    for (uint32_t i = thread_index(); i < p.prompt + p.generated; i += SAMPLING_THREADS) {
        uint32_t token = p.tokens[i];
        if (token < p.vocabulary) {
            if (i < p.prompt) {
                atomic_or(p.history + token, 1u << 31);
            } else {
                atomic_add(p.history + token, 1u);
            }
        }
    }
}
