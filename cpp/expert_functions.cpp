// The functions of experts in the Python module megablocks_core._native; see native.cpp.

#include "expert_functions.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "expert_rows.hpp"
#include "huge_pages.hpp"
#include "tile_gradients.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace megablocks {

namespace {

using Numbers = std::tuple<float, float, float>;

SwiGlu swiglu(const Numbers& numbers) {
    return {std::get<0>(numbers), std::get<1>(numbers), std::get<2>(numbers)};
}

// Gate and up [n i] with the weights of their rows, of which there may be none.
template <typename Number>
HiddenRows<Number> hidden_input(Matrix<const Number> gate, Matrix<const Number> up,
                                            Vector<const float> weights) {
    const auto rows = gate.shape(0), features = gate.shape(1);
    require(up.shape(0) == rows && up.shape(1) == features, "up must be of the shape of gate");
    require(weights.size() == rows || weights.size() == 0, "weights.size must be the rows or 0");
    return {gate.data(), up.data(), weights.size() ? weights.data() : nullptr,
            static_cast<std::int64_t>(features)};
}

template <typename Number>
void hidden_rows(Matrix<const Number> gate, Matrix<const Number> up, Vector<const float> weights,
                 Numbers activation, Matrix<Number> out,
                 std::int64_t threads) {
    require_threads(threads);
    const auto in = hidden_input<Number>(gate, up, weights);
    require(out.shape(1) == gate.shape(1) && out.shape(0) >= gate.shape(0),
            "out must have the features of gate, and its rows or more");
    const auto rows = static_cast<std::int64_t>(gate.shape(0));
    const auto padded = static_cast<std::int64_t>(out.shape(0));
    nb::gil_scoped_release released;
    hidden_rows(in, swiglu(activation), rows, padded, out.data(), threads);
}

template <typename Number>
void hidden_gradients(Matrix<const Number> gate, Matrix<const Number> up,
                      Vector<const float> weights, Numbers activation,
                      Matrix<const Number> of_hidden, Matrix<Number> hidden,
                      Matrix<Number> of_gate, Matrix<Number> of_up, Vector<float> of_weights,
                      std::int64_t threads) {
    require_threads(threads);
    const auto in = hidden_input<Number>(gate, up, weights);
    const auto rows = gate.shape(0), features = gate.shape(1), padded = of_hidden.shape(0);
    require(of_hidden.shape(1) == features && padded >= rows,
            "of_hidden must have the features of gate, and its rows or more");
    for (const auto& each : {hidden, of_gate, of_up}) {
        require(each.shape(0) == padded && each.shape(1) == features,
                "hidden, of_gate and of_up must be of the shape of of_hidden");
    }
    require(of_weights.size() == rows || of_weights.size() == 0,
            "of_weights.size must be the rows or 0");
    const HiddenGradients<Number> out{
        of_hidden.data(), hidden.data(), of_gate.data(), of_up.data(),
        of_weights.size() ? of_weights.data() : nullptr};
    nb::gil_scoped_release released;
    hidden_gradients(in, swiglu(activation), static_cast<std::int64_t>(rows),
                                 static_cast<std::int64_t>(padded), out, threads);
}

void ask_pages(Vector<const std::uint8_t> memory) {
    ask_for_huge_pages(memory.data(), memory.size());
}

// Also where a compiler cannot tell.
bool is_intel() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return true;
#endif
}

#ifdef MEGABLOCKS_TILES

using Weights = Stack<const Bits>;

// Weights of all experts, and the places in the order of their experts.
struct ExpertArguments {
    Weights gate, up, down;
    Matrix<const Bits> x;
    Vector<const std::int64_t> rows;
    Vector<const float> weights;
    Vector<const std::int64_t> counts;

    std::int64_t filled() const {
        return std::accumulate(counts.data(), counts.data() + counts.size(), std::int64_t{0});
    }
};

