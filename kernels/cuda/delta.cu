// Recurrent layers: the gated delta rule with its convolution and output norm. src/cpu/delta.rs has the formulas, the states and their
// logs; what a sequence keeps has the same layout here. Four kernels a layer:
//
//   delta_inputs  convolution, activation, and norms of queries and keys; betas and decays
//   delta_rule    outputs of the rule; states at multiples of CELL positions, updates in the log
//   delta_keep    keys, decays and inputs of the convolution in the log, once nothing reads those before
//   delta_norm    norm and gate of the outputs
//
// Every sum has one order, whatever rows are computed together, so of the same projections prefill, decode and drafts make the same bits.
#include "params.h"
#include "swiglu.cuh"

// Positions between two states.
constexpr uint32_t CELL = 16;
// Floats before what a head keeps: the first one holds the position of its state, as bits.
constexpr uint32_t HEADER = 16;
constexpr uint32_t DELTA_THREADS = 128;
constexpr uint32_t DELTA_WARPS = DELTA_THREADS / WARP;
constexpr float LOG2_E = 1.44269504f;

DEVICE float exponential(float x) { return exp2_approximate(multiply_exact(x, LOG2_E)); }

// A piece of a sequence's state.
DEVICE float *piece_of(const DeltaParams &p, const DeltaSequence &sequence, uint32_t piece) {
    DeltaPlace place = p.places[piece];
    return (float *)(p.pool + (uint64_t)p.tables[sequence.table + place.part] * p.block_bytes + place.offset);
}
// Position and inputs of the state of a head, counted from the key heads on; the matrix of a value head; the log of a head.
DEVICE float *state_of(const DeltaParams &p, const DeltaSequence &s, uint32_t head) { return piece_of(p, s, head); }
DEVICE float *matrix_of(const DeltaParams &p, const DeltaSequence &s, uint32_t head) {
    return piece_of(p, s, p.key_heads + p.value_heads + head);
}
DEVICE float *log_of(const DeltaParams &p, const DeltaSequence &s, uint32_t head) {
    return piece_of(p, s, p.key_heads + 2 * p.value_heads + head);
}

// Position of the state after the rows of a sequence: of those that are no drafts.
DEVICE uint32_t kept_state(const DeltaSequence &s) {
    return (s.position + s.rows - MUTANT(DraftState, 0, s.drafts)) / CELL * CELL;
}

// The channels of a head in the convolution, and where its inputs are kept.
struct Channels {
    uint32_t first, count; // of the head, or of its queries
    uint32_t second;       // first channel of its keys; only of key heads
    uint32_t state_at;
    float *before; // inputs before the position of the state, [taps - 1, stride]
    float *ring;   // of the last positions, [inputs, stride]
    uint32_t stride;
};

// HEAD counts from the key heads on.
DEVICE Channels channels_of(const DeltaParams &p, const DeltaSequence &s, uint32_t head) {
    float *header = state_of(p, s, head), *log = log_of(p, s, head);
    uint32_t state_at = float_to_bits(*header), keys = p.key_heads * p.key_dim;
    if (head < p.key_heads) {
        return Channels{head * p.key_dim, p.key_dim, keys + head * p.key_dim, state_at, header + HEADER, log + p.log * p.key_dim,
                        2 * p.key_dim};
    }
    float *ring = log + p.log * p.value_dim + (p.log + 15) / 16 * 16;
    return Channels{2 * keys + (head - p.key_heads) * p.value_dim, p.value_dim, 0, state_at, header + HEADER, ring, p.value_dim};
}

// Channel NTH of a head, among those of the convolution.
DEVICE uint32_t channel_of(const Channels &c, uint32_t nth) {
    return nth < c.count ? c.first + nth : c.second + nth - c.count;
}

// Input of a channel at a position before the first row of a sequence. The ring of one that resumes from a state is of another sequence.
DEVICE float input_before(const DeltaParams &p, const DeltaSequence &s, const Channels &c, uint32_t nth, uint32_t at) {
    uint32_t back = s.position - at;
    return s.position == c.state_at ? c.before[(p.taps - 1 - back) * c.stride + nth] : c.ring[at % p.inputs * c.stride + nth];
}

