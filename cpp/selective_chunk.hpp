// The selective scan over one chunk of tokens, and its gradients: a tile of channels at a time,
// whose states the nearest caches hold. A channel's numbers come from its own alone, and sums over
// channels are taken tile by tile: the same bits on any number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "floats.hpp"
#include "threads.hpp"

namespace megablocks {

constexpr std::int64_t kChannels = 64;  // of a tile
constexpr std::int64_t kLanes = 16;     // sums over a tile's channels

struct ChunkSizes {
    std::int64_t tokens;
    std::int64_t channels;
    std::int64_t states;

    std::int64_t tiles() const { return (channels + kChannels - 1) / kChannels; }
};

// x and dt [Q D], B and C [Q N], A and the state before [D N].
template <typename Number>
struct ChunkInputs {
    const Number* x;
    const Number* dt;
    const Number* B;
    const Number* C;
    const Number* A;
    const Number* state;
};

// Of the outputs [Q D], which may be none, and of the state behind [D N]; where to write the
// others, and where to add those of A.
template <typename Number>
struct ChunkGradients {
    const Number* y;
    const Number* behind;
    Number* x;
    Number* dt;
    Number* B;
    Number* C;
    Number* A;
    Number* state;
};

MEGABLOCKS_INSIDE float decay_of(float x) {
    return x > 88.3f ? std::numeric_limits<float>::infinity() : exp_of(x);
}
MEGABLOCKS_INSIDE double decay_of(double x) { return std::exp(x); }

// A tile's part of rows [Q D], or of [D N] turned round; zeros stand for channels beyond the last.
template <typename Number>
struct Tile {
    std::int64_t first, width;

    Tile(std::int64_t tile, std::int64_t channels)
        : first(tile * kChannels), width(std::min(kChannels, channels - first)) {}

