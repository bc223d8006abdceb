// Numbers of two widths, and exp, in plain loops that compilers make vectors of.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// The build says whether functions may be compiled for several processors: plain loops, and the
// loader picks what the machine has.
#ifdef MEGABLOCKS_CLONES
#define MEGABLOCKS_FOR_EACH_MACHINE \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define MEGABLOCKS_INSIDE inline __attribute__((always_inline))
#else
#define MEGABLOCKS_FOR_EACH_MACHINE
#define MEGABLOCKS_INSIDE inline
#endif

namespace megablocks {

template <typename To, typename From>
MEGABLOCKS_INSIDE To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// A number is a float, or the bits of a bfloat16.
MEGABLOCKS_INSIDE float widened(float x) { return x; }
MEGABLOCKS_INSIDE float widened(std::int16_t x) {
    return same_bits<float>(static_cast<std::uint32_t>(static_cast<std::uint16_t>(x)) << 16);
}

template <typename Number>
MEGABLOCKS_INSIDE Number narrowed(float x) {
    if constexpr (std::is_same_v<Number, float>) {
        return x;
    } else {  // to nearest even; what is no number stays none
        const auto bits = same_bits<std::uint32_t>(x);
        const std::uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return static_cast<std::int16_t>(x == x ? nearest : bits >> 16 | 0x40);
    }
}

// exp(x) of numbers not above 0, within a unit of the last place; zero where it were denormal.
// As 2**k exp(r), |r| <= log(2) / 2, with the polynomial of expf in Cephes (S. Moshier).
MEGABLOCKS_INSIDE float exp_of(float x) {
    constexpr float kLeast = -87.0f, kRounds = 12582912.0f;  // 1.5 * 2**23: sums are integers
    const float y = x < kLeast ? kLeast : x;
    const float shifted = y * 1.44269504088896341f + kRounds;
    const float k = shifted - kRounds;
    const float r = (y - k * 0.693359375f) - k * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    const float power = same_bits<float>((same_bits<std::uint32_t>(shifted) + 127) << 23);
    return x < kLeast ? 0.0f : p * power;
}

}  // namespace megablocks
