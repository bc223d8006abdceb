// Copies ranges of a token array, one after another, into one array of 64-bit integers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SSE2__) && defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "threads.hpp"

namespace megablocks {

// Range i is tokens[source, ...), written to out[target, ...) up to the next range's target.
struct Range {
    std::int64_t source;
    std::int64_t target;
};

// Checks all ranges before anything is read or written. The copy it returns is what gets used, so
// that a caller who changes `starts` or `lengths` meanwhile cannot move a read out of bounds.
// The last element is a sentinel whose target is `out_size`.
inline std::vector<Range> checked_ranges(const std::int64_t* starts, const std::int64_t* lengths,
                                         std::size_t count, std::int64_t num_tokens,
                                         std::int64_t out_size) {
    std::vector<Range> ranges(count + 1);
    std::int64_t target = 0;
    bool fits = true;
    for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t start = starts[i], length = lengths[i];
        if (start < 0 || length < 0 || start > num_tokens || length > num_tokens - start) {
            const std::string index = "[" + std::to_string(i) + "]=";
            throw std::invalid_argument("starts" + index + std::to_string(start) + " and lengths" +
                                        index + std::to_string(length) + " must lie within " +
                                        std::to_string(num_tokens) + " tokens");
        }
        ranges[i] = {start, target};
        fits = fits && length <= out_size - target;
        if (fits) target += length;
    }
    if (!fits || target != out_size) {
        throw std::invalid_argument("out.size=" + std::to_string(out_size) +
                                    " must be the sum of lengths");
    }
    ranges[count] = {0, out_size};
    return ranges;
}

// Converts `count` tokens.
template <typename Token>
void widen(const Token* from, std::int64_t count, std::int64_t* out) {
    std::copy(from, from + count, out);
}

#if defined(__SSE2__) && defined(__x86_64__)
// The same in full lines of the cache, for which the source is asked early: a range begins at a
// place that the processor cannot foresee.
inline void widen(const std::uint16_t* from, std::int64_t count, std::int64_t* out) {
    constexpr std::int64_t kLine = 32, kAhead = 512;  // tokens
    const __m128i zero = _mm_setzero_si128();
    while (count > 0 && reinterpret_cast<std::uintptr_t>(out) % 64) {
        *out++ = *from++;  // no store touches two lines
        --count;
    }
    for (; count >= kLine; count -= kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
        for (int eight = 0; eight < 4; ++eight, from += 8, out += 8) {
            const __m128i tokens = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
            const __m128i low = _mm_unpacklo_epi16(tokens, zero);
            const __m128i high = _mm_unpackhi_epi16(tokens, zero);
            auto* to = reinterpret_cast<__m128i*>(out);
            _mm_store_si128(to, _mm_unpacklo_epi32(low, zero));
            _mm_store_si128(to + 1, _mm_unpackhi_epi32(low, zero));
            _mm_store_si128(to + 2, _mm_unpacklo_epi32(high, zero));
            _mm_store_si128(to + 3, _mm_unpackhi_epi32(high, zero));
        }
    }
    std::copy(from, from + count, out);
}
#endif

// Asks for the beginning of the next range while this one is copied; it may lie anywhere.
inline void foresee(const void* next) {
#if defined(__SSE2__) && defined(__x86_64__)
    constexpr int kLines = 16, kBytes = 64;
    for (int line = 0; line < kLines; ++line) {
        _mm_prefetch(static_cast<const char*>(next) + line * kBytes, _MM_HINT_T0);
    }
#else
    (void)next;
#endif
}

// Fills out[begin, end), wherever in the ranges these two fall.
template <typename Token>
void copy_span(const Token* tokens, const std::vector<Range>& ranges, std::int64_t* out,
               std::int64_t begin, std::int64_t end) {
    // The last range that starts at or before `begin`; empty ranges before it have nothing to copy.
    auto range = std::upper_bound(ranges.begin(), ranges.end(), begin,
                                  [](std::int64_t at, const Range& r) { return at < r.target; }) - 1;
    for (; begin < end; ++range) {
        const std::int64_t stop = std::min(end, range[1].target);
        const std::int64_t follows = range->source + (range[1].target - range->target);
        if (range[1].source != follows) foresee(tokens + range[1].source);
        const Token* from = tokens + range->source + (begin - range->target);
        widen(from, stop - begin, out + begin);
        begin = stop;
    }
}

// Every thread writes an equal share of `out`: a single long range is shared as well as many short.
template <typename Token>
void gather(const Token* tokens, const std::vector<Range>& ranges, std::int64_t* out,
            std::int64_t threads) {
    constexpr std::int64_t kWorthAThread = 1 << 20;  // about 0.4 ms of copying
    const std::int64_t size = ranges.back().target;
    share(size, threads_worth(size, kWorthAThread, threads),
          [&](std::int64_t, std::int64_t begin, std::int64_t end) {
              copy_span(tokens, ranges, out, begin, end);
          });
}

}  // namespace megablocks
