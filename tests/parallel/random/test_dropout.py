"""Dropout by counter: one mask however the work is cut, and masks as random as they should be."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from megablocks_core.parallel import Dropout, DropoutKey, dropout
from megablocks_core.parallel.counter import bits_of, key_of

F64 = torch.float64


def _index(rows=4, tokens=8, *, seed=1, step=2):
    return DropoutKey(seed, step).index(torch.arange(rows).unsqueeze(-1), torch.arange(tokens))


def _kept(p=0.5, *, rows=64, tokens=64, features=64, seed=1, step=2, stream="layer"):
    """The mask [R T F] as zeros and ones."""
    ones = torch.ones(rows, tokens, features)
    index = _index(rows, tokens, seed=seed, step=step)
    return dropout(ones, p, stream=stream, index=index).ne(0).to(F64)


def _deviations(values, mean, variance):
    """How many standard deviations the mean of ``values`` lies from ``mean``."""
    return abs(values.mean().item() - mean) * math.sqrt(values.numel() / variance)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_elements_are_zero_or_scaled_and_the_gradient_has_the_same_mask(p, dtype):
    x = torch.rand(4, 8, 33, dtype=dtype).add(0.5).requires_grad_()
    y = dropout(x, p, stream="layer", index=_index())
    assert y.dtype == dtype
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    kept = y != 0
    assert_close(y, torch.where(kept, x / (1 - p), 0.0))
    assert_close(gradient, torch.where(kept, torch.ones_like(x) / (1 - p), 0.0))


def test_masks_are_those_of_the_plain_formula():
    """The definition, with Python's integers for the choice of the half."""
    index, p, first = _index(2, 3), 0.3, 5
    words = bits_of(bits_of(index, key_of(0, "layer")).unsqueeze(-1), torch.arange(20))
    expected = torch.empty(2, 3, 7)
    for row in range(2):
        for token in range(3):
            for feature in range(first, first + 7):
                word = words[row, token, feature // 2].item() % 2**64
                half = word >> 32 if feature % 2 else word % 2**32
                uniform = (half + 2**31) % 2**32 / 2**32
                expected[row, token, feature - first] = 1 / (1 - p) if uniform >= p else 0
    y = dropout(torch.ones(2, 3, 7), p, stream="layer", index=index, first_feature=first)
    assert_close(y, expected)


def test_a_known_mask_stays():
    # A change here changes every run that resumes.
    y = dropout(torch.ones(1, 2, 16), 0.5, stream="layers.0.mlp", index=_index(1, 2))
    assert (
        "".join(str(int(value > 0)) for value in y.flatten()) == "01110110100110010001101101011000"
    )


@given(
    tokens=st.integers(1, 9), features=st.integers(1, 40), data=st.data(), p=st.floats(0.05, 0.95)
)
def test_a_slice_drops_what_the_whole_drops_there(tokens, features, data, p):
    first_token = data.draw(st.integers(0, tokens - 1))
    first = data.draw(st.integers(0, features - 1))
    last = data.draw(st.integers(first + 1, features))
    drop = partial(dropout, p=p, stream="layer")
    index = _index(1, tokens)[0]
    whole = drop(torch.ones(tokens, features), index=index)
    share = drop(
        torch.ones(tokens - first_token, last - first),
        index=index[first_token:],
        first_feature=first,
    )
    assert torch.equal(share, whole[first_token:, first:last])


def test_samples_in_other_rows_and_micro_batches_drop_alike():
    key, ids = DropoutKey(seed=7, step=3), torch.tensor([[12], [5], [40]])
    x = torch.ones(3, 6, 10)
    together = dropout(x, 0.5, stream="layer", index=key.index(ids, torch.arange(6)))
    for row, sample in ((2, 40), (0, 12), (1, 5)):
        index = key.index(torch.tensor(sample), torch.arange(6))
        assert torch.equal(dropout(x[0], 0.5, stream="layer", index=index), together[row])


@pytest.mark.parametrize("layout", ["blocks", "strided", "empty"])
def test_large_strided_and_empty_tensors(layout):
    """Work is done in blocks of some 65,000 elements, which must not show."""
    index = _index(5, 300)
    x = torch.rand(5, 300, 129).add(1)
    if layout == "strided":
        x = torch.rand(129, 300, 5).add(1).permute(2, 1, 0)
    if layout == "empty":
        x, index = x[:, :0], index[:, :0]
    y = dropout(x, 0.5, stream="layer", index=index)
    rows = [
        dropout(x[row], 0.5, stream="layer", index=index[row, :]) for row in range(5) if x.numel()
    ]
    assert y.shape == x.shape
    assert torch.equal(y, torch.stack(rows) if rows else x)
    x = x.detach().requires_grad_()
    assert dropout(x, 0.5, stream="layer", index=index).sum().backward() is None


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mean_is_right(p):
    kept = _kept(p)
    assert _deviations(kept, 1 - p, p * (1 - p)) < 4
    for dim in range(3):
        for other in range(dim):
            means = kept.mean((dim, other))
            worst = (means - (1 - p)).abs().max() * math.sqrt(64 * 64 / (p * (1 - p)))
            assert worst < 5


def test_bits_of_elements_are_even():
    """Every one of the 32 bits behind a mask, by masks at p = 1/2, 1/4, 1/8, ..."""
    for power in range(1, 11):
        p = 2.0**-power
        assert _deviations(_kept(p), 1 - p, p * (1 - p)) < 4


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("features", (0, 0, 1)),
        ("features two apart", (0, 0, 2)),
        ("tokens", (0, 1, 0)),
        ("samples", (1, 0, 0)),
        ("diagonal", (0, 1, 1)),
        ("other diagonal", (1, -1, 0)),
    ],
)
def test_neighbours_are_independent(name, shift):
    kept = _kept(0.5) * 2 - 1
    agreement = kept * kept.roll(shift, (0, 1, 2))
    assert _deviations(agreement, 0, 1) < 4, name