template <typename T> DEVICE float projected(const DeltaParams &p, uint32_t row, uint32_t column) {
    return to_float(((const T *)p.projected)[(uint64_t)row * p.stride + column]);
}

// Input of a channel at a position of a row, or before; AT is not below -taps, and counts from position 0.
template <typename T>
DEVICE float input_at(const DeltaParams &p, const DeltaSequence &s, const Channels &c, uint32_t nth, int64_t at) {
    if (at < 0) {
        return 0.0f;
    }
    uint32_t position = (uint32_t)at;
    return position >= s.position ? projected<T>(p, s.row + position - s.position, channel_of(c, nth))
                                  : input_before(p, s, c, nth, position);
}

// A channel behind convolution and activation.
template <typename T>
DEVICE float convolved(const DeltaParams &p, const DeltaSequence &s, const Channels &c, uint32_t nth, uint32_t position) {
    uint32_t channels = 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim;
    const float *weights = p.convolution + channel_of(c, nth);
    float sum = 0.0f;
    for (uint32_t tap = 0; tap < p.taps; tap++) {
        int64_t at = (int64_t)position + tap + 1 - p.taps;
        sum = fma_exact(weights[(uint64_t)tap * channels], input_at<T>(p, s, c, nth, at), sum);
    }
    return gated(sum, 1.0f);
}

// One warp per head of a row. Grid: x are the rows, y the heads.
template <typename T> DEVICE void inputs(const DeltaParams &p) {
    uint32_t row = block_index(), head = block_row() * DELTA_WARPS + warp();
    uint32_t index = p.row_sequences[row];
    if (index == ~0u || head >= p.key_heads + p.value_heads) {
        return;
    }
    DeltaSequence s = p.sequences[index];
    Channels c = channels_of(p, s, head);
    uint32_t channels = 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim;
    uint32_t position = s.position + row - s.row;
    float *to = p.convolved + (uint64_t)row * channels;
    if (head >= p.key_heads) {
        for (uint32_t nth = lane(); nth < c.count; nth += WARP) {
            to[channel_of(c, nth)] = convolved<T>(p, s, c, nth, position);
        }
        if (lane() == 0) {
            uint32_t value_head = head - p.key_heads, scalars = channels + p.value_heads * p.value_dim;
            float beta = projected<T>(p, row, scalars + value_head);
            float x = projected<T>(p, row, scalars + p.value_heads + value_head) + p.decay_bias[value_head];
            // softplus, without overflow
            float softplus = fmaxf(x, 0.0f) + (float)log_double(1.0 + (double)exponential(-fabsf(x)));
            // fmaxf returns the operand that is not NaN.
            softplus = x == x ? softplus : x;
            float *factors = p.factors + (uint64_t)row * 2 * p.value_heads + value_head;
            factors[0] = divide_exact(1.0f, 1.0f + exponential(-beta));
            factors[p.value_heads] = multiply_exact(-p.decay[value_head], softplus);
        }
        return;
    }
    // Queries, then keys: each divided by its length.
    for (uint32_t part = 0; part < 2; part++) {
        float sum = 0.0f;
        for (uint32_t nth = part * c.count + lane(); nth < (part + 1) * c.count; nth += WARP) {
            float x = convolved<T>(p, s, c, nth, position);
            to[channel_of(c, nth)] = x;
            sum = fma_exact(x, x, sum);
        }
        float factor = root_inverse(warp_sum(sum) + 1e-6f);
        factor = part == 0 ? multiply_exact(factor, root_inverse((float)p.key_dim)) : factor;
        for (uint32_t nth = part * c.count + lane(); nth < (part + 1) * c.count; nth += WARP) {
            to[channel_of(c, nth)] = multiply_exact(to[channel_of(c, nth)], factor);
        }
    }
}

// Shared memory of delta_rule. A row of keys has padding behind it, so that eight rows fall into different banks.
template <uint32_t KEYS> struct Cell {
    static constexpr uint32_t STRIDE = KEYS + 4;
    float keys[CELL][STRIDE], queries[CELL][STRIDE];
    // By the row's own and an earlier position: decay between them times the product of keys, or of query and key.
    float by_key[CELL][CELL], by_query[CELL][CELL];
    // Products of a warp's part of the state with keys and queries.
    float products[DELTA_WARPS][CELL][2][WARP];
    // Values, then updates, of this block's columns.
    float updates[CELL][WARP];
    // Sums of the decays from the cell's first position on, and betas.
    float sums[CELL], betas[CELL];
};

