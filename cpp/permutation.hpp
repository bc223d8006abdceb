// The Feistel network of megablocks_core/data/permutation.py, on many places at a time.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "threads.hpp"

namespace megablocks {

struct Network {
    std::vector<std::uint64_t> keys;  // an even number of them
    int low_bits;
    std::uint64_t low;   // mask of the low half
    std::uint64_t rows;  // number of values of the high half
    std::uint64_t size;
};

// The finalizer of SplitMix64.
inline std::uint64_t mix(std::uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

// Applies the network once to `count` values. Eight of them go through the rounds together: the
// steps of one wait for each other, those of different ones do not.
inline void stir(const Network& network, std::uint64_t* values, std::size_t count) {
    constexpr std::size_t kTogether = 8;
    std::uint64_t spare[kTogether] = {};
    for (std::size_t at = 0; at < count; at += kTogether) {
        std::uint64_t* group = values + at;
        const std::size_t size = std::min(kTogether, count - at);
        if (size < kTogether) {
            std::copy_n(group, size, spare);
            group = spare;
        }
        std::uint64_t high[kTogether], low[kTogether];
        for (std::size_t i = 0; i < kTogether; ++i) {
            high[i] = group[i] >> network.low_bits;
            low[i] = group[i] & network.low;
        }
        for (std::size_t round = 0; round < network.keys.size(); round += 2) {
            const std::uint64_t even = network.keys[round], odd = network.keys[round + 1];
            for (std::size_t i = 0; i < kTogether; ++i) {
                const std::uint64_t moved = high[i] + ((mix(low[i] ^ even) >> 32) * network.rows >> 32);
                high[i] = std::min(moved, moved - network.rows);  // which wraps round when below
            }
            for (std::size_t i = 0; i < kTogether; ++i) {
                low[i] ^= mix(high[i] ^ odd) & network.low;
            }
        }
        for (std::size_t i = 0; i < size; ++i) values[at + i] = high[i] << network.low_bits | low[i];
    }
}

// Writes the element at each place; false, with `out` half written, if a place is outside.
inline bool walk(const Network& network, const std::int64_t* places, std::int64_t* out,
                    std::int64_t count, std::int64_t threads) {
    constexpr std::int64_t kWorthAThread = 1 << 14;  // about 0.3 ms
    constexpr std::int64_t kBlock = 256;             // stays in the nearest cache
    std::atomic<bool> inside{true};
    const auto work = [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        std::array<std::uint64_t, kBlock> values;
        std::array<std::int64_t, kBlock> targets;  // where in `out` each value goes
        for (; begin < end; begin += kBlock) {
            const std::int64_t size = std::min(kBlock, end - begin);
            std::uint64_t outside = 0;
            for (std::int64_t i = 0; i < size; ++i) {
                values[i] = static_cast<std::uint64_t>(places[begin + i]);
                targets[i] = begin + i;
                outside |= values[i] >= network.size;
            }
            if (outside) {
                inside = false;
                return;
            }
            // What has not landed inside the range walks on, kept together and without branches.
            for (std::int64_t left = size, next; left > 0; left = next) {
                stir(network, values.data(), static_cast<std::size_t>(left));
                next = 0;
                for (std::int64_t i = 0; i < left; ++i) {
                    const std::uint64_t value = values[i];
                    const std::int64_t target = targets[i];
                    out[target] = static_cast<std::int64_t>(value);
                    values[next] = value;
                    targets[next] = target;
                    next += value >= network.size;
                }
            }
        }
    };
    share(count, threads_worth(count, kWorthAThread, threads), work);
    return inside;
}

// The same; a small range, which has more rounds, is walked once for all of many places.
inline bool permute(const Network& network, const std::int64_t* places, std::int64_t* out,
                    std::int64_t count, std::int64_t threads) {
    constexpr std::uint64_t kSmall = 1 << 10;
    if (network.size > kSmall || count <= static_cast<std::int64_t>(network.size)) {
        return walk(network, places, out, count, threads);
    }
    std::array<std::int64_t, kSmall> order, elements;
    std::iota(order.begin(), order.end(), 0);
    walk(network, order.data(), elements.data(), static_cast<std::int64_t>(network.size), 1);
    bool inside = true;
    for (std::int64_t i = 0; i < count; ++i) {
        const auto place = static_cast<std::uint64_t>(places[i]);
        inside &= place < network.size;
        out[i] = place < network.size ? elements[place] : 0;
    }
    return inside;
}

}  // namespace megablocks