@pytest.mark.parametrize(
    "other",
    [
        {"stream": "layer2"},
        {"stream": "layers.1"},
        {"step": 3},
        {"step": 2**40},
        {"seed": 2},
        {"seed": 2, "step": 1},
    ],
)
def test_streams_steps_and_seeds_are_independent(other):
    """Also where one mask is moved against the other, as far as 2 places each way."""
    one, two = _kept(0.5) * 2 - 1, _kept(0.5, **other) * 2 - 1
    for dim in range(3):
        for by in range(-2, 3):
            assert _deviations(one * two.roll(by, dim), 0, 1) < 4.5


def test_many_layers_and_steps_are_independent():
    """No pair of 12 layers in 8 steps agrees more than chance."""
    masks = torch.stack(
        [
            _kept(0.5, rows=8, tokens=16, stream=f"layers.{layer}", step=step).flatten() * 2 - 1
            for layer in range(12)
            for step in range(8)
        ]
    )
    count = masks.shape[1]
    correlation = (masks @ masks.T / count).fill_diagonal_(0)
    assert correlation.abs().max() * math.sqrt(count) < 5.5
    assert correlation.square().mean() * count == pytest.approx(1, abs=0.1)


def test_at_zero_nothing_and_at_one_everything_is_dropped():
    x = torch.tensor([[1.0, float("inf"), float("nan")]], requires_grad=True)
    index = _index(1, 1)[0]
    assert dropout(x, 0.0, stream="layer", index=index) is x
    y = dropout(x, 1.0, stream="layer", index=index)
    assert torch.equal(y, torch.zeros(1, 3))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(1, 3))
    nearly = dropout(torch.ones(1, 500), 1 - 2**-40, stream="layer", index=index)
    assert not nearly.any()


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), "0.1", None])
def test_what_is_no_probability_raises(p):
    with pytest.raises(ValueError, match=f"p={p!r} must lie between 0 and 1"):
        dropout(torch.ones(4, 8, 2), p, stream="layer", index=_index())


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_an_index_of_other_tokens_raises(p):
    with pytest.raises(ValueError, match=r"index of shape \[8\] must have .* \[4, 8\]"):
        dropout(torch.ones(4, 8, 2), p, stream="layer", index=_index()[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_an_index_of_another_type_raises(dtype):
    with pytest.raises(ValueError, match=f"index of {dtype} must be int64"):
        dropout(torch.ones(4, 8, 2), 0.5, stream="layer", index=_index().to(dtype))


def test_numbers_that_would_be_rounded_raise():
    with pytest.raises(ValueError, match="step=1.5 must be one integer"):
        DropoutKey(1, 1.5)  # type: ignore
    with pytest.raises(ValueError, match=r"step=tensor\(1.5000\) must be one integer"):
        DropoutKey(1, torch.tensor(1.5))
    with pytest.raises(ValueError, match="must be one integer"):
        DropoutKey(1, torch.arange(2))
    ids, positions = torch.arange(4)[:, None], torch.arange(8)
    with pytest.raises(ValueError, match="sample_ids of torch.float32 must be integers"):
        DropoutKey(1, 1).index(ids / 4, positions)
    with pytest.raises(ValueError, match="positions of torch.float32 must be integers"):
        DropoutKey(1, 1).index(ids, positions.float())


def test_ids_that_do_not_broadcast_with_positions_raise():
    with pytest.raises(ValueError, match=r"sample_ids of shape \[4\] must broadcast .* \[8\]"):
        DropoutKey(1, 1).index(torch.arange(4), torch.arange(8))


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], 3, None])
def test_numbers_that_are_no_tensor_are_refused(numbers):
    with pytest.raises(ValueError, match=f"sample_ids of type {type(numbers).__name__} must be a"):
        DropoutKey(1, 1).index(numbers, torch.arange(4))
    with pytest.raises(ValueError, match=f"positions of type {type(numbers).__name__} must be a"):
        DropoutKey(1, 1).index(torch.arange(4), numbers)
    with pytest.raises(ValueError, match=f"index of type {type(numbers).__name__} must be a"):
        dropout(torch.ones(4, 2), 0.5, stream="layer", index=numbers)