// The rule for WARP columns of a value head of a sequence. Each thread has a column of KEYS / DELTA_WARPS rows of the state in registers.
template <uint32_t KEYS> struct Rule {
    static constexpr uint32_t EACH = KEYS / DELTA_WARPS;
    const DeltaParams &p;
    DeltaSequence s;
    Cell<KEYS> &cell;
    float *keys_log, *updates_log, *decays_log;
    uint32_t head, key_head, column; // column: of the head, this thread's
    float state[EACH];

    MEMBER uint32_t channels() const {
        return 2 * p.key_heads * KEYS + p.value_heads * p.value_dim;
    }

    // Loads keys, updates and decays of positions from BASE to before END from the log.
    MEMBER void load_log(uint32_t base, uint32_t end) {
        uint32_t count = end - base;
        for (uint32_t at = thread_index(); at < count * KEYS; at += DELTA_THREADS) {
            cell.keys[at / KEYS][at % KEYS] = keys_log[(base + at / KEYS) % p.log * KEYS + at % KEYS];
        }
        for (uint32_t nth = warp(); nth < count; nth += DELTA_WARPS) {
            cell.updates[nth][lane()] = updates_log[(base + nth) % p.log * p.value_dim + column];
        }
        if (thread_index() == 0) {
            float sum = 0.0f;
            for (uint32_t nth = 0; nth < count; nth++) {
                sum += decays_log[(base + nth) % MUTANT(LogSlot, CELL, p.log)];
                cell.sums[nth] = sum;
            }
        }
        barrier();
    }

    // Loads queries, keys, values, betas and decays of the rows at positions from AT to before END of the cell at BASE.
    MEMBER void load_rows(uint32_t base, uint32_t at, uint32_t end) {
        uint32_t first = s.row + at - s.position, count = end - at, nth = at - base;
        for (uint32_t i = thread_index(); i < count * KEYS; i += DELTA_THREADS) {
            const float *from = p.convolved + (uint64_t)(first + i / KEYS) * channels() + key_head * KEYS + i % KEYS;
            cell.queries[nth + i / KEYS][i % KEYS] = from[0];
            cell.keys[nth + i / KEYS][i % KEYS] = from[p.key_heads * KEYS];
        }
        for (uint32_t i = warp(); i < count; i += DELTA_WARPS) {
            cell.updates[nth + i][lane()] = *value_at(first + i);
        }
        if (thread_index() == 0) {
            float sum = nth == 0 ? 0.0f : cell.sums[nth - 1];
            for (uint32_t i = 0; i < count; i++) {
                const float *factors = p.factors + (uint64_t)(first + i) * 2 * p.value_heads + head;
                sum += factors[p.value_heads];
                cell.betas[nth + i] = factors[0];
                cell.sums[nth + i] = sum;
            }
        }
        barrier();
    }

    // This thread's column of the value, later of the output, of a row.
    MEMBER float *value_at(uint32_t row) const {
        return p.convolved + (uint64_t)row * channels() + 2 * p.key_heads * KEYS + head * p.value_dim + column;
    }

    // Products of keys and queries of the rows FIRST to before END of the cell with the keys up to each.
    MEMBER void multiply_keys(uint32_t first, uint32_t end) {
        for (uint32_t at = first * CELL + thread_index(); at < end * CELL; at += DELTA_THREADS) {
            uint32_t own = at / CELL, other = at % CELL;
            if (other > own) {
                continue;
            }
            Float4 by_key = {0.0f, 0.0f, 0.0f, 0.0f}, by_query = {0.0f, 0.0f, 0.0f, 0.0f};
            for (uint32_t i = 0; i < KEYS; i += 4) {
                Float4 before = *(const Float4 *)&cell.keys[other][i];
                Float4 key = *(const Float4 *)&cell.keys[own][i], query = *(const Float4 *)&cell.queries[own][i];
                by_key.x = fma_exact(key.x, before.x, by_key.x);
                by_key.y = fma_exact(key.y, before.y, by_key.y);
                by_key.z = fma_exact(key.z, before.z, by_key.z);
                by_key.w = fma_exact(key.w, before.w, by_key.w);
                by_query.x = fma_exact(query.x, before.x, by_query.x);
                by_query.y = fma_exact(query.y, before.y, by_query.y);
                by_query.z = fma_exact(query.z, before.z, by_query.z);
                by_query.w = fma_exact(query.w, before.w, by_query.w);
            }
            float decay = exponential(cell.sums[own] - cell.sums[other]);
            cell.by_key[own][other] = multiply_exact(decay, (by_key.x + by_key.y) + (by_key.z + by_key.w));
            cell.by_query[own][other] = multiply_exact(decay, (by_query.x + by_query.y) + (by_query.z + by_query.w));
        }
    }

    // Products of this thread's part of the state with keys and queries of these rows.
    MEMBER void multiply_state(uint32_t first, uint32_t end) {
        for (uint32_t row = first; row < end; row++) {
            float by_key = 0.0f, by_query = 0.0f;
            UNROLL
            for (uint32_t i = 0; i < EACH; i += 4) {
                Float4 key = *(const Float4 *)&cell.keys[row][warp() * EACH + i];
                Float4 query = *(const Float4 *)&cell.queries[row][warp() * EACH + i];
                by_key = fma_exact(state[i], key.x, by_key);
                by_query = fma_exact(state[i], query.x, by_query);
                by_key = fma_exact(state[i + 1], key.y, by_key);
                by_query = fma_exact(state[i + 1], query.y, by_query);
                by_key = fma_exact(state[i + 2], key.z, by_key);
                by_query = fma_exact(state[i + 2], query.z, by_query);
                by_key = fma_exact(state[i + 3], key.w, by_key);
                by_query = fma_exact(state[i + 3], query.w, by_query);
            }
            cell.products[warp()][row][0][lane()] = by_key;
            cell.products[warp()][row][1][lane()] = by_query;
        }
    }

    // The product of the whole state with the key (0) or the query (1) of a row, decayed to its position.
    MEMBER float known(uint32_t row, uint32_t which) const {
        float sum = cell.products[0][row][which][lane()];
        UNROLL
        for (uint32_t w = 1; w < DELTA_WARPS; w++) {
            sum += cell.products[w][row][which][lane()];
        }
        return multiply_exact(exponential(cell.sums[row]), sum);
    }

    // Computes the rows at positions from AT to before END of the cell at BASE.
    MEMBER void rows(uint32_t base, uint32_t at, uint32_t end, uint32_t keep) {
        load_rows(base, at, end);
        uint32_t first = at - base, last = end - base;
        multiply_keys(first, last);
        multiply_state(first, last);
        barrier();
        // An update needs those before it.
        if (warp() == 0) {
            for (uint32_t row = first; row < last; row++) {
                float sum = known(row, 0);
                for (uint32_t other = 0; other < row; other++) {
                    sum = fma_exact(cell.by_key[row][other], cell.updates[other][lane()], sum);
                }
                cell.updates[row][lane()] = multiply_exact(cell.betas[row], cell.updates[row][lane()] - sum);
            }
        }
        barrier();
        for (uint32_t row = first + warp(); row < last; row += DELTA_WARPS) {
            float sum = known(row, 1);
            for (uint32_t other = 0; other <= row; other++) {
                sum = fma_exact(cell.by_query[row][other], cell.updates[other][lane()], sum);
            }
            *value_at(s.row + base + row - s.position) = sum;
            if (base + row >= keep) {
                updates_log[(base + row) % p.log * p.value_dim + column] = cell.updates[row][lane()];
            }
        }
    }

    // The state behind a cell whose rows are all known.
    MEMBER void fold() {
        float last = cell.sums[CELL - 1], updates[CELL];
        UNROLL
        for (uint32_t nth = 0; nth < CELL; nth++) {
            updates[nth] = multiply_exact(exponential(last - cell.sums[nth]), cell.updates[nth][lane()]);
        }
        float whole = exponential(last);
        UNROLL
        for (uint32_t i = 0; i < EACH; i++) {
            state[i] = multiply_exact(whole, state[i]);
        }
        UNROLL
        for (uint32_t nth = 0; nth < CELL; nth++) {
            UNROLL
            for (uint32_t i = 0; i < EACH; i += 4) {
                Float4 key = *(const Float4 *)&cell.keys[nth][warp() * EACH + i];
                state[i] = fma_exact(key.x, updates[nth], state[i]);
                state[i + 1] = fma_exact(key.y, updates[nth], state[i + 1]);
                state[i + 2] = fma_exact(key.z, updates[nth], state[i + 2]);
                state[i + 3] = fma_exact(key.w, updates[nth], state[i + 3]);
            }
        }
        // The next cell overwrites this one.
        barrier();
    }
};

