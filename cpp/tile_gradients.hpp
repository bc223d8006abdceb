// Gradients of SwiGLU experts in bfloat16 by products of tiles; see tile_experts.hpp.
#pragma once

#include "tile_experts.hpp"

#ifdef MEGABLOCKS_TILES

namespace megablocks {

// What backward reads besides, and what it writes; a gradient that is not wanted is null.
struct TileGradients {
    const Bits* dy;    // [N H]
    Halves<const Bits> first;  // as TileOutputs has them
    Bits* x;           // of each place [N H]
    float* weights;    // [N]
    Bits* of_gate;     // [e F H]
    Bits* of_up;       // [e F H]
    Bits* of_down;     // [e H F]
    bool adds_gate, adds_up, adds_down;
};

// Backward of all experts, by all threads together.
template <typename Unit>
class TileBackward {
  public:
    TileBackward(const TileExperts& in, TileGradients out, std::int64_t threads)
        : in_(in), out_(out), threads_(threads), padded_(blocks_of(in.most(), kBlock)),
          wide_(in.hidden / kTileColumns), deep_(in.features / kTileColumns),
          strip_tiles_(2 * std::max(wide_ * blocks_of(deep_, threads),
                                    2 * deep_ * blocks_of(wide_, threads))),
          dy_(2 * padded_ * wide_), dy_turned_(2 * padded_ * wide_), x_(2 * padded_ * wide_),
          hidden_(2 * padded_ * deep_), inner_(4 * padded_ * deep_),
          gate_turned_(2 * padded_ * deep_), up_turned_(2 * padded_ * deep_),
          strips_(threads * strip_tiles_), products_(deep_ * padded_ * kBlock) {}

    MEGABLOCKS_ON_TILES void run(std::int64_t thread, Meeting& meeting) {
        const typename Unit::On on;
        Bits* strips = strips_[thread * strip_tiles_];
        std::int64_t start = 0;
        for (std::int64_t expert = 0; expert < in_.experts; ++expert) {
            const Span own{expert, start, in_.counts[expert], blocks_of(in_.counts[expert], kBlock)};
            start += own.count;
            if (own.count == 0) {
                clear(expert, Part(in_.weight_size() / kTileColumns, thread, threads_));
                continue;
            }
            read(own, Part(own.blocks, thread, threads_));
            meeting.wait();
            const Part features(deep_, thread, threads_), columns(wide_, thread, threads_);
            inner(own, features, strips);
            meeting.wait();
            sum_products(own, Part(own.count, thread, threads_));
            if (out_.x) of_tokens(own, columns, strips);
            for (std::int64_t each = features.begin; each < features.end; ++each) {
                of_weight(own, gate_turned_, each, x_, wide_, out_.of_gate, out_.adds_gate);
                of_weight(own, up_turned_, each, x_, wide_, out_.of_up, out_.adds_up);
            }
            for (std::int64_t each = columns.begin; each < columns.end; ++each) {
                of_weight(own, dy_turned_, each, hidden_, deep_, out_.of_down, out_.adds_down);
            }
            meeting.wait();
        }
        _mm_sfence();
    }

  private:
    struct Span {
        std::int64_t expert, start, count, blocks;
    };

    MEGABLOCKS_ON_TILES void clear(std::int64_t expert, Part rows) {
        const std::int64_t at = expert * in_.weight_size() + rows.begin * kTileColumns;
        const std::size_t bytes = (rows.end - rows.begin) * kTileColumns * sizeof(Bits);
        if (out_.of_gate && !out_.adds_gate) std::memset(out_.of_gate + at, 0, bytes);
        if (out_.of_up && !out_.adds_up) std::memset(out_.of_up + at, 0, bytes);
        if (out_.of_down && !out_.adds_down) std::memset(out_.of_down + at, 0, bytes);
    }

