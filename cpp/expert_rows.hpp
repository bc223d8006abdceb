// The hidden activations of experts and their gradients, a pass over the rows each. A row's
// numbers come from its own alone, in their order: the same bits on any number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "floats.hpp"
#include "threads.hpp"

namespace megablocks {

// (up + shift) * gate * sigmoid(alpha * gate), with gate at most limit and up within it.
struct SwiGlu {
    float alpha;
    float limit;
    float shift;
};

template <typename Number>
struct HiddenRows {
    const Number* gate;
    const Number* up;
    const float* weights;  // of the rows, or none
    std::int64_t features;
};

template <typename Number>
struct HiddenGradients {
    const Number* of_hidden;
    Number* hidden;
    Number* gate;
    Number* up;
    float* weights;  // of the rows, or none
};

MEGABLOCKS_INSIDE float sigmoid_of(float x) {
    const float e = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

MEGABLOCKS_INSIDE float swiglu_of(float gate, float up, SwiGlu act) {
    const float g = gate > act.limit ? act.limit : gate;
    const float above = up > act.limit ? act.limit : up;
    const float u = above < -act.limit ? -act.limit : above;
    return (u + act.shift) * (g * sigmoid_of(act.alpha * g));
}

// What comes of the gradient of one weighted hidden activation.
struct SwiGluGradient {
    float hidden;  // weighted
    float gate;
    float up;
    float weight;  // a term of its sum
};

MEGABLOCKS_INSIDE SwiGluGradient swiglu_gradient(float gate, float up, float of_hidden,
                                                 float weight, SwiGlu act) {
    const float g = gate > act.limit ? act.limit : gate;
    const float above = up > act.limit ? act.limit : up;
    const float u = (above < -act.limit ? -act.limit : above) + act.shift;
    const float s = sigmoid_of(act.alpha * g), gated = g * s;
    const float h = u * gated, weighted = of_hidden * weight;
    const float slope = s * (1.0f + act.alpha * g * (1.0f - s));
    return {h * weight, gate > act.limit ? 0.0f : weighted * u * slope,
            std::fabs(up) > act.limit ? 0.0f : weighted * gated, of_hidden * h};
}

template <typename Number>
MEGABLOCKS_FOR_EACH_MACHINE void hidden_row(const Number* __restrict gate,
                                            const Number* __restrict up, float weight, SwiGlu act,
                                            std::int64_t features, Number* __restrict out) {
    for (std::int64_t i = 0; i < features; ++i) {
        out[i] = narrowed<Number>(swiglu_of(widened(gate[i]), widened(up[i]), act) * weight);
    }
}

// Products of hidden activations and their gradients lie in `products` afterwards.
template <typename Number>
MEGABLOCKS_FOR_EACH_MACHINE void gradient_row(const Number* __restrict gate,
                                              const Number* __restrict up,
                                              const Number* __restrict of_hidden, float weight,
                                              SwiGlu act, std::int64_t features,
                                              Number* __restrict hidden,
                                              Number* __restrict of_gate,
                                              Number* __restrict of_up,
                                              float* __restrict products) {
    for (std::int64_t i = 0; i < features; ++i) {
        const auto each = swiglu_gradient(widened(gate[i]), widened(up[i]), widened(of_hidden[i]),
                                          weight, act);
        products[i] = each.weight;
        hidden[i] = narrowed<Number>(each.hidden);
        of_gate[i] = narrowed<Number>(each.gate);
        of_up[i] = narrowed<Number>(each.up);
    }
}

// In as many sums as a vector has places, so that their order is that of the loop.
MEGABLOCKS_FOR_EACH_MACHINE inline float sum_of(const float* values, std::int64_t size) {
    constexpr std::int64_t kSums = 16;
    float sums[kSums] = {};
    std::int64_t i = 0;
    for (; i + kSums <= size; i += kSums) {
        for (std::int64_t each = 0; each < kSums; ++each) sums[each] += values[i + each];
    }
    for (; i < size; ++i) sums[i % kSums] += values[i];
    float total = 0.0f;
    for (const float sum : sums) total += sum;
    return total;
}

constexpr std::int64_t kHiddenWorthAThread = 1 << 17;

// Writes the first `rows` rows of out; the others, up to `padded`, become zeros.
template <typename Number>
void hidden_rows(HiddenRows<Number> in, SwiGlu act, std::int64_t rows, std::int64_t padded,
                 Number* out, std::int64_t threads) {
    const std::int64_t features = in.features;
    threads = threads_worth(rows * features, kHiddenWorthAThread, threads);
    share(rows, threads, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        for (std::int64_t n = begin; n < end; ++n) {
            const std::int64_t at = n * features;
            hidden_row(in.gate + at, in.up + at, in.weights ? in.weights[n] : 1.0f, act, features,
                       out + at);
        }
    });
    std::fill(out + rows * features, out + padded * features, Number{});
}

template <typename Number>
void hidden_gradients(HiddenRows<Number> in, SwiGlu act, std::int64_t rows, std::int64_t padded,
                      HiddenGradients<Number> out, std::int64_t threads) {
    const std::int64_t features = in.features;
    threads = threads_worth(rows * features, kHiddenWorthAThread, threads);
    share(rows, threads, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        std::vector<float> products(features);
        for (std::int64_t n = begin; n < end; ++n) {
            const std::int64_t at = n * features;
            gradient_row(in.gate + at, in.up + at, out.of_hidden + at,
                         in.weights ? in.weights[n] : 1.0f, act, features, out.hidden + at,
                         out.gate + at, out.up + at, products.data());
            if (out.weights) out.weights[n] = sum_of(products.data(), features);
        }
    });
    for (Number* each : {out.hidden, out.gate, out.up}) {
        std::fill(each + rows * features, each + padded * features, Number{});
    }
}

}  // namespace megablocks