TileExperts tile_experts(const ExpertArguments& given, Numbers activation) {
    const auto experts = given.gate.shape(0), features = given.gate.shape(1);
    const auto hidden = given.gate.shape(2);
    require(features % kBlock == 0 && hidden % kBlock == 0,
            "features and hidden sizes must be multiples of 32");
    const auto& up = given.up;
    const auto& down = given.down;
    require(up.shape(0) == experts && up.shape(1) == features && up.shape(2) == hidden,
            "up must be of the shape of gate");
    require(down.shape(0) == experts && down.shape(1) == hidden && down.shape(2) == features,
            "down must be of the shape of gate with its last two turned");
    require(given.x.shape(1) == hidden, "x must have the hidden size of gate");
    require(given.counts.size() == experts, "counts.size must be the number of experts");
    for (std::size_t expert = 0; expert < experts; ++expert) {
        require(given.counts.data()[expert] >= 0, "counts must not be negative");
    }
    const std::int64_t filled = given.filled();
    require(static_cast<std::int64_t>(given.rows.size()) >= filled &&
                given.weights.size() == given.rows.size(),
            "rows and weights must be as many as all counts together, or more");
    const auto tokens = static_cast<std::int64_t>(given.x.shape(0));
    for (std::int64_t place = 0; place < filled; ++place) {
        const std::int64_t row = given.rows.data()[place];
        require(0 <= row && row < tokens, "rows of filled places must be those of x");
    }
    return {given.gate.data(), up.data(), down.data(), given.x.data(), given.rows.data(),
            given.weights.data(), given.counts.data(), static_cast<std::int64_t>(experts),
            static_cast<std::int64_t>(hidden), static_cast<std::int64_t>(features),
            swiglu(activation)};
}

// The units of this processor, the fastest first.
std::vector<std::string> units() {
    std::vector<std::string> found;
    if (TileUnit::is_there()) found.push_back("tiles");
    if (VectorUnit::is_there()) found.push_back("vectors");
    return found;
}

template <typename Pass, typename Outputs>
void run_by_all(const TileExperts& in, const Outputs& out, std::int64_t threads) {
    Pass pass(in, out, threads);
    together(threads, [&](std::int64_t thread, Meeting& meeting) { pass.run(thread, meeting); });
}

template <template <typename> typename Pass, typename Outputs>
void run_on_tiles(const TileExperts& in, const Outputs& out, std::int64_t rows,
                  std::int64_t threads, bool by_tiles) {
    if (in.experts == 0) return;
    threads = threads_worth(rows * in.features, kHiddenWorthAThread, threads);
    if (by_tiles) {
        run_by_all<Pass<TileUnit>>(in, out, threads);
    } else {
        run_by_all<Pass<VectorUnit>>(in, out, threads);
    }
}

// Whether the unit of this name is that of tiles; it must be there.
bool is_tiles(const std::string& unit) {
    const auto there = units();
    require(std::find(there.begin(), there.end(), unit) != there.end(),
            "unit must be one that this processor has");
    return unit == "tiles";
}

template <typename Each>
void require_rows(const Each& each, std::size_t rows, std::size_t columns) {
    require(each.shape(0) >= rows && each.shape(1) == columns,
            "rows of places must be as many as all counts together, or more, and as wide");
}

template <typename Each>
void require_halves(const Each& lower, const Each& upper, std::size_t rows,
                    std::int64_t features) {
    require_rows(lower, rows, static_cast<std::size_t>(Halves<Bits>::width_of(features, false)));
    require_rows(upper, rows, static_cast<std::size_t>(Halves<Bits>::width_of(features, true)));
}

void experts_forward(Weights gate, Weights up, Weights down, Matrix<const Bits> x,
                     Vector<const std::int64_t> rows, Vector<const float> weights,
                     Vector<const std::int64_t> counts, Numbers activation, Matrix<Bits> lower,
                     Matrix<Bits> upper, Matrix<Bits> out, const std::string& unit, std::int64_t threads) {
    require_threads(threads);
    const bool by_tiles = is_tiles(unit);
    const ExpertArguments given{gate, up, down, x, rows, weights, counts};
    const auto in = tile_experts(given, activation);
    const auto filled = static_cast<std::size_t>(given.filled());
    require_halves(lower, upper, filled, in.features);
    require_rows(out, filled, in.hidden);
    nb::gil_scoped_release released;
    run_on_tiles<TileForward>(in, TileOutputs{{lower.data(), upper.data()}, out.data()},
                              given.filled(), threads, by_tiles);
}

