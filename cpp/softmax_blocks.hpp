// Passes over a block of logits [b n], all tokens of a column side by side: their exponentials
// summed, and made into gradients. A token's numbers come from its own logits alone, in their
// order, so they have the same bits on any number of threads and for vectors of any length.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "threads.hpp"

// The build says whether functions may be compiled for several processors: plain loops, and the
// loader picks what the machine has.
#ifdef MEGABLOCKS_CLONES
#define MEGABLOCKS_FOR_EACH_MACHINE \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define MEGABLOCKS_INSIDE inline __attribute__((always_inline))
#else
#define MEGABLOCKS_FOR_EACH_MACHINE
#define MEGABLOCKS_INSIDE inline
#endif

namespace megablocks {

template <typename To, typename From>
MEGABLOCKS_INSIDE To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// A logit is a float, or the bits of a bfloat16.
MEGABLOCKS_INSIDE float widened(float x) { return x; }
MEGABLOCKS_INSIDE float widened(std::int16_t x) {
    return same_bits<float>(static_cast<std::uint32_t>(static_cast<std::uint16_t>(x)) << 16);
}

template <typename Logit>
MEGABLOCKS_INSIDE Logit narrowed(float x) {
    if constexpr (std::is_same_v<Logit, float>) {
        return x;
    } else {  // to nearest even; what is no number stays none
        const auto bits = same_bits<std::uint32_t>(x);
        const std::uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return static_cast<std::int16_t>(x == x ? nearest : bits >> 16 | 0x40);
    }
}

// exp(x) of numbers not above 0, within a unit of the last place; zero where it were denormal.
// As 2**k exp(r), |r| <= log(2) / 2, with the polynomial of expf in Cephes (S. Moshier).
MEGABLOCKS_INSIDE float exp_of(float x) {
    constexpr float kLeast = -87.0f, kRounds = 12582912.0f;  // 1.5 * 2**23: sums are integers
    const float y = x < kLeast ? kLeast : x;
    const float shifted = y * 1.44269504088896341f + kRounds;
    const float k = shifted - kRounds;
    const float r = (y - k * 0.693359375f) - k * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    const float power = same_bits<float>((same_bits<std::uint32_t>(shifted) + 127) << 23);
    return x < kLeast ? 0.0f : p * power;
}

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