    // Gradients of results as a left operand and turned, tokens as a right one.
    MEGABLOCKS_ON_TILES void read(Span own, Part blocks) {
        for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
            for (std::int64_t r = 0; r < kBlock; r += 2) {
                const std::int64_t n = block * kBlock + r;
                const bool one = n < own.count, two = n + 1 < own.count;
                const std::int64_t place = own.start + n;
                const Bits* x = one ? in_.x + in_.rows[place] * in_.hidden : in_.x;
                const Bits* next = two ? in_.x + in_.rows[place + 1] * in_.hidden : in_.x;
                const Bits* dy = out_.dy + place * in_.hidden;
                Bits* left = dy_[n / kTileRows * wide_] + n % kTileRows * kTileColumns;
                for (std::int64_t k = 0; k < wide_; ++k) {
                    const std::int64_t c = k * kTileColumns;
                    _mm512_store_si512(left + k * kTile, row_or_zeros(dy + c, one));
                    _mm512_store_si512(left + k * kTile + kTileColumns,
                                       row_or_zeros(dy + in_.hidden + c, two));
                    pair_rows(row_or_zeros(x + c, one), row_or_zeros(next + c, two),
                              x_[2 * (k * own.blocks + block)] + r / 2 * kTileColumns);
                }
            }
            for (std::int64_t k = 0; k < wide_; ++k) {
                turn(dy_[2 * block * wide_ + k], wide_, dy_turned_, own.blocks, k, block);
            }
        }
    }

    // A block of 32 x 32 numbers, of which two tiles of a left operand are given, turned round.
    MEGABLOCKS_ON_TILES static void turn(const Bits* upper, std::int64_t depth, Tiles& to,
                                  std::int64_t blocks, std::int64_t column, std::int64_t block) {
        const Bits* lower = upper + depth * kTile;
        alignas(64) Bits pairs[2 * kTile];
        for (std::int64_t r = 0; r < kTileRows; ++r) {
            const Bits* from = (r < 8 ? upper : lower) + 2 * (r % 8) * kTileColumns;
            pair_rows(_mm512_load_si512(from), _mm512_load_si512(from + kTileColumns),
                      pairs + r * kTileColumns);
        }
        transpose_pairs(pairs, kTileColumns, to[2 * column * blocks + block]);
        transpose_pairs(pairs + kTile, kTileColumns, to[(2 * column + 1) * blocks + block]);
    }

    // What lies between the products.
    MEGABLOCKS_ON_TILES void inner(Span own, Part part, Bits* strips) {
        const Bits* down = in_.down + own.expert * in_.weight_size() + part.begin * kBlock;
        strips_of_rows(down, in_.features, wide_, part.size(), strips, 2 * wide_ * kTile);
        MakeActivate make{*this, own, part.begin};
        rows_by_strips<Unit>(dy_[0], wide_, own.count, strips, part.size(), make);
    }

    // From sums of the gradient of the hidden activation.
    struct Activate {
        TileBackward& pass;
        Span own;
        std::int64_t column;
        const Bits* first;
        float* products;
        WideSwiGlu act;

        MEGABLOCKS_ON_TILES void pair(std::int64_t block, std::int64_t row, const float* sums) {
            const __m512i one = hidden(block * kBlock + row, sums);
            const __m512i two = hidden(block * kBlock + row + 1, sums + kBlock);
            Bits* strip = pass.hidden_[2 * (column * own.blocks + block)];
            pair_rows(one, two, strip + row / 2 * kTileColumns);
        }

        // The weighted hidden activation; gradients of gate and up are written.
        MEGABLOCKS_ON_TILES __m512i hidden(std::int64_t n, const float* sums) {
            const TileExperts& in = pass.in_;
            const bool is_there = n < own.count;
            const __m512 weight = _mm512_set1_ps(is_there ? in.weights[own.start + n] : 0.0f);
            WideGradient half[2];
            for (std::int64_t h = 0; h < 2; ++h) {
                const __m512i both = row_or_zeros(first + (h * own.count + n) * kBlock, is_there);
                half[h] = wide_gradient(widened_low(both), widened_high(both),
                                        _mm512_load_ps(sums + h * kTileRows), weight, act);
            }
            products[n] = _mm512_reduce_add_ps(_mm512_add_ps(half[0].weight, half[1].weight));
            const std::int64_t row = n % kTileRows * kTileColumns;
            Bits* to = pass.inner_[2 * (n / kTileRows) * pass.deep_ + column] + row;
            _mm512_store_si512(to, narrowed_32(half[0].gate, half[1].gate));
            _mm512_store_si512(to + pass.deep_ * kTile, narrowed_32(half[0].up, half[1].up));
            return narrowed_32(half[0].hidden, half[1].hidden);
        }