// A gradient of a weight that is wanted.
Bits* wanted(const std::optional<Stack<Bits>>& gradient, const Weights& like) {
    if (!gradient) return nullptr;
    for (int dim = 0; dim < 3; ++dim) {
        require(gradient->shape(dim) == like.shape(dim),
                "gradients must be of the shapes of their weights");
    }
    return gradient->data();
}

void experts_backward(Weights gate, Weights up, Weights down, Matrix<const Bits> x,
                      Vector<const std::int64_t> rows, Vector<const float> weights,
                      Vector<const std::int64_t> counts, Numbers activation,
                      Matrix<const Bits> dy, Matrix<const Bits> lower, Matrix<const Bits> upper,
                      std::optional<Matrix<Bits>> of_x, Vector<float> of_weights, std::optional<Stack<Bits>> of_gate,
                      std::optional<Stack<Bits>> of_up, std::optional<Stack<Bits>> of_down,
                      std::tuple<bool, bool, bool> adds, const std::string& unit,
                      std::int64_t threads) {
    require_threads(threads);
    const bool by_tiles = is_tiles(unit);
    const ExpertArguments given{gate, up, down, x, rows, weights, counts};
    const auto in = tile_experts(given, activation);
    const auto filled = static_cast<std::size_t>(given.filled());
    require_rows(dy, filled, in.hidden);
    require_halves(lower, upper, filled, in.features);
    if (of_x) require_rows(*of_x, filled, in.hidden);
    require(of_weights.size() >= filled, "of_weights must be as many as all counts together");
    const TileGradients out{dy.data(), {lower.data(), upper.data()},
                            of_x ? of_x->data() : nullptr, of_weights.data(),
                            wanted(of_gate, gate), wanted(of_up, up), wanted(of_down, down),
                            std::get<0>(adds), std::get<1>(adds), std::get<2>(adds)};
    nb::gil_scoped_release released;
    run_on_tiles<TileBackward>(in, out, given.filled(), threads, by_tiles);
}

void define_tiles(nb::module_& m) {
    m.def("experts_forward", &experts_forward, "gate"_a.noconvert(), "up"_a.noconvert(),
          "down"_a.noconvert(), nb::kw_only(), "x"_a.noconvert(), "rows"_a.noconvert(),
          "weights"_a.noconvert(), "counts"_a.noconvert(), "activation"_a,
          "lower"_a.noconvert(), "upper"_a.noconvert(), "out"_a.noconvert(), "unit"_a, "threads"_a = 1);
    m.def("experts_backward", &experts_backward, "gate"_a.noconvert(), "up"_a.noconvert(),
          "down"_a.noconvert(), nb::kw_only(), "x"_a.noconvert(), "rows"_a.noconvert(),
          "weights"_a.noconvert(), "counts"_a.noconvert(), "activation"_a, "dy"_a.noconvert(),
          "lower"_a.noconvert(), "upper"_a.noconvert(), "of_x"_a.noconvert().none(),
          "of_weights"_a.noconvert(), "of_gate"_a.noconvert().none(),
          "of_up"_a.noconvert().none(), "of_down"_a.noconvert().none(), "adds"_a,
          "unit"_a, "threads"_a = 1);
}

#else

std::vector<std::string> units() { return {}; }

void define_tiles(nb::module_&) {}

#endif

template <typename... Numbers>
void define_hidden(nb::module_& m) {
    (m.def("hidden_rows", &hidden_rows<Numbers>, "gate"_a.noconvert(), "up"_a.noconvert(),
           nb::kw_only(), "weights"_a.noconvert(), "activation"_a, "out"_a.noconvert(),
           "threads"_a = 1),
     ...);
    (m.def("hidden_gradients", &hidden_gradients<Numbers>, "gate"_a.noconvert(),
           "up"_a.noconvert(), nb::kw_only(), "weights"_a.noconvert(), "activation"_a,
           "of_hidden"_a.noconvert(), "hidden"_a.noconvert(), "of_gate"_a.noconvert(),
           "of_up"_a.noconvert(), "of_weights"_a.noconvert(), "threads"_a = 1),
     ...);
}

}  // namespace

void define_experts(nb::module_& m) {
    define_hidden<float, std::int16_t>(m);
    m.def("ask_for_huge_pages", &ask_pages, "memory"_a.noconvert());
    m.def("is_intel", &is_intel);
    m.def("bfloat16_units", &units);
    define_tiles(m);
}

}  // namespace megablocks