template <uint32_t KEYS> DEVICE void rule(const DeltaParams &p) {
    Cell<KEYS> &cell = *(Cell<KEYS> *)shared_memory();
    uint32_t slices = p.value_dim / WARP, each = p.value_heads * slices;
    uint32_t units = *p.sequence_count * each;
    for (uint32_t unit = block_index(); unit < units; unit += blocks()) {
        uint32_t head = unit % each / slices, column = unit % slices * WARP + lane();
        uint32_t key_head = p.tiled ? head % p.key_heads : head / (p.value_heads / p.key_heads);
        DeltaSequence s = p.sequences[unit / each];
        float *log = log_of(p, s, p.key_heads + head);
        Rule<KEYS> rule = {p,    s,        cell,   log_of(p, s, key_head), log, log + p.log * p.value_dim,
                           head, key_head, column, {}};
        float *matrix = matrix_of(p, s, head) + (uint64_t)warp() * Rule<KEYS>::EACH * p.value_dim + column;
        uint32_t end = s.position + s.rows, certain = end - s.drafts, keep = kept_state(s);
        uint32_t base = s.position == 0 ? 0 : float_to_bits(*state_of(p, s, p.key_heads + head));
        // A state that does not precede the position is none of this sequence; its request ends, as its logits are not finite.
        bool precedes = base % CELL == 0 && base <= s.position && s.position - base < p.log;
        uint32_t state_at = precedes ? base : s.position / CELL * CELL;
        base = state_at;
        UNROLL
        for (uint32_t i = 0; i < Rule<KEYS>::EACH; i++) {
            rule.state[i] = !precedes ? NOT_A_NUMBER : base == 0 ? 0.0f : matrix[(uint64_t)i * p.value_dim];
        }
        rule.load_log(base, smaller(s.position, base + CELL));
        // Drafts that were accepted since.
        while (base + CELL <= s.position) {
            rule.fold();
            base += CELL;
            rule.load_log(base, smaller(s.position, base + CELL));
        }
        for (uint32_t at = s.position;;) {
            // Stored before drafts change it.
            if (base == keep && (base != state_at || !precedes)) {
                UNROLL
                for (uint32_t i = 0; i < Rule<KEYS>::EACH; i++) {
                    matrix[(uint64_t)i * p.value_dim] = rule.state[i];
                }
            }
            if (at == end) {
                break;
            }
            uint32_t stop = smaller(end, base + CELL);
            rule.rows(base, at, stop, keep);
            barrier();
            at = stop;
            if (at < base + CELL || (at == end && at > certain)) {
                break;
            }
            rule.fold();
            base += CELL;
        }
        // The next unit overwrites the cell.
        barrier();
    }
}

