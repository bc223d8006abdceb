// The order in which a blend draws from its sources: always the one furthest behind its share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace megablocks {

// How far a source is behind is weight * time - drawn, in floats as the reference has it. Counts
// are kept as floats, too, which are exact to 2^53; a source that is spent has drawn infinitely.
// The sources are searched in equal parts side by side, as no part waits for what another found.
template <std::size_t kParts>
class Sources {
  public:
    Sources(const double* weights, std::size_t count)
        : weights_(padded(count), 0.0),
          drawn_(padded(count), std::numeric_limits<double>::infinity()) {
        std::copy(weights, weights + count, weights_.begin());
        std::fill(drawn_.begin(), drawn_.begin() + count, 0.0);
    }

    // The source that is furthest behind; of several the first.
    std::size_t furthest_behind(double time) const {
        const double *weights = weights_.data(), *drawn = drawn_.data();
        const std::size_t length = weights_.size() / kParts;
        std::size_t furthest[kParts];
        double most[kParts];
        for (std::size_t part = 0; part < kParts; ++part) {
            furthest[part] = part * length;
            most[part] = weights[part * length] * time - drawn[part * length];
        }
        for (std::size_t place = 1; place < length; ++place) {
            for (std::size_t part = 0; part < kParts; ++part) {
                const std::size_t source = part * length + place;
                const double behind = weights[source] * time - drawn[source];
                furthest[part] = behind > most[part] ? source : furthest[part];
                most[part] = behind > most[part] ? behind : most[part];
            }
        }
        std::size_t winner = furthest[0];
        double lead = most[0];
        for (std::size_t part = 1; part < kParts; ++part) {
            winner = most[part] > lead ? furthest[part] : winner;
            lead = most[part] > lead ? most[part] : lead;
        }
        return winner;
    }

    // Counts a draw; returns how many there were before.
    std::int64_t draw(std::size_t source) {
        const double before = drawn_[source];
        drawn_[source] = before + 1.0;
        return static_cast<std::int64_t>(before);
    }

    void retire(std::size_t source) { drawn_[source] = std::numeric_limits<double>::infinity(); }

  private:
    static std::size_t padded(std::size_t count) { return (count + kParts - 1) / kParts * kParts; }

    std::vector<double> weights_, drawn_;
};

template <std::size_t kParts, typename Source>
void draw(Sources<kParts> sources, const std::int64_t* sizes, std::int64_t size, Source* source,
          std::int64_t* index) {
    for (std::int64_t sample = 0; sample < size; ++sample) {
        const double time = sample > 1 ? static_cast<double>(sample) : 1.0;
        const std::size_t next = sources.furthest_behind(time);
        const std::int64_t before = sources.draw(next);
        source[sample] = static_cast<Source>(next);
        index[sample] = before;
        if (sizes && before + 1 == sizes[next]) sources.retire(next);
    }
}

// `sizes` may be null: then no source is ever spent. Otherwise they add up to `size`, none is 0.
template <typename Source>
void blend(const double* weights, const std::int64_t* sizes, std::size_t count, std::int64_t size,
           Source* source, std::int64_t* index) {
    constexpr std::size_t kMany = 8;
    if (count < kMany) {
        draw(Sources<2>(weights, count), sizes, size, source, index);
    } else {
        draw(Sources<4>(weights, count), sizes, size, source, index);
    }
}

}  // namespace megablocks
