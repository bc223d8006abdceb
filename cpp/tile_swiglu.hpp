// The activation of SwiGLU experts and its gradient, 16 numbers at a time; what expert_rows.hpp
// computes, but for the last bits of a float32, which bfloat16 does not keep.
#pragma once

#include "expert_rows.hpp"
#include "tiles.hpp"

#ifdef MEGABLOCKS_TILES

namespace megablocks {

// SwiGlu's numbers in each place of a vector.
struct WideSwiGlu {
    __m512 alpha, limit, least, shift;

    MEGABLOCKS_ON_TILES explicit WideSwiGlu(SwiGlu act)
        : alpha(_mm512_set1_ps(act.alpha)), limit(_mm512_set1_ps(act.limit)),
          least(_mm512_set1_ps(-act.limit)), shift(_mm512_set1_ps(act.shift)) {}
};

// 1 / (1 + exp(-x)), within two units of the last place, with exp as in floats.hpp; zero where it
// were below 1e-37. Of minima and maxima the second argument stays if either is no number.
MEGABLOCKS_ON_TILES MEGABLOCKS_INSIDE __m512 wide_sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), most = _mm512_set1_ps(85.0f);
    const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), x);
    const __m512 y = _mm512_min_ps(most, minus);
    const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504088896341f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693359375f), y);
    r = _mm512_fnmadd_ps(k, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), one);
    const __m512 below = _mm512_add_ps(one, _mm512_scalef_ps(p, k));
    const __m512 about = _mm512_rcp14_ps(below);  // and a step of Newton's
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(minus, most, _CMP_NGT_UQ), about,
                               _mm512_fnmadd_ps(below, about, _mm512_set1_ps(2.0f)));
}

MEGABLOCKS_ON_TILES MEGABLOCKS_INSIDE __m512 wide_up(__m512 up, const WideSwiGlu& act) {
    return _mm512_add_ps(_mm512_max_ps(act.least, _mm512_min_ps(act.limit, up)), act.shift);
}

// swiglu_of.
MEGABLOCKS_ON_TILES MEGABLOCKS_INSIDE __m512 wide_swiglu(__m512 gate, __m512 up, const WideSwiGlu& act) {
    const __m512 g = _mm512_min_ps(act.limit, gate);
    const __m512 gated = _mm512_mul_ps(g, wide_sigmoid(_mm512_mul_ps(act.alpha, g)));
    return _mm512_mul_ps(wide_up(up, act), gated);
}

// As SwiGluGradient.
struct WideGradient {
    __m512 hidden, gate, up, weight;
};

// swiglu_gradient.
MEGABLOCKS_ON_TILES MEGABLOCKS_INSIDE WideGradient wide_gradient(__m512 gate, __m512 up, __m512 of_hidden,
                                                      __m512 weight, const WideSwiGlu& act) {
    const __m512 g = _mm512_min_ps(act.limit, gate), u = wide_up(up, act);
    const __m512 steep = _mm512_mul_ps(act.alpha, g), s = wide_sigmoid(steep);
    const __m512 gated = _mm512_mul_ps(g, s), h = _mm512_mul_ps(u, gated);
    const __m512 weighted = _mm512_mul_ps(of_hidden, weight);
    const __m512 slope = _mm512_fmadd_ps(_mm512_fnmadd_ps(steep, s, steep), s, s);
    const auto in_gate = _mm512_cmp_ps_mask(gate, act.limit, _CMP_NGT_UQ);
    const auto in_up = _mm512_cmp_ps_mask(_mm512_abs_ps(up), act.limit, _CMP_NGT_UQ);
    return {_mm512_mul_ps(h, weight),
            _mm512_maskz_mul_ps(in_gate, _mm512_mul_ps(weighted, u), slope),
            _mm512_maskz_mul_ps(in_up, weighted, gated), _mm512_mul_ps(of_hidden, h)};
}

}  // namespace megablocks

#endif