template <typename T> DEVICE void keep(const DeltaParams &p) {
    uint32_t heads = p.key_heads + p.value_heads, units = *p.sequence_count * heads;
    uint32_t channels = 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim;
    for (uint32_t unit = block_index(); unit < units; unit += blocks()) {
        uint32_t head = unit % heads;
        DeltaSequence s = p.sequences[unit / heads];
        Channels c = channels_of(p, s, head);
        uint32_t end = s.position + s.rows, kept = kept_state(s);
        bool key = head < p.key_heads;
        // One thread per channel: it reads its inputs before it overwrites them.
        for (uint32_t nth = thread_index(); nth < (key ? 2 : 1) * c.count; nth += DELTA_THREADS) {
            bool resumes = s.position > 0 && s.position == c.state_at;
            for (uint32_t back = 1; MUTANT(ResumedInputs, false, resumes) && back < p.taps; back++) {
                c.ring[(s.position - back) % p.inputs * c.stride + nth] = c.before[(p.taps - 1 - back) * c.stride + nth];
            }
            // A state that stays keeps its inputs.
            if (kept > 0 && (s.position == 0 || kept != c.state_at)) {
                for (uint32_t tap = 0; tap + 1 < p.taps; tap++) {
                    uint32_t at = kept + tap + 1 - p.taps;
                    c.before[tap * c.stride + nth] = at >= s.position
                                                         ? projected<T>(p, s.row + at - s.position, channel_of(c, nth))
                                                         : c.ring[at % p.inputs * c.stride + nth];
                }
            }
            for (uint32_t at = end - smaller(s.rows, p.inputs); at < end; at++) {
                c.ring[at % p.inputs * c.stride + nth] = projected<T>(p, s.row + at - s.position, channel_of(c, nth));
            }
        }
        uint32_t first = larger(kept, s.position);
        float *log = log_of(p, s, head);
        if (key) {
            for (uint32_t i = thread_index(); i < (end - first) * p.key_dim; i += DELTA_THREADS) {
                uint32_t at = first + i / p.key_dim, row = s.row + at - s.position;
                log[at % p.log * p.key_dim + i % p.key_dim] = p.convolved[(uint64_t)row * channels + c.second + i % p.key_dim];
            }
        } else {
            float *decays = log + p.log * p.value_dim;
            for (uint32_t i = thread_index(); i < end - first; i += DELTA_THREADS) {
                uint32_t row = s.row + first + i - s.position;
                decays[(first + i) % p.log] = p.factors[(uint64_t)row * 2 * p.value_heads + p.value_heads + head - p.key_heads];
            }
        }
        // All threads have read the position before.
        barrier();
        if (thread_index() == 0) {
            *state_of(p, s, head) = bits_to_float(kept);
        }
    }
}