def test_what_is_dropped_must_be_floating_point():
    with pytest.raises(ValueError, match="x of torch.int64 must be floating-point"):
        dropout(torch.ones(4, 8, 2).long(), 0.5, stream="layer", index=_index())


@pytest.mark.parametrize("seed", [1.5, "1", None, torch.tensor(1), torch.arange(2)])
def test_a_seed_that_is_no_number_raises(seed):
    with pytest.raises(ValueError, match="seed=.* must be a whole number, and no tensor"):
        DropoutKey(seed, 0)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_of_other_sizes_raises(seed):
    with pytest.raises(ValueError, match=f"seed={seed} must lie between"):
        DropoutKey(seed, 0)


def test_nothing_but_the_index_is_saved_and_layers_share_it():
    x, index = torch.ones(4, 8, 64, requires_grad=True), _index()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        for layer in range(3):
            dropout(x, 0.5, stream=f"layers.{layer}", index=index)
    assert [tensor.data_ptr() for tensor in saved] == [index.data_ptr()] * 3
    assert saved[0].nbytes == 8 * 4 * 8


def test_derivatives_of_both_orders():
    x = torch.rand(2, 3, 5, dtype=F64, requires_grad=True)
    drop = partial(dropout, p=0.5, stream="layer", index=_index(2, 3))
    assert torch.autograd.gradcheck(lambda x: drop(x) * x, x)
    assert torch.autograd.gradgradcheck(lambda x: drop(x) * x, x)


def test_torchs_generator_is_neither_read_nor_moved():
    x, index = torch.ones(4, 8, 16), _index()
    before = torch.get_rng_state()
    first = dropout(x, 0.5, stream="layer", index=index)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(dropout(x, 0.5, stream="layer", index=index), first)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_f_101_recomputation_drops_what_was_dropped(use_reentrant):
    x = torch.ones(1, 1000, requires_grad=True)
    index = _index(1, 1)[0]

    def dropped(x):
        return dropout(x, 0.5, stream="layer", index=index) * x

    y = checkpoint(dropped, x, use_reentrant=use_reentrant, preserve_rng_state=False)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert 400 < (y == 0).sum() < 600


@pytest.mark.parametrize("as_tensor", [False, True])
def test_steps_compile_once_and_change_nothing(as_tensor):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def loss(x, key):
        index = key.index(torch.arange(4).unsqueeze(-1), torch.arange(8))
        return (dropout(x, 0.3, stream="layer", index=index) * x).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for step in range(20):
        key = DropoutKey(1, torch.tensor(step) if as_tensor else step)
        results = []
        for function in (compiled, loss):
            x = torch.arange(4 * 8 * 7.0).view(4, 8, 7).requires_grad_()
            value = function(x, key)
            value.backward()
            results.append([value, x.grad])
        assert_close(*results)
    assert counter.frame_count <= (1 if as_tensor else 2)


def test_it_follows_fake_tensors():
    """Nothing waits for a device."""
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(4, 300, 129, requires_grad=True)
        y = dropout(x, 0.5, stream="layer", index=_index(4, 300))
        y.sum().backward()
    assert y.shape == x.grad.shape == (4, 300, 129)


def test_a_layer_drops_in_training_alone():
    x, layer = torch.ones(4, 8, 16), Dropout(0.5, stream="layer")
    assert torch.equal(
        layer(x, index=_index(), first_feature=3),
        dropout(x, 0.5, stream="layer", index=_index(), first_feature=3),
    )
    assert layer.drops and str(layer) == "Dropout(p=0.5, stream='layer')"
    with pytest.raises(ValueError, match="dropout_index=None must be .* 'layer' drops"):
        layer(x, index=None)
    assert layer.eval()(x, index=None) is x
    assert Dropout(0.0)(x, index=None) is x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 1.5, "stream": "layer"}, "p=1.5 must lie"),
        ({"p": 0.5}, "stream='' must name the layer"),
    ],
)
def test_a_layer_of_no_rate_or_name_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        Dropout(**arguments)


@pytest.mark.parametrize("first", [-1, 1.5, float("nan"), None])
def test_a_first_feature_that_is_none_is_refused(first):
    with pytest.raises(ValueError, match="first_feature=.* must be a whole number of 0 or more"):
        dropout(torch.ones(4, 8, 7), 0.5, stream="layer", index=_index(), first_feature=first)


@pytest.mark.parametrize("stream", ["", 3, None])
def test_a_stream_is_a_name(stream):
    with pytest.raises(ValueError, match="stream="):
        dropout(torch.ones(2, 3), 0.5, stream=stream, index=torch.arange(2))
