// The Python module megablocks_core._native. Each function has a twin, of NumPy or torch, that says
// what it does.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string_view>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "blend_order.hpp"
#include "expert_functions.hpp"
#include "gather.hpp"
#include "json_lines.hpp"
#include "packing.hpp"
#include "permutation.hpp"
#include "sample_index.hpp"
#include "selective_functions.hpp"
#include "softmax_blocks.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using megablocks::Matrix;
using megablocks::Pairs;
using megablocks::require;
using megablocks::require_threads;
using megablocks::Vector;

template <typename Token>
void gather_tokens(Vector<const Token> tokens, Vector<const std::int64_t> starts,
                   Vector<const std::int64_t> lengths, Vector<std::int64_t> out,
                   std::int64_t threads) {
    require_threads(threads);
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

bool permute(Vector<const std::int64_t> places, Vector<const std::uint64_t> keys, int low_bits,
             std::uint64_t rows, std::uint64_t size, Vector<std::int64_t> out, std::int64_t threads) {
    require_threads(threads);
    require(1 <= low_bits && low_bits <= 32, "low_bits must be between 1 and 32");
    require(rows < 1ull << 32 && 0 < size && size <= rows << low_bits,
            "size must be at least 1 and fit the rows, of which there are fewer than 2**32");
    require(keys.size() % 2 == 0, "keys must come in pairs");
    require(places.size() == out.size(), "out.size must equal places.size");
    const megablocks::Network network{{keys.data(), keys.data() + keys.size()},
                                      low_bits,
                                      (std::uint64_t{1} << low_bits) - 1,
                                      rows,
                                      size};
    nb::gil_scoped_release released;
    return megablocks::permute(network, places.data(), out.data(),
                               static_cast<std::int64_t>(places.size()), threads);
}

template <typename Document, typename Index>
void build_sample_index(Vector<const std::int32_t> lengths, Vector<const Document> document_index,
                        std::int64_t sequence_length, std::int64_t extra, std::int64_t num_tokens,
                        Pairs<Index> out, std::int64_t threads) {
    require_threads(threads);
    const auto num_samples = static_cast<std::int64_t>(out.shape(0)) - 1;
    require(0 <= num_samples && 1 <= sequence_length && (extra == 0 || extra == 1),
            "out, sequence_length and extra must be those of a sample index");
    require(num_samples == 0 || (num_tokens > extra &&
            (num_samples - 1) <= (num_tokens - extra - 1) / sequence_length),
            "out must have a row for each sample that begins in num_tokens, and one");
    const megablocks::Stream<Document> stream{
        lengths.data(), static_cast<std::int64_t>(lengths.size()), document_index.data(),
        static_cast<std::int64_t>(document_index.size())};
    const megablocks::Samples<Index> samples{sequence_length, extra, num_samples, out.data()};
    nb::gil_scoped_release released;
    megablocks::build_sample_index(stream, samples, num_tokens, threads);
}

template <typename Source>
void blend(Vector<const double> weights, nb::object sizes, Vector<Source> source,
           Vector<std::int64_t> index) {
    require(weights.size() > 0, "weights must not be empty");
    require(weights.size() - 1 <= static_cast<std::size_t>(std::numeric_limits<Source>::max()),
            "weights must not be more than source.dtype can number");
    require(source.size() == index.size(), "source.size must equal index.size");
    const auto size = static_cast<std::int64_t>(source.size());
    Vector<const std::int64_t> limits;
    if (!sizes.is_none()) {
        limits = nb::cast<Vector<const std::int64_t>>(sizes, false);
        require(limits.size() == weights.size(), "sizes.size must equal weights.size");
        std::int64_t left = size;
        for (std::size_t each = 0; each < limits.size(); ++each) {
            const std::int64_t limit = limits.data()[each];
            require(0 < limit && limit <= left, "sizes must be above 0 and add up to source.size");
            left -= limit;
        }
        require(left == 0, "sizes must be above 0 and add up to source.size");
    }
    nb::gil_scoped_release released;
    megablocks::blend(weights.data(), sizes.is_none() ? nullptr : limits.data(), weights.size(),
                      size, source.data(), index.data());
}

void first_fit(Vector<const std::int64_t> lengths, std::int64_t capacity,
               Vector<std::int64_t> bins) {
    require(lengths.size() == bins.size(), "bins.size must equal lengths.size");
    const auto count = static_cast<std::int64_t>(lengths.size());
    for (std::int64_t item = 0; item < count; ++item) {
        const std::int64_t length = lengths.data()[item];
        require(0 <= length && length <= capacity, "lengths must be 0 to capacity");
    }
    nb::gil_scoped_release released;
    megablocks::first_fit(lengths.data(), count, capacity, bins.data());
}

// Numbers as an array of NumPy, which owns them.
nb::object array_of(std::vector<std::int64_t> numbers) {
    auto* const kept = new std::vector<std::int64_t>(std::move(numbers));
    const nb::capsule owner(
        kept, [](void* them) noexcept { delete static_cast<std::vector<std::int64_t>*>(them); });
    return nb::cast(nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(kept->data(), {kept->size()},
                                                                      owner));
}

nb::tuple texts_of_lines(nb::bytes lines, nb::bytes key, std::int64_t max_bytes) {
    const std::string_view data(lines.c_str(), lines.size());
    PyObject* texts = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(data.size()));
    if (!texts) throw nb::python_error();
    char* const begin = PyBytes_AsString(texts);
    char* end = nullptr;
    megablocks::LineTexts found;
    {
        nb::gil_scoped_release released;
        end = megablocks::texts_of_lines(data, {key.c_str(), key.size()}, max_bytes, begin, found);
    }
    if (_PyBytes_Resize(&texts, end - begin)) throw nb::python_error();
    return nb::make_tuple(nb::steal<nb::bytes>(texts), array_of(std::move(found.ends)),
                          array_of(std::move(found.numbers)), array_of(std::move(found.others)),
                          found.lines);
}

