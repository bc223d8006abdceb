// The functions of the selective scan in the Python module megablocks_core._native; see native.cpp.

#include "selective_functions.hpp"

#include <nanobind/stl/optional.h>

#include <optional>

#include "selective_chunk.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace megablocks {

namespace {

template <typename Element>
void require_shape(const Matrix<Element>& matrix, std::int64_t rows, std::int64_t columns,
                   const char* rule) {
    require(static_cast<std::int64_t>(matrix.shape(0)) == rows &&
                static_cast<std::int64_t>(matrix.shape(1)) == columns,
            rule);
}

// x, dt [Q D], B, C [Q N], A, state [D N].
template <typename Number>
struct Given {
    Matrix<const Number> x, dt, B, C, A, state;

    ChunkSizes sizes() const {
        const auto tokens = static_cast<std::int64_t>(x.shape(0));
        const auto channels = static_cast<std::int64_t>(A.shape(0));
        const auto states = static_cast<std::int64_t>(A.shape(1));
        require_shape(x, tokens, channels, "x must have the channels of A");
        require_shape(dt, tokens, channels, "dt must be of the shape of x");
        require_shape(B, tokens, states, "B must have the tokens of x and the states of A");
        require_shape(C, tokens, states, "C must be of the shape of B");
        require_shape(state, channels, states, "state must be of the shape of A");
        return {tokens, channels, states};
    }
    ChunkInputs<Number> inputs() const {
        return {x.data(), dt.data(), B.data(), C.data(), A.data(), state.data()};
    }
};

template <typename Number>
void chunk(Matrix<const Number> x, Matrix<const Number> dt, Matrix<const Number> B,
           Matrix<const Number> C, Matrix<const Number> A, Matrix<const Number> state,
           std::optional<Matrix<Number>> y, Matrix<Number> behind, std::int64_t threads) {
    require_threads(threads);
    const Given<Number> given{x, dt, B, C, A, state};
    const ChunkSizes sizes = given.sizes();
    if (y) require_shape(*y, sizes.tokens, sizes.channels, "y must be of the shape of x");
    require_shape(behind, sizes.channels, sizes.states, "behind must be of the shape of A");
    Number* out = y ? y->data() : nullptr;
    nb::gil_scoped_release released;
    selective_chunk(given.inputs(), sizes, out, behind.data(), threads);
}

template <typename Number>
void chunk_gradients(Matrix<const Number> x, Matrix<const Number> dt, Matrix<const Number> B,
                     Matrix<const Number> C, Matrix<const Number> A, Matrix<const Number> state,
                     std::optional<Matrix<const Number>> of_y, Matrix<const Number> of_behind,
                     Matrix<Number> of_x, Matrix<Number> of_dt, Matrix<Number> of_B,
                     Matrix<Number> of_C, Matrix<Number> of_A, Matrix<Number> of_state,
                     std::int64_t threads) {
    require_threads(threads);
    const Given<Number> given{x, dt, B, C, A, state};
    const ChunkSizes sizes = given.sizes();
    const auto [Q, D, N] = sizes;
    constexpr const char* kRule = "gradients must be of the shapes of what they are of";
    if (of_y) require_shape(*of_y, Q, D, kRule);
    require_shape(of_behind, D, N, kRule);
    for (const auto& each : {of_x, of_dt}) require_shape(each, Q, D, kRule);
    for (const auto& each : {of_B, of_C}) require_shape(each, Q, N, kRule);
    for (const auto& each : {of_A, of_state}) require_shape(each, D, N, kRule);
    const ChunkGradients<Number> out{of_y ? of_y->data() : nullptr, of_behind.data(),
                                     of_x.data(), of_dt.data(), of_B.data(),
                                     of_C.data(), of_A.data(), of_state.data()};
    nb::gil_scoped_release released;
    selective_chunk_gradients(given.inputs(), sizes, out, threads);
}

template <typename Number>
void define(nb::module_& m) {
    m.def("selective_chunk", &chunk<Number>, "x"_a.noconvert(), "dt"_a.noconvert(),
          "B"_a.noconvert(), "C"_a.noconvert(), "A"_a.noconvert(), "state"_a.noconvert(),
          nb::kw_only(), "y"_a.noconvert().none(), "behind"_a.noconvert(), "threads"_a = 1);
    m.def("selective_chunk_gradients", &chunk_gradients<Number>, "x"_a.noconvert(),
          "dt"_a.noconvert(), "B"_a.noconvert(), "C"_a.noconvert(), "A"_a.noconvert(),
          "state"_a.noconvert(), nb::kw_only(), "of_y"_a.noconvert().none(),
          "of_behind"_a.noconvert(), "of_x"_a.noconvert(), "of_dt"_a.noconvert(),
          "of_B"_a.noconvert(), "of_C"_a.noconvert(), "of_A"_a.noconvert(),
          "of_state"_a.noconvert(), "threads"_a = 1);
}

}  // namespace

void define_selective(nb::module_& m) {
    define<float>(m);
    define<double>(m);
}

}  // namespace megablocks
