// The order in which a blend draws from its sources: always the one furthest behind its share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace megablocks {

// How far a source is behind is weight * time - drawn, in floats as the reference has it. Counts
// are kept as floats, too, which are exact to 2^53; a source that is spent has drawn infinitely.
class Sources {
  public:
    Sources(const double* weights, std::size_t count) : weights_(weights, weights + count),
                                                        drawn_(count, 0.0) {}

    // The source that is furthest behind; of several the first.
    std::size_t furthest_behind(double time) const {
        const double *weights = weights_.data(), *drawn = drawn_.data();
        std::size_t furthest = 0;
        double most = weights[0] * time - drawn[0];
        for (std::size_t source = 1; source < weights_.size(); ++source) {
            const double behind = weights[source] * time - drawn[source];
            if (behind > most) {
                most = behind;
                furthest = source;
            }
        }
        return furthest;
    }

    // Counts a draw; returns how many there were before.
    std::int64_t draw(std::size_t source) {
        const double before = drawn_[source];
        drawn_[source] = before + 1.0;
        return static_cast<std::int64_t>(before);
    }

    void retire(std::size_t source) { drawn_[source] = std::numeric_limits<double>::infinity(); }

  private:
    std::vector<double> weights_, drawn_;
};

// `sizes` may be null: then no source is ever spent. Otherwise they add up to `size`, none is 0.
template <typename Source>
void blend(const double* weights, const std::int64_t* sizes, std::size_t count, std::int64_t size,
           Source* source, std::int64_t* index) {
    Sources sources(weights, count);
    for (std::int64_t sample = 0; sample < size; ++sample) {
        const double time = sample > 1 ? static_cast<double>(sample) : 1.0;
        const std::size_t next = sources.furthest_behind(time);
        const std::int64_t before = sources.draw(next);
        source[sample] = static_cast<Source>(next);
        index[sample] = before;
        if (sizes && before + 1 == sizes[next]) sources.retire(next);
    }
}

}  // namespace megablocks
