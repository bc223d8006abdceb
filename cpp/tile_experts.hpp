// SwiGLU experts in bfloat16 by products of tiles. All threads take the same expert at a time and
// share its rows or its columns. What a thread reads of a weight it packs into a strip right
// before, so that the strip is in its nearest cache. A number comes from one thread, and its sum
// runs over tiles in their order: the same bits on any number of threads.
//
// An expert has n rows, H numbers in a token and F features, both multiples of 32.
#pragma once

#include "threads.hpp"
#include "tile_swiglu.hpp"

#ifdef MEGABLOCKS_TILES

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

namespace megablocks {

// What both passes read. Experts' places lie one after the other, `counts` of each.
struct TileExperts {
    const Bits* gate;  // [e F H]
    const Bits* up;    // [e F H]
    const Bits* down;  // [e H F]
    const Bits* x;     // [M H]
    const std::int64_t* rows;    // which of x each place reads
    const float* weights;        // of the places
    const std::int64_t* counts;  // [e]
    std::int64_t experts, hidden, features;
    SwiGlu act;

    std::int64_t most() const { return *std::max_element(counts, counts + experts); }
    std::int64_t weight_size() const { return hidden * features; }
};

constexpr std::int64_t blocks_of(std::int64_t rows, std::int64_t each) {
    return (rows + each - 1) / each;
}

// Memory of whole tiles.
class Tiles {
  public:
    explicit Tiles(std::int64_t count)
        : held_(new (std::align_val_t{64}) Bits[static_cast<std::size_t>(count * kTile)]) {}
    Bits* operator[](std::int64_t tile) { return held_.get() + tile * kTile; }

  private:
    struct Free {
        void operator()(Bits* held) const { ::operator delete[](held, std::align_val_t{64}); }
    };
    std::unique_ptr<Bits[], Free> held_;
};

// The part of [0, size) that a thread has.
struct Part {
    std::int64_t begin, end;
    Part(std::int64_t size, std::int64_t thread, std::int64_t threads)
        : begin(size * thread / threads), end(size * (thread + 1) / threads) {}
    std::int64_t size() const { return end - begin; }
};

// A row of 32 numbers, or zeros behind the last one.
MEGABLOCKS_ON_TILES inline __m512i row_or_zeros(const Bits* row, bool is_there) {
    return is_there ? _mm512_loadu_si512(row) : _mm512_setzero_si512();
}

// Writes sums as rows of numbers, those that are filled.
struct WriteRows {
    Bits* to;
    std::int64_t stride, count;

    MEGABLOCKS_ON_TILES void pair(std::int64_t block, std::int64_t row, const float* sums) {
        for (std::int64_t r = row; r < row + 2; ++r, sums += kBlock) {
            const std::int64_t n = block * kBlock + r;
            if (n < count) _mm512_storeu_si512(to + n * stride, narrowed_32(sums));
        }
    }
    MEGABLOCKS_ON_TILES void whole(std::int64_t) {}
};

struct MakeWriteRows {
    Bits* to;
    std::int64_t stride, count;
    MEGABLOCKS_ON_TILES WriteRows operator()(std::int64_t strip) {
        return {to + strip * kBlock, stride, count};
    }
};

// Calls make(strip, operands) for each strip and all rows of a left operand, so many rows at a time
// that they stay in a core's cache while strips pass by.
template <typename Unit, typename Make>
MEGABLOCKS_ON_TILES inline void rows_by_strips(const Bits* left, std::int64_t depth,
                                               std::int64_t rows, const Bits* strips,
                                               std::int64_t count, Make& make) {
    constexpr std::int64_t kNearTiles = 1024;
    const std::int64_t blocks = blocks_of(rows, kBlock);
    const std::int64_t together = std::max(std::int64_t{1}, kNearTiles / (2 * depth));
    const std::int64_t half = (rows - 1) % kBlock < kTileRows ? blocks - 1 : -1;
    for (std::int64_t begin = 0; begin < blocks; begin += together) {
        const std::int64_t end = std::min(begin + together, blocks);
        for (std::int64_t strip = 0; strip < count; ++strip) {
            auto finish = make(strip);
            products<Unit>({left, 2 * depth * kTile, strips + strip * 2 * depth * kTile, 0, depth, begin,
                            end, half}, finish);
        }
    }
}

// Outputs of gate and up as backward reads them: for each expert and each 16 features its rows with
// those of the gate and then those of up. Features lie in two halves, as glibc gives memory of more
// than 32 MiB back when it is freed, and Linux clears it again.
template <typename Number>
struct Halves {
    Number* lower;  // N rows of `width_of` numbers each
    Number* upper;

    // So many numbers each row of a half has.
    static std::int64_t width_of(std::int64_t features, bool is_upper) {
        return 2 * kBlock * ((features / kBlock + !is_upper) / 2);
    }