        MEGABLOCKS_ON_TILES void whole(std::int64_t block) {
            const std::int64_t deep = pass.deep_;
            const Bits* gates = pass.inner_[4 * block * deep + column];
            turn(gates, 2 * deep, pass.gate_turned_, own.blocks, column, block);
            turn(gates + deep * kTile, 2 * deep, pass.up_turned_, own.blocks, column, block);
        }
    };

    struct MakeActivate {
        TileBackward& pass;
        Span own;
        std::int64_t begin;

        MEGABLOCKS_ON_TILES Activate operator()(std::int64_t strip) {
            const std::int64_t column = begin + strip;
            return {pass, own, column,
                    pass.out_.first.of(2 * column, own.start, own.count, pass.in_.features),
                    pass.products_.data() + column * own.blocks * kBlock,
                    WideSwiGlu(pass.in_.act)};
        }
    };

    void sum_products(Span own, Part rows) {
        for (std::int64_t n = rows.begin; n < rows.end; ++n) {
            float total = 0.0f;
            for (std::int64_t column = 0; column < deep_; ++column) {
                total += products_[column * own.blocks * kBlock + n];
            }
            out_.weights[own.start + n] = total;
        }
    }

    // Gradients of tokens, from those of gate and of up.
    MEGABLOCKS_ON_TILES void of_tokens(Span own, Part part, Bits* strips) {
        const std::int64_t at = own.expert * in_.weight_size() + part.begin * kBlock;
        const std::int64_t next = 4 * deep_ * kTile;
        strips_of_rows(in_.gate + at, in_.hidden, deep_, part.size(), strips, next);
        strips_of_rows(in_.up + at, in_.hidden, deep_, part.size(), strips + next / 2, next);
        MakeWriteRows make{out_.x + own.start * in_.hidden + part.begin * kBlock, in_.hidden,
                           own.count};
        rows_by_strips<Unit>(inner_[0], 2 * deep_, own.count, strips, part.size(), make);
    }

    // 32 rows of a weight's gradient.
    MEGABLOCKS_ON_TILES void of_weight(Span own, Tiles& left, std::int64_t block, Tiles& right,
                                       std::int64_t columns, Bits* to, bool adds) {
        if (!to) return;
        const std::int64_t width = columns * kBlock, depth = own.blocks;
        WriteGradient finish{to + own.expert * in_.weight_size() + block * kBlock * width, width,
                             adds};
        products<Unit>({left[2 * block * depth], 0, right[0], 2 * depth * kTile, depth, 0, columns, -1},
                       finish);
    }

    // Adds sums to what is there, or writes them past the caches.
    struct WriteGradient {
        static constexpr std::int64_t kAhead = 3;
        Bits* to;
        std::int64_t stride;
        bool adds;

        MEGABLOCKS_ON_TILES void pair(std::int64_t block, std::int64_t row, const float* sums) {
            Bits* at = to + row * stride + block * kBlock;
            if (adds) {
                const bool wraps = (block + kAhead) * kBlock >= stride;
                const Bits* ahead = at + kAhead * kBlock + (wraps ? (kBlock - 1) * stride : 0);
                fetch(ahead);
                fetch(ahead + stride);
            }
            write(at, sums);
            write(at + stride, sums + kBlock);
        }
        MEGABLOCKS_ON_TILES void write(Bits* at, const float* sums) {
            if (adds) {
                const __m512i old = _mm512_loadu_si512(at);
                const __m512 low = _mm512_add_ps(widened_low(old), _mm512_load_ps(sums));
                const __m512 high =
                    _mm512_add_ps(widened_high(old), _mm512_load_ps(sums + kTileRows));
                _mm512_storeu_si512(at, narrowed_32(low, high));
            } else {
                store_past(at, narrowed_32(sums));
            }
        }
        MEGABLOCKS_ON_TILES void whole(std::int64_t) {}
    };

    const TileExperts in_;
    const TileGradients out_;
    const std::int64_t threads_, padded_, wide_, deep_;
    const std::int64_t strip_tiles_;  // of a thread
    // Of one expert: gradients of gate and up lie side by side as a left operand, and turned.
    Tiles dy_, dy_turned_, x_, hidden_, inner_, gate_turned_, up_turned_, strips_;
    std::vector<float> products_;
};

}  // namespace megablocks

#endif
