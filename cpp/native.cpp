// The Python module megablocks_core._native. Each function has a NumPy twin that says what it does.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "gather.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename Element>
using Vector = nb::ndarray<Element, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Token>
void gather_tokens(Vector<const Token> tokens, Vector<const std::int64_t> starts,
                   Vector<const std::int64_t> lengths, Vector<std::int64_t> out,
                   std::int64_t threads) {
    if (threads < 1) {
        throw std::invalid_argument("threads=" + std::to_string(threads) + " must be at least 1");
    }
    if (starts.size() != lengths.size()) {
        throw std::invalid_argument("starts.size=" + std::to_string(starts.size()) +
                                    " must equal lengths.size=" + std::to_string(lengths.size()));
    }
    nb::gil_scoped_release released;
    const auto ranges = megablocks::checked_ranges(
        starts.data(), lengths.data(), starts.size(), static_cast<std::int64_t>(tokens.size()),
        static_cast<std::int64_t>(out.size()));
    megablocks::gather(tokens.data(), ranges, out.data(), threads);
}

// One overload a token type. Arguments are never converted: `out` must be the caller's own array.
template <typename... Tokens>
void define_gather_tokens(nb::module_& m) {
    (m.def("gather_tokens", &gather_tokens<Tokens>, "tokens"_a.noconvert(),
           "starts"_a.noconvert(), "lengths"_a.noconvert(), nb::kw_only(), "out"_a.noconvert(),
           "threads"_a = 1),
     ...);
}

}  // namespace

NB_MODULE(_native, m) {
    define_gather_tokens<std::uint16_t, std::int32_t, std::uint8_t, std::int64_t, std::int16_t,
                         std::int8_t>(m);
}