// One warp per value head of a row. Grid: x are the rows, y the heads.
template <typename T> DEVICE void norm(const DeltaParams &p) {
    uint32_t row = block_index(), head = block_row() * DELTA_WARPS + warp();
    if (p.row_sequences[row] == ~0u || head >= p.value_heads) {
        return;
    }
    uint32_t channels = 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim;
    const float *from = p.convolved + (uint64_t)row * channels + 2 * p.key_heads * p.key_dim + head * p.value_dim;
    float sum = 0.0f;
    for (uint32_t i = lane(); i < p.value_dim; i += WARP) {
        sum = fma_exact(from[i], from[i], sum);
    }
    float scale = norm_scale(warp_sum(sum) / (float)p.value_dim + p.norm_eps);
    uint32_t *out = (uint32_t *)p.out + ((uint64_t)row * p.value_heads + head) * p.value_dim / 2;
    for (uint32_t i = 2 * lane(); i < p.value_dim; i += 2 * WARP) {
        float two[2];
        UNROLL
        for (uint32_t j = 0; j < 2; j++) {
            float gate = projected<T>(p, row, channels + head * p.value_dim + i + j);
            two[j] = gated(gate, multiply_exact(multiply_exact(from[i + j], scale), p.norm[i + j]));
        }
        out[i / 2] = pack<T>(two[0], two[1]);
    }
}

KERNEL(delta_inputs_bf16, DeltaParams, DELTA_THREADS, 4) { inputs<Bf16>(p); }
KERNEL(delta_inputs_f16, DeltaParams, DELTA_THREADS, 4) { inputs<F16>(p); }
// Elements of a query or key of the supported models: 128 in all that are published. One more also goes into `DELTA_KEY_DIMS` and
// `rule_kernel` in `../src/cuda/delta.rs`.
KERNEL(delta_rule_64, DeltaParams, DELTA_THREADS, 4) { rule<64>(p); }
KERNEL(delta_rule_128, DeltaParams, DELTA_THREADS, 4) { rule<128>(p); }
KERNEL(delta_keep_bf16, DeltaParams, DELTA_THREADS, 4) { keep<Bf16>(p); }
KERNEL(delta_keep_f16, DeltaParams, DELTA_THREADS, 4) { keep<F16>(p); }
KERNEL(delta_norm_bf16, DeltaParams, DELTA_THREADS, 4) { norm<Bf16>(p); }
KERNEL(delta_norm_f16, DeltaParams, DELTA_THREADS, 4) { norm<F16>(p); }