    void row(const Number* from, Number* to) const {
        std::fill(std::copy_n(from + first, width, to), to + kChannels, Number{});
    }
    void turned(const Number* from, std::int64_t states, Number* to) const {
        std::fill_n(to, states * kChannels, Number{});
        for (std::int64_t d = 0; d < width; ++d) {
            for (std::int64_t n = 0; n < states; ++n) {
                to[n * kChannels + d] = from[(first + d) * states + n];
            }
        }
    }
    template <typename Write>
    void back(const Number* from, std::int64_t states, const Write& write) const {
        for (std::int64_t d = 0; d < width; ++d) {
            for (std::int64_t n = 0; n < states; ++n) {
                write((first + d) * states + n, from[n * kChannels + d]);
            }
        }
    }
};

// One token: `states` [N d] from those before, decays, and y [d].
template <typename Number>
MEGABLOCKS_FOR_EACH_MACHINE void step_tile(const Number* __restrict x, const Number* __restrict dt,
                                           const Number* __restrict B, const Number* __restrict C,
                                           const Number* __restrict A, std::int64_t states,
                                           const Number* before, Number* behind,
                                           Number* __restrict decays, Number* __restrict y) {
    Number added[kChannels];
    for (std::int64_t d = 0; d < kChannels; ++d) added[d] = dt[d] * x[d];
    std::fill_n(y, kChannels, Number{});
    for (std::int64_t n = 0; n < states; ++n) {
        const std::int64_t at = n * kChannels;
        const Number b = B[n], c = C[n];
        Number s[kChannels];
        for (std::int64_t d = 0; d < kChannels; ++d) {
            const Number decay = decay_of(dt[d] * A[at + d]);
            decays[at + d] = decay;
            s[d] = decay * before[at + d] + added[d] * b;
            y[d] += s[d] * c;
        }
        std::copy_n(s, kChannels, behind + at);
    }
}

template <typename Number>
MEGABLOCKS_INSIDE Number lanes_sum(const Number* values) {
    Number sums[kLanes] = {};
    for (std::int64_t from = 0; from < kChannels; from += kLanes) {
        for (std::int64_t i = 0; i < kLanes; ++i) sums[i] += values[from + i];
    }
    for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
}

// One token back: `grads` [N d], of the states behind, become those of the states before.
template <typename Number>
MEGABLOCKS_FOR_EACH_MACHINE void step_tile_back(
    const Number* __restrict x, const Number* __restrict dt, const Number* __restrict B,
    const Number* __restrict C, const Number* __restrict A, const Number* __restrict dy,
    std::int64_t states, const Number* __restrict before, const Number* __restrict behind,
    const Number* __restrict decays, Number* __restrict grads, Number* __restrict dA,
    Number* __restrict dx, Number* __restrict ddt, Number* __restrict dB, Number* __restrict dC) {
    Number added[kChannels], written[kChannels] = {}, decayed[kChannels] = {};
    for (std::int64_t d = 0; d < kChannels; ++d) added[d] = dt[d] * x[d];
    for (std::int64_t n = 0; n < states; ++n) {
        const std::int64_t at = n * kChannels;
        const Number b = B[n], c = C[n];
        Number of_B[kChannels], of_C[kChannels];
        for (std::int64_t d = 0; d < kChannels; ++d) {
            const Number grad = grads[at + d] + c * dy[d];
            of_B[d] = grad * added[d];
            of_C[d] = behind[at + d] * dy[d];
            written[d] += grad * b;
            const Number passed = grad * decays[at + d];
            const Number of_log = passed * before[at + d];
            grads[at + d] = passed;
            decayed[d] += of_log * A[at + d];
            dA[at + d] += of_log * dt[d];
        }
        dB[n] = lanes_sum(of_B);
        dC[n] = lanes_sum(of_C);
    }
    for (std::int64_t d = 0; d < kChannels; ++d) {
        dx[d] = written[d] * dt[d];
        ddt[d] = written[d] * x[d] + decayed[d];
    }
}

constexpr std::int64_t kChunkWorthAThread = 1 << 17;

inline std::int64_t chunk_threads(ChunkSizes sizes, std::int64_t threads) {
    const std::int64_t work = sizes.tokens * sizes.channels * sizes.states;
    return threads_worth(work, kChunkWorthAThread, std::min(threads, sizes.tiles()));
}

// Writes y [Q D], if it is wanted, and the state behind [D N].
template <typename Number>
void selective_chunk(ChunkInputs<Number> in, ChunkSizes sizes, Number* y, Number* behind,
                     std::int64_t threads) {
    const std::int64_t D = sizes.channels, N = sizes.states;
    const auto tile_forward = [&](std::int64_t index, std::vector<Number>& room) {
        const Tile<Number> tile(index, D);
        room.resize(3 * N * kChannels);
        Number *A = room.data(), *state = A + N * kChannels, *decays = state + N * kChannels;
        Number x[kChannels], dt[kChannels], out[kChannels];
        tile.turned(in.A, N, A);
        tile.turned(in.state, N, state);
        for (std::int64_t t = 0; t < sizes.tokens; ++t) {
            tile.row(in.x + t * D, x);
            tile.row(in.dt + t * D, dt);
            step_tile(x, dt, in.B + t * N, in.C + t * N, A, N, state, state, decays, out);
            if (y) std::copy_n(out, tile.width, y + t * D + tile.first);
        }
        tile.back(state, N, [&](std::int64_t at, Number value) { behind[at] = value; });
    };
    share(sizes.tiles(), chunk_threads(sizes, threads),
          [&](std::int64_t, std::int64_t begin, std::int64_t end) {
              std::vector<Number> room;
              for (std::int64_t index = begin; index < end; ++index) tile_forward(index, room);
          });
}

template <typename Number>
void selective_chunk_gradients(ChunkInputs<Number> in, ChunkSizes sizes,
                               ChunkGradients<Number> out, std::int64_t threads) {
    const std::int64_t Q = sizes.tokens, D = sizes.channels, N = sizes.states;
    const std::int64_t each = N * kChannels;
    std::vector<Number> sums(2 * sizes.tiles() * Q * N);  // of B and C, of every tile
    const auto tile_gradients = [&](std::int64_t index, std::vector<Number>& room) {
        const Tile<Number> tile(index, D);
        room.resize((2 * Q + 4) * each);
        Number *A = room.data(), *dA = A + each, *grads = dA + each, *decays = grads + each;
        Number* states = decays + Q * each;
        Number *dB = sums.data() + index * Q * N, *dC = dB + sizes.tiles() * Q * N;
        Number x[kChannels], dt[kChannels], dy[kChannels] = {}, dx[kChannels], ddt[kChannels];
        tile.turned(in.A, N, A);
        tile.turned(in.state, N, states);
        tile.turned(out.behind, N, grads);
        std::fill_n(dA, each, Number{});
        for (std::int64_t t = 0; t < Q; ++t) {
            tile.row(in.x + t * D, x);
            tile.row(in.dt + t * D, dt);
            step_tile(x, dt, in.B + t * N, in.C + t * N, A, N, states + t * each,
                      states + (t + 1) * each, decays + t * each, dx);
        }
        for (std::int64_t t = Q - 1; t >= 0; --t) {
            tile.row(in.x + t * D, x);
            tile.row(in.dt + t * D, dt);
            if (out.y) tile.row(out.y + t * D, dy);
            step_tile_back(x, dt, in.B + t * N, in.C + t * N, A, dy, N, states + t * each,
                           states + (t + 1) * each, decays + t * each, grads, dA, dx, ddt,
                           dB + t * N, dC + t * N);
            std::copy_n(dx, tile.width, out.x + t * D + tile.first);
            std::copy_n(ddt, tile.width, out.dt + t * D + tile.first);
        }
        tile.back(grads, N, [&](std::int64_t at, Number value) { out.state[at] = value; });
        tile.back(dA, N, [&](std::int64_t at, Number value) { out.A[at] += value; });
    };
    share(sizes.tiles(), chunk_threads(sizes, threads),
          [&](std::int64_t, std::int64_t begin, std::int64_t end) {
              std::vector<Number> room;
              for (std::int64_t index = begin; index < end; ++index) tile_gradients(index, room);
          });
    const std::int64_t count = Q * N;
    std::fill_n(out.B, count, Number{});
    std::fill_n(out.C, count, Number{});
    for (std::int64_t index = 0; index < sizes.tiles(); ++index) {
        const Number* dB = sums.data() + index * count;
        const Number* dC = dB + sizes.tiles() * count;
        for (std::int64_t i = 0; i < count; ++i) out.B[i] += dB[i];
        for (std::int64_t i = 0; i < count; ++i) out.C[i] += dC[i];
    }
}

}  // namespace megablocks
