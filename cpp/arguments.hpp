// What functions of the extension take, and how they refuse it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace megablocks {

template <typename Element>
using Vector = nanobind::ndarray<Element, nanobind::ndim<1>, nanobind::c_contig,
                                 nanobind::device::cpu>;
template <typename Element>
using Pairs = nanobind::ndarray<Element, nanobind::shape<-1, 2>, nanobind::c_contig,
                                nanobind::device::cpu>;
template <typename Element>
using Matrix = nanobind::ndarray<Element, nanobind::ndim<2>, nanobind::c_contig,
                                 nanobind::device::cpu>;
template <typename Element>
using Stack = nanobind::ndarray<Element, nanobind::ndim<3>, nanobind::c_contig,
                                nanobind::device::cpu>;

inline void require(bool holds, const char* rule) {
    if (!holds) throw std::invalid_argument(rule);
}

inline void require_threads(std::int64_t threads) {
    if (threads < 1) {
        throw std::invalid_argument("threads=" + std::to_string(threads) + " must be at least 1");
    }
}

}  // namespace megablocks