    // Those of 16 features of an expert's rows.
    Number* of(std::int64_t sixteen, std::int64_t start, std::int64_t count,
               std::int64_t features) const {
        const std::int64_t split = width_of(features, false) / kBlock;
        const bool is_upper = sixteen >= split;
        return (is_upper ? upper : lower) + start * width_of(features, is_upper) +
               (is_upper ? sixteen - split : sixteen) * kBlock * count;
    }
};

struct TileOutputs {
    Halves<Bits> first;
    Bits* y;  // [N H]
};

// Forward of all experts, by all threads together.
template <typename Unit>
class TileForward {
  public:
    TileForward(const TileExperts& in, TileOutputs out, std::int64_t threads)
        : in_(in), out_(out), threads_(threads), wide_(in.hidden / kTileColumns),
          deep_(in.features / kTileColumns),
          strip_tiles_(2 * std::max(wide_ * blocks_of(2 * deep_, threads),
                                    deep_ * blocks_of(wide_, threads))),
          x_(blocks_of(in.most(), kTileRows) * wide_),
          hidden_(blocks_of(in.most(), kTileRows) * deep_), strips_(threads * strip_tiles_) {}

    MEGABLOCKS_ON_TILES void run(std::int64_t thread, Meeting& meeting) {
        const typename Unit::On on;
        Bits* strips = strips_[thread * strip_tiles_];
        std::int64_t start = 0;
        for (std::int64_t expert = 0; expert < in_.experts; ++expert) {
            const std::int64_t count = in_.counts[expert];
            if (count == 0) continue;
            gather(start, count, Part(blocks_of(count, kTileRows), thread, threads_));
            meeting.wait();
            const Span own{expert, start, count};
            first(own, Part(in_.features / kTileRows, thread, threads_), strips);
            meeting.wait();
            second(own, Part(in_.hidden / kBlock, thread, threads_), strips);
            start += count;
        }
    }

  private:
    struct Span {
        std::int64_t expert, start, count;
    };

    // Tokens as a left operand.
    MEGABLOCKS_ON_TILES void gather(std::int64_t start, std::int64_t count, Part blocks) {
        const std::int64_t depth = wide_;
        for (std::int64_t n = blocks.begin * kTileRows; n < blocks.end * kTileRows; ++n) {
            const bool is_there = n < count;
            const Bits* row = is_there ? in_.x + in_.rows[start + n] * in_.hidden : in_.x;
            Bits* to = x_[n / kTileRows * depth] + n % kTileRows * kTileColumns;
            for (std::int64_t k = 0; k < depth; ++k) {
                _mm512_store_si512(to + k * kTile,
                                   row_or_zeros(row + k * kTileColumns, is_there));
            }
        }
    }

    // Gate and up, of which a strip has 16 features each, and the hidden activation.
    MEGABLOCKS_ON_TILES void first(Span own, Part part, Bits* strips) {
        const std::int64_t depth = wide_;
        for (std::int64_t each = part.begin; each < part.end; ++each) {
            const std::int64_t at = own.expert * in_.weight_size() + each * kTileRows * in_.hidden;
            strip_of_columns(in_.gate + at, in_.up + at, depth, kTileRows * in_.hidden,
                             strips + (each - part.begin) * 2 * depth * kTile);
        }
        MakeActivate make{*this, own, part.begin};
        rows_by_strips<Unit>(x_[0], depth, own.count, strips, part.size(), make);
    }

    // From sums of 16 features of gate and of up.
    struct Activate {
        Bits* both;
        const float* weights;
        Bits* hidden;
        std::int64_t next, count;
        WideSwiGlu act;

        MEGABLOCKS_ON_TILES void pair(std::int64_t block, std::int64_t row, const float* sums) {
            for (std::int64_t r = row; r < row + 2; ++r, sums += kBlock) {
                const std::int64_t n = block * kBlock + r;
                if (n >= count) return;
                const __m512i bits = narrowed_32(sums);
                store_past(both + n * kBlock, bits);
                const __m512 value = wide_swiglu(widened_low(bits), widened_high(bits), act);
                store_16(hidden + n / kTileRows * next + n % kTileRows * kTileColumns,
                         narrowed_16(_mm512_mul_ps(value, _mm512_set1_ps(weights[n]))));
            }
        }
        MEGABLOCKS_ON_TILES void whole(std::int64_t) {}
    };

    struct MakeActivate {
        TileForward& pass;
        Span own;
        std::int64_t begin;

        MEGABLOCKS_ON_TILES Activate operator()(std::int64_t strip) {
            const TileExperts& in = pass.in_;
            const std::int64_t sixteen = begin + strip;
            return {pass.out_.first.of(sixteen, own.start, own.count, in.features),
                    in.weights + own.start, pass.hidden_[sixteen / 2] + sixteen % 2 * kTileRows,
                    in.features * kTileRows, own.count, WideSwiGlu(in.act)};
        }
    };

    // Results.
    MEGABLOCKS_ON_TILES void second(Span own, Part part, Bits* strips) {
        const std::int64_t depth = deep_;
        const Bits* down = in_.down + own.expert * in_.weight_size();
        for (std::int64_t each = part.begin; each < part.end; ++each) {
            const Bits* rows = down + each * kBlock * in_.features;
            strip_of_columns(rows, rows + kTileRows * in_.features, depth,
                             kBlock * in_.features,
                             strips + (each - part.begin) * 2 * depth * kTile);
        }
        MakeWriteRows make{out_.y + own.start * in_.hidden + part.begin * kBlock, in_.hidden,
                           own.count};
        rows_by_strips<Unit>(hidden_[0], depth, own.count, strips, part.size(), make);
    }

    const TileExperts in_;
    const TileOutputs out_;
    const std::int64_t threads_, wide_, deep_;
    const std::int64_t strip_tiles_;  // of a thread
    Tiles x_, hidden_, strips_;
};

}  // namespace megablocks

#endif
