// Changes to a row's logits before a token is chosen: penalties, biases, tokens masked until an output is long enough, allowed tokens
// and bad words. Each block changes the tokens of its part.
#pragma once

#include "sampling_cut.cuh"

// Whether a row asks for changes.
DEVICE bool adjusts(const SamplingRow &row) {
    return row.history || row.biases || row.masked || row.allowed || row.word_count;
}

// The logit of a token that is in the prompt or was generated; SEEN as in a history. NaN stays NaN: best_of has to see it.
DEVICE float penalized(const SamplingRow &row, float logit, uint32_t seen) {
    float x = logit;
    x = x > 0.0f ? divide_exact(x, row.repetition) : multiply_exact(x, row.repetition);
    uint32_t times = seen & 0x7fffffff;
    if (times > 0) {
        x = x - multiply_exact((float)times, row.frequency);
        x = x - row.presence;
    }
    return x;
}

// Penalties. A row counts only if the drafts before it stand, so to it they are generated, which the history does not know.
DEVICE void penalize(const SamplingRow &row, const uint32_t *drafts, float *logits, const Part &part) {
    uint32_t before = MUTANT(DraftPenalty, 0, row.nth), own = thread_index(), token = 0, times = 0;
    float with_drafts = 0.0f;
    bool first = own < before; // the first draft of its token
    if (first) {
        token = drafts[own];
        first = holds(part, token);
    }
    if (first) {
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
    for (uint32_t i = part.first + thread_index(); i < part.end; i += SAMPLING_THREADS) {
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

// Adjusts the logits of a part.
DEVICE void adjust(const SamplingRow &row, const uint32_t *drafts, float *logits, const Part &part) {
    if (row.history) {
        penalize(row, drafts, logits, part);
    }
    uint32_t counted = row.output ? row.output->generated : 0, generated = counted + row.nth;
    uint32_t ending = MUTANT(DraftMinimum, counted, generated) < row.min_tokens ? row.masked : 0;
    for (uint32_t i = thread_index(); i < row.biases; i += SAMPLING_THREADS) {
        uint32_t token = row.adjustments[2 * i];
        if (holds(part, token)) {
            logits[token] = logits[token] + bits_to_float(row.adjustments[2 * i + 1]);
        }
    }
    barrier();
    for (uint32_t i = thread_index(); i < ending; i += SAMPLING_THREADS) {
        uint32_t token = row.adjustments[2 * (row.biases + i)];
        if (holds(part, token)) {
            logits[token] = -INFINITE;
        }
    }
    if (row.allowed) {
        for (uint32_t i = part.first + thread_index(); i < part.end; i += SAMPLING_THREADS) {
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
        if (ends && holds(part, tokens[before])) {
            logits[tokens[before]] = -INFINITE;
        }
    }
    barrier();
}
