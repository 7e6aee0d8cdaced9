// Log probabilities of given tokens, and choosing a token from each row of logits: penalties, biases, masks, then the most probable token or a draw after
// temperature, top-k, top-p and min-p; log probabilities where asked for. No sort: what is kept is found by counting. A sweep
// counts logits by their distance from the best; where few are as near as the last one kept, which is the rule, another sweep
// collects these, one a thread, and the rest is done among them. Else further sweeps find what is kept, digit by digit.
//
// The rules are those of the CPU's kernels, and so are the random numbers. Weights e^((logit - best) / temperature) have
// the CPU's bits where it has a fused multiply-add; their sums are of fixed-point numbers, which are exact, so neither
// the order of threads nor the shape of a block shows in a choice.
#include "sampling_cut.cuh"

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

// Sums of the kept masses over one range of ids for each warp, from FROM on, EACH ids long.
DEVICE void range_sums(SamplingShared &shared, const Kept &kept, uint32_t from, uint32_t each, uint32_t end) {
    uint32_t first = from + warp() * each, last = smaller(first + each, end);
    uint64_t sum = 0;
    UNROLL_BY(4)
    for (uint32_t i = first + lane(); i < last; i += WARP) {
        sum += kept_mass(kept, i, clean(kept.logits[i]));
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

// Kept tokens lie on a line in the order of their ids, each as long as its mass: the one at the drawn part of it.
DEVICE uint32_t pick(SamplingShared &shared, const Kept &kept, uint32_t vocabulary, uint64_t bits) {
    uint32_t each = (vocabulary + SAMPLING_WARPS - 1) / SAMPLING_WARPS;
    range_sums(shared, kept, 0, each, vocabulary);
    uint64_t total = 0;
    for (uint32_t i = 0; i < SAMPLING_WARPS; i++) {
        total += shared.reduced[i];
    }
    // bits / 2^53 of the total
    uint64_t target = multiply_high(bits << 11, total);
    uint32_t from = range_of(shared, target) * each;
    uint32_t end = smaller(from + each, vocabulary);
    uint32_t within = (each + SAMPLING_WARPS - 1) / SAMPLING_WARPS;
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

// The logit of a token that is in the prompt or was generated; SEEN as in a history.
DEVICE float penalized(const SamplingRow &row, float logit, uint32_t seen) {
    float x = clean(logit);
    x = x > 0.0f ? divide_exact(x, row.repetition) : multiply_exact(x, row.repetition);
    uint32_t times = seen & 0x7fffffff;
    if (times > 0) {
        x = x - multiply_exact((float)times, row.frequency);
        x = x - row.presence;
    }
    return x;
}

// Penalties. A row counts only if the drafts before it stand, so to it they are generated, which the history does not know.
DEVICE void penalize(const SamplingRow &row, const uint32_t *drafts, float *logits, uint32_t vocabulary) {
    uint32_t before = MUTANT(DraftPenalty, 0, row.nth), own = thread_index(), token = 0, times = 0;
    float with_drafts = 0.0f;
    bool first = own < before; // the first draft of its token
    if (first) {
        token = drafts[own];
        for (uint32_t i = 0; i < before; i++) {
            bool same = drafts[i] == token;
            times += same;
            first = first && !(same && i < own);
        }
        with_drafts = penalized(row, logits[token], row.history[token] + times);
    }
    if (before > 0) {
        barrier();
    }
    for (uint32_t i = thread_index(); i < vocabulary; i += SAMPLING_THREADS) {
        uint32_t seen = row.history[i];
        if (seen) {
            logits[i] = penalized(row, logits[i], seen);
        }
    }
    barrier();
    if (before > 0) {
        if (first) {
            logits[token] = with_drafts;
        }
        barrier();
    }
}

DEVICE void adjust(const SamplingRow &row, const uint32_t *drafts, float *logits, uint32_t vocabulary) {
    if (row.history) {
        penalize(row, drafts, logits, vocabulary);
    }
    uint32_t counted = row.output ? row.output->generated : 0, generated = counted + row.nth;
    uint32_t ending = MUTANT(DraftMinimum, counted, generated) < row.min_tokens ? row.masked : 0;
    for (uint32_t i = thread_index(); i < row.biases; i += SAMPLING_THREADS) {
        uint32_t token = row.adjustments[2 * i];
        if (token < vocabulary) {
            logits[token] = clean(logits[token]) + bits_to_float(row.adjustments[2 * i + 1]);
        }
    }
    barrier();
    for (uint32_t i = thread_index(); i < ending; i += SAMPLING_THREADS) {
        uint32_t token = row.adjustments[2 * (row.biases + i)];
        if (token < vocabulary) {
            logits[token] = -INFINITE;
        }
    }
    if (row.allowed) {
        for (uint32_t i = thread_index(); i < vocabulary; i += SAMPLING_THREADS) {
            if (!(row.allowed[i / 32] >> (i % 32) & 1)) {
                logits[i] = -INFINITE;
            }
        }
    }
    // A bad word's last token is masked where the output ends with the others.
    for (uint32_t i = thread_index(); i < row.word_count; i += SAMPLING_THREADS) {
        const uint32_t *tokens = row.words + row.word_count + 1 + row.words[i];
        uint32_t before = row.words[i + 1] - row.words[i] - 1;
        bool ends = before <= generated;
        for (uint32_t j = 0; ends && j < before; j++) {
            uint32_t at = generated - before + j;
            bool drafted = MUTANT(DraftWord, false, at >= counted);
            ends = (drafted ? drafts[at - counted] : row.output->recent[at % RECENT_TOKENS]) == tokens[j];
        }
        if (ends && tokens[before] < vocabulary) {
            logits[tokens[before]] = -INFINITE;
        }
    }
    barrier();
}

// ln of a token's probability, given ln of the sum of all.
DEVICE float logprob_of(float logit, double total) {
    float logprob = (float)((double)logit - total);
    // Both infinite: the token shares all the probability there is, or there is none.
    return logprob == logprob ? logprob : 0.0f;
}

DEVICE void report(SamplingShared &shared, uint32_t alternatives, const float *logits, uint32_t vocabulary, float best,
                   uint32_t token, SamplingResult &result) {
    uint32_t wanted = smaller(smaller(alternatives, TOP_MAX), vocabulary);
    uint64_t sum = 0;
    each_logit(logits, vocabulary,
               [&](uint32_t, float logit) { sum += mass_of(weight_of(logit, best, 1.0f)); });
    sum = block_sum(shared, sum);
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
    uint32_t count = collect(shared, logits, vocabulary, best, crossing.bin);
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

// Chooses a token by temperature, top-k, top-p and min-p.
SUBROUTINE uint32_t choose(SamplingShared &shared, const SamplingRow &row, const float *logits, uint32_t vocabulary, float best) {
    uint64_t bits = draw(row.seed, row.choice, MUTANT(DrawPosition, row.position + 1, row.position));
    uint32_t top_k = row.top_k < vocabulary ? row.top_k : 0;
    Cut cut = {0, ~0u};
    if (top_k > 0) {
        Measure measure = {false, best, row.temperature};
        Crossing crossing = first_cut(shared, logits, vocabulary, cut, measure, top_k);
        uint32_t count = collect(shared, logits, vocabulary, best, crossing.bin);
        if (count <= SAMPLING_THREADS) {
            return pick_candidate(shared, row, count, best, top_k, 0, bits);
        }
        cut = cut_at(shared, logits, vocabulary, cut, measure, top_k, crossing);
    }
    if (row.top_p < 1.0f) {
        uint64_t sum = 0;
        Kept kept = {logits, cut, best, row.temperature, 0.0f};
        each_logit(logits, vocabulary, [&](uint32_t i, float logit) { sum += kept_mass(kept, i, logit); });
        uint64_t target = top_p_target(row.top_p, block_sum(shared, sum));
        Measure measure = {true, best, row.temperature};
        Crossing crossing = first_cut(shared, logits, vocabulary, cut, measure, target);
        // Candidates do not know what top-k left out.
        if (top_k == 0) {
            uint32_t count = collect(shared, logits, vocabulary, best, crossing.bin);
            if (count <= SAMPLING_THREADS) {
                return pick_candidate(shared, row, count, best, 0, target, bits);
            }
        }
        cut = cut_at(shared, logits, vocabulary, cut, measure, target, crossing);
    }
    Kept kept = {logits, cut, best, row.temperature, row.min_p};
    return pick(shared, kept, vocabulary, bits);
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
    if (row.history || row.biases || row.masked || row.allowed || row.word_count) {
        adjust(row, p.tokens + row.draft, logits, vocabulary);
    }
    uint64_t top = best_of(shared, logits, vocabulary);
    uint32_t token = ~(uint32_t)top;
    float best = clean(logits[token]);
    if (best == -INFINITE && row.fallback < vocabulary) {
        token = row.fallback;
    } else if (row.temperature > 0.0f) {
        token = choose(shared, row, logits, vocabulary, best);
    }
    SamplingResult &result = p.results[block_index()];
    if (row.logprobs) {
        report(shared, row.logprobs - 1, logits, vocabulary, best, token, result);
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
    float best = clean(logits[~(uint32_t)best_of(shared, logits, p.vocabulary)]);
    uint32_t order = order_of(clean(logits[row.token]));
    uint64_t before = 0;
    each_logit(logits, p.vocabulary, [&](uint32_t i, float logit) {
        uint32_t other = order_of(logit);
        before += other > order || (other == order && i < row.token);
    });
    before = block_sum(shared, before);
    SamplingResult &result = p.results[block_index()];
    report(shared, row.top, logits, p.vocabulary, best, row.token, result);
    if (thread_index() == 0) {
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
