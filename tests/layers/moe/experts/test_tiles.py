"""Experts by tiles: as near to the loop in float64 as ``Chunks`` is, on any number of threads."""

import functools

import numpy as np
import pytest
import torch

from megablocks_core.layers.moe.experts import GroupedExperts, forms, tiles
from megablocks_core.layers.moe.experts.activations import ACTIVATIONS
from megablocks_core.layers.moe.experts.projections import Formula, Projections
from megablocks_core.layers.moe.experts.tiles import Tiles, tiles_fit
from tests.layers.moe.experts.cases import everything, routing

_native = tiles._native
BFLOAT16 = torch.bfloat16
UNITS = [] if _native is None else _native.bfloat16_units()
by_each_unit = pytest.mark.usefixtures("unit")
# Experts without rows, of fewer rows than a tile has, of more than one block, of more than a piece.
COUNTS = ((1, 0, 16, 33), (70, 5, 0, 17), (0, 0, 0, 0), (0, 600, 0, 31))
SIZES = ((32, 32), (64, 96), (544, 32), (32, 1056))


@pytest.fixture(params=["tiles", "vectors"])
def unit(request, monkeypatch):
    """One of the units by which a processor may multiply, as if it were the only one."""
    if request.param not in UNITS:
        pytest.skip(f"this processor has no {request.param} of bfloat16")
    monkeypatch.setattr(_native, "bfloat16_units", lambda: [request.param])
    return request.param


def _experts(hidden, ffn, **options):
    torch.manual_seed(1)
    return GroupedExperts(4, hidden, ffn, dtype=BFLOAT16, **options)


def _case(counts, hidden):
    """Tokens, each for one expert, in any order."""
    indices = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    indices = indices[torch.randperm(len(indices))].unsqueeze(1)
    return torch.randn(len(indices), hidden).bfloat16(), routing(indices, dtype=torch.float32)


def _error(mine, exact):
    return float((mine.double() - exact).norm() / (1e-9 + exact.norm()))


