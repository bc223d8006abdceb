// Passes over a block of logits [b n], all tokens of a column side by side: their exponentials
// summed, and made into gradients. A token's numbers come from its own logits alone, in their
// order, so they have the same bits on any number of threads and for vectors of any length.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "floats.hpp"
#include "threads.hpp"

namespace megablocks {

// A block whose logit of token n in column c is logits[c * stride + n].
template <typename Logit>
struct Block {
    Logit* logits;
    std::int64_t columns;
    std::int64_t stride;

    Logit* column(std::int64_t c) const { return logits + c * stride; }
    bool has(std::int64_t c) const { return 0 <= c && c < columns; }
};

constexpr std::int64_t kTokens = 1024;  // whose numbers the nearest cache holds
constexpr std::int64_t kColumns = 16;   // at a time: sums are rescaled, and grow, seldom

// Of up to kTokens tokens: the largest logit, at least the lowest number there is, and the sum of
// exp(logit - largest).
template <typename Logit>
MEGABLOCKS_FOR_EACH_MACHINE void sum_exponentials(Block<const Logit> block, std::int64_t tokens,
                                                  float* __restrict tops, float* __restrict sums) {
    float top[kTokens], part[kTokens];
    std::fill_n(tops, tokens, std::numeric_limits<float>::lowest());
    std::fill_n(sums, tokens, 0.0f);
    for (std::int64_t from = 0; from < block.columns; from += kColumns) {
        const std::int64_t to = std::min(from + kColumns, block.columns);
        std::copy_n(tops, tokens, top);
        for (std::int64_t c = from; c < to; ++c) {
            const Logit* logits = block.column(c);
            for (std::int64_t n = 0; n < tokens; ++n) {
                const float x = widened(logits[n]);
                top[n] = x > top[n] ? x : top[n];
            }
        }
        std::fill_n(part, tokens, 0.0f);
        for (std::int64_t c = from; c < to; ++c) {
            const Logit* logits = block.column(c);
            for (std::int64_t n = 0; n < tokens; ++n) part[n] += exp_of(widened(logits[n]) - top[n]);
        }
        for (std::int64_t n = 0; n < tokens; ++n) {
            sums[n] = sums[n] * exp_of(tops[n] - top[n]) + part[n];
            tops[n] = top[n];
        }
    }
}

// The sum of the logits of up to kTokens tokens.
template <typename Logit>
MEGABLOCKS_FOR_EACH_MACHINE void sum_logits(Block<const Logit> block, std::int64_t tokens,
                                            float* __restrict sums) {
    float part[kTokens];
    std::fill_n(sums, tokens, 0.0f);
    for (std::int64_t from = 0; from < block.columns; from += kColumns) {
        std::fill_n(part, tokens, 0.0f);
        for (std::int64_t c = from; c < std::min(from + kColumns, block.columns); ++c) {
            const Logit* logits = block.column(c);
            for (std::int64_t n = 0; n < tokens; ++n) part[n] += widened(logits[n]);
        }
        for (std::int64_t n = 0; n < tokens; ++n) sums[n] += part[n];
    }
}

// What a token's logits are made into: exp(logit - top) * factor - shift, and hit more at the
// target. One row of tokens each.
struct Terms {
    const float* top;
    const float* factor;
    const float* shift;
    const float* hit;

    MEGABLOCKS_INSIDE float of(float logit, std::int64_t n) const {
        return exp_of(logit - top[n]) * factor[n] - shift[n];
    }
};

template <typename Logit>
MEGABLOCKS_FOR_EACH_MACHINE void make_gradients(Block<Logit> block, std::int64_t begin,
                                                std::int64_t end, Terms terms) {
    for (std::int64_t c = 0; c < block.columns; ++c) {
        Logit* __restrict logits = block.column(c);
        for (std::int64_t n = begin; n < end; ++n) {
            logits[n] = narrowed<Logit>(terms.of(widened(logits[n]), n));
        }
    }
}

// Calls work(begin, end) for all tokens, on threads where that pays.
template <typename Work>
void share_tokens(std::int64_t tokens, std::int64_t columns, std::int64_t threads,
                  const Work& work) {
    constexpr std::int64_t kWorthAThread = 1 << 18;  // about 0.2 ms of exponentials
    share(tokens, threads_worth(tokens * columns, kWorthAThread, threads),
          [&](std::int64_t, std::int64_t begin, std::int64_t end) { work(begin, end); });
}

// Writes into out [k n] the largest logit, the sum of exponentials, the target's logit or zero
// where that is in no column and, if k is 4, the sum of logits.
template <typename Logit>
void softmax_sums(Block<const Logit> block, const std::int64_t* targets, std::int64_t tokens,
                  float* out, bool all, std::int64_t threads) {
    share_tokens(tokens, block.columns, threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t n = begin; n < end; n += kTokens) {
            const std::int64_t count = std::min(kTokens, end - n);
            const Block<const Logit> tile{block.logits + n, block.columns, block.stride};
            sum_exponentials(tile, count, out + n, out + tokens + n);
            if (all) sum_logits(tile, count, out + 3 * tokens + n);
        }
        for (std::int64_t n = begin; n < end; ++n) {
            const std::int64_t target = targets[n];
            out[2 * tokens + n] = block.has(target) ? widened(block.column(target)[n]) : 0.0f;
        }
    });
}

// Makes logits into gradients, in their place.
template <typename Logit>
void softmax_gradients(Block<Logit> block, const std::int64_t* targets, std::int64_t tokens,
                       Terms terms, std::int64_t threads) {
    share_tokens(tokens, block.columns, threads, [&](std::int64_t begin, std::int64_t end) {
        std::vector<Logit> at_targets(end - begin);  // rounded once, so made before the others
        for (std::int64_t n = begin; n < end; ++n) {
            if (!block.has(targets[n])) continue;
            const float logit = widened(block.column(targets[n])[n]);
            at_targets[n - begin] = narrowed<Logit>(terms.of(logit, n) + terms.hit[n]);
        }
        make_gradients(block, begin, end, terms);
        for (std::int64_t n = begin; n < end; ++n) {
            if (block.has(targets[n])) block.column(targets[n])[n] = at_targets[n - begin];
        }
    });
}

}  // namespace megablocks
