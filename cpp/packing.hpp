// First fit: each item goes into the first bin with room for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace megablocks {

// A tree over all bins there may be: a node knows the most room of any bin below it, so that the
// first bin with room for an item is found in log(bins) steps.
class Rooms {
  public:
    Rooms(std::int64_t bins, std::int64_t capacity) {
        while (leaves_ < bins) leaves_ *= 2;
        most_.assign(static_cast<std::size_t>(2 * leaves_), capacity);
    }

    // Takes `length` from the first bin with room for it and returns that bin.
    std::int64_t take(std::int64_t length) {
        std::int64_t node = 1;
        while (node < leaves_) {
            node *= 2;
            if (most_[node] < length) ++node;
        }
        const std::int64_t bin = node - leaves_;
        most_[node] -= length;
        while (node > 1) {
            node /= 2;
            most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
        }
        return bin;
    }

  private:
    std::int64_t leaves_ = 1;
    std::vector<std::int64_t> most_;
};

// Writes the bin of each item, taken in the given order; no length is above the capacity.
inline void first_fit(const std::int64_t* lengths, std::int64_t count, std::int64_t capacity,
                      std::int64_t* bins) {
    Rooms rooms(count, capacity);
    for (std::int64_t item = 0; item < count; ++item) bins[item] = rooms.take(lengths[item]);
}

}  // namespace megablocks