@by_each_unit
@pytest.mark.parametrize("hidden, ffn", SIZES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("activation", ("swiglu", "clamped_swiglu"))
def test_as_near_to_float64_as_the_plain_twin(activation, counts, hidden, ffn, monkeypatch):
    (x, routed), options = _case(counts, hidden), {"activation": activation}
    mine = everything(_experts(hidden, ffn, **options), x, routed)
    exact = everything(
        _experts(hidden, ffn, form="loop", **options).double(),
        x.double(),
        routed._replace(weights=routed.weights.double()),
    )
    monkeypatch.setattr(forms, "tiles_fit", lambda *_: False)
    plain = everything(_experts(hidden, ffn, **options), x, routed)
    assert mine.keys() == plain.keys()
    for name, value in mine.items():
        assert value.isfinite().all(), name
        assert _error(value, exact[name]) <= 1.2 * _error(plain[name], exact[name]) + 1e-3, name


@by_each_unit
@pytest.mark.parametrize("activation", ("swiglu", "clamped_swiglu"))
def test_gates_far_from_zero_and_what_is_no_number(activation, monkeypatch):
    (x, routed), experts = _case((40, 3, 0, 20), 64), _experts(64, 32, activation=activation)
    x *= torch.logspace(-38, 12, len(x)).unsqueeze(1)
    x[5, 3] = torch.nan
    mine = everything(experts, x, routed)
    monkeypatch.setattr(forms, "tiles_fit", lambda *_: False)
    plain = everything(experts, x, routed)
    for name in ("y", "x", "weights"):
        assert mine[name].isfinite().sum() > 0, name
        assert torch.equal(mine[name].isnan(), plain[name].isnan()), name
        close = torch.isclose(mine[name], plain[name], rtol=0.05, atol=1e-30, equal_nan=True)
        assert close.float().mean() > 0.95, name


@by_each_unit
def test_it_is_tiles_that_compute(monkeypatch):
    used = []
    monkeypatch.setattr(Tiles, "forward", _noting(used, Tiles.forward))
    x, routed = _case((3, 1, 0, 2), 32)
    everything(_experts(32, 64), x, routed)
    assert used == ["forward"]


def _noting(used, method):
    @functools.wraps(method)
    def noted(*args):
        used.append(method.__name__)
        return method(*args)

    return noted


@by_each_unit
@pytest.mark.parametrize("counts", COUNTS[:2])
def test_threads_do_not_change_the_bits(counts):
    x, routed = _case(tuple(64 * count for count in counts), 256)
    experts, made = _experts(256, 512), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            made.append(everything(experts, x, routed))
        finally:
            torch.set_num_threads(1)
    for other in made[1:]:
        assert all(torch.equal(other[name], value) for name, value in made[0].items())


@by_each_unit
def test_persistent_gradients_are_added_to(monkeypatch):
    x, routed = _case((40, 3, 0, 70), 64)
    once = everything(_experts(64, 96), x, routed)
    experts = _experts(64, 96, persistent_gradients=True)
    everything(experts, x, routed)
    before = {name: each.grad for name, each in experts.named_parameters()}
    for each in experts.parameters():
        each.grad = each.grad.clone().fill_(0.5)
    held = {name: each.grad for name, each in experts.named_parameters()}
    monkeypatch.setattr(experts, "zero_grad", lambda: None)
    everything(experts, x, routed)
    for name, each in experts.named_parameters():
        assert each.grad is held[name]
        assert torch.equal(before[name], once[name])
        assert _error(each.grad - 0.5, once[name].double()) <= 2e-2


@by_each_unit
def test_only_wanted_gradients_are_made():
    experts, (x, routed) = _experts(64, 32), _case((5, 40, 0, 1), 64)
    whole = everything(experts, x, routed)
    experts.up_proj.requires_grad_(False)
    part = everything(experts, x, routed)
    assert part.pop("up_proj") is None
    assert all(torch.equal(value, whole[name]) for name, value in part.items())


@by_each_unit
def test_what_fits():
    assert _fits()
    assert not _fits(hidden=48) and not _fits(ffn=33) and not _fits(hidden=0)
    assert not _fits(activation="geglu") and not _fits(weigh="output") and not _fits(bias=True)
    assert not _fits(dtype=torch.float32) and not _fits(weights=torch.float64)


def test_nothing_fits_without_the_extension(monkeypatch):
    monkeypatch.setattr(tiles, "_native", None)
    assert not _fits()


def _fits(
    hidden=32,
    ffn=64,
    activation="swiglu",
    weigh="hidden",
    bias=False,
    dtype=BFLOAT16,
    weights=torch.float32,
):
    up, down = torch.empty(2, ffn, hidden, dtype=dtype), torch.empty(2, hidden, ffn, dtype=dtype)
    down_bias = torch.empty(2, hidden, dtype=dtype) if bias else None
    projections = Projections(up, up, down, None, None, down_bias)
    formula = Formula(ACTIVATIONS[activation], weigh)
    return tiles_fit(
        torch.empty(3, hidden, dtype=dtype), torch.empty(3, dtype=weights), projections, formula
    )


@by_each_unit
@pytest.mark.parametrize(
    "name, value, rule",
    (
        ("rows", np.array([0, 3]), "rows of filled places must be those of x"),
        ("rows", np.array([0, -1]), "rows of filled places must be those of x"),
        ("rows", np.array([0]), "must be as many as all counts"),
        ("counts", np.array([3, -1]), "counts must not be negative"),
        ("counts", np.array([2]), "must be the number of experts"),
        ("down", np.zeros((2, 64, 32), np.int16), "must be of the shape of gate"),
        ("x", np.zeros((3, 64), np.int16), "x must have the hidden size"),
        ("lower", np.zeros((1, 64), np.int16), "rows of places"),
        ("upper", np.zeros((2, 0), np.int16), "rows of places"),
        ("out", np.zeros((2, 64), np.int16), "rows of places"),
        ("threads", 0, "threads=0 must be at least 1"),
        ("unit", "cubes", "unit must be one that this processor has"),
    ),
)
def test_the_extension_refuses_what_it_would_read_or_write_outside(name, value, rule, unit):
    given = {
        **dict.fromkeys(("gate", "up"), np.zeros((2, 64, 32), np.int16)),
        "down": np.zeros((2, 32, 64), np.int16),
        "x": np.zeros((3, 32), np.int16),
        "rows": np.zeros(2, np.int64),
        "weights": np.zeros(2, np.float32),
        "counts": np.array([1, 1]),
        "activation": (1.0, 7.0, 0.0),
        "lower": np.zeros((2, 64), np.int16),
        "upper": np.zeros((2, 64), np.int16),
        "out": np.zeros((2, 32), np.int16),
        "unit": unit,
    }
    _native.experts_forward(**given)
    with pytest.raises(ValueError, match=rule):
        _native.experts_forward(**{**given, name: value})