template <typename Logit>
void softmax_sums(Matrix<const Logit> logits, Vector<const std::int64_t> targets,
                  Matrix<float> out, std::int64_t threads) {
    require_threads(threads);
    require(targets.size() == logits.shape(1), "targets.size must be the number of tokens");
    require((out.shape(0) == 3 || out.shape(0) == 4) && out.shape(1) == logits.shape(1),
            "out must have 3 or 4 rows of tokens");
    const auto columns = static_cast<std::int64_t>(logits.shape(0));
    const auto tokens = static_cast<std::int64_t>(logits.shape(1));
    const megablocks::Block<const Logit> block{logits.data(), columns, tokens};
    nb::gil_scoped_release released;
    megablocks::softmax_sums(block, targets.data(), tokens, out.data(), out.shape(0) == 4, threads);
}

template <typename Logit>
void softmax_gradients(Matrix<Logit> logits, Vector<const std::int64_t> targets,
                       Matrix<const float> terms, std::int64_t threads) {
    require_threads(threads);
    require(targets.size() == logits.shape(1), "targets.size must be the number of tokens");
    require(terms.shape(0) == 4 && terms.shape(1) == logits.shape(1),
            "terms must be 4 rows of tokens");
    const auto columns = static_cast<std::int64_t>(logits.shape(0));
    const auto tokens = static_cast<std::int64_t>(logits.shape(1));
    const float* top = terms.data();
    const megablocks::Terms rows{top, top + tokens, top + 2 * tokens, top + 3 * tokens};
    const megablocks::Block<Logit> block{logits.data(), columns, tokens};
    nb::gil_scoped_release released;
    megablocks::softmax_gradients(block, targets.data(), tokens, rows, threads);
}

// One overload a token type. Arguments are never converted: `out` must be the caller's own array.
template <typename... Tokens>
void define_gather_tokens(nb::module_& m) {
    (m.def("gather_tokens", &gather_tokens<Tokens>, "tokens"_a.noconvert(),
           "starts"_a.noconvert(), "lengths"_a.noconvert(), nb::kw_only(), "out"_a.noconvert(),
           "threads"_a = 1),
     ...);
}

template <typename Document, typename Index>
void define_build_sample_index(nb::module_& m) {
    m.def("build_sample_index", &build_sample_index<Document, Index>, "lengths"_a.noconvert(),
          "document_index"_a.noconvert(), nb::kw_only(), "sequence_length"_a, "extra"_a,
          "num_tokens"_a, "out"_a.noconvert(), "threads"_a = 1);
}

template <typename... Sources>
void define_blend(nb::module_& m) {
    (m.def("blend", &blend<Sources>, "weights"_a.noconvert(), "sizes"_a.none(), nb::kw_only(),
           "source"_a.noconvert(), "index"_a.noconvert()),
     ...);
}

template <typename... Logits>
void define_softmax(nb::module_& m) {
    (m.def("softmax_sums", &softmax_sums<Logits>, "logits"_a.noconvert(), "targets"_a.noconvert(),
           nb::kw_only(), "out"_a.noconvert(), "threads"_a = 1),
     ...);
    (m.def("softmax_gradients", &softmax_gradients<Logits>, "logits"_a.noconvert(),
           "targets"_a.noconvert(), nb::kw_only(), "terms"_a.noconvert(), "threads"_a = 1),
     ...);
}

}  // namespace

NB_MODULE(_native, m) {
    define_gather_tokens<std::uint16_t, std::int32_t, std::uint8_t, std::int64_t, std::int16_t,
                         std::int8_t>(m);
    define_build_sample_index<std::int32_t, std::int32_t>(m);
    define_build_sample_index<std::int32_t, std::int64_t>(m);
    define_build_sample_index<std::int64_t, std::int32_t>(m);
    define_build_sample_index<std::int64_t, std::int64_t>(m);
    define_blend<std::int16_t, std::int32_t>(m);
    m.def("permute", &permute, "places"_a.noconvert(), nb::kw_only(), "keys"_a.noconvert(),
          "low_bits"_a, "rows"_a, "size"_a, "out"_a.noconvert(), "threads"_a = 1);
    m.def("first_fit", &first_fit, "lengths"_a.noconvert(), nb::kw_only(), "capacity"_a,
          "bins"_a.noconvert());
    m.def("texts_of_lines", &texts_of_lines, "lines"_a, nb::kw_only(), "key"_a, "max_bytes"_a);
    define_softmax<float, std::int16_t>(m);
    megablocks::define_experts(m);
    megablocks::define_selective(m);
}
