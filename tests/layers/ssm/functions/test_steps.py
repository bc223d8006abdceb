"""Single steps compute the formulas of their papers, written out once more as sums."""

import math

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.steps import (
    causal_conv1d_step,
    gated_delta_step,
    selective_step,
    ssd_step,
    wide,
)

F64 = torch.float64


def _draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, dtype=F64, generator=generator)


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_weighs_the_last_inputs(activation, biased):
    x, weight, state = _draw(2, 3), _draw(3, 4), _draw(2, 3, 3)
    bias = _draw(3) if biased else None
    y, after = causal_conv1d_step(x, weight, bias, state=state, activation=activation)
    for row in range(2):
        for channel in range(3):
            window = [*state[row, :, channel].tolist(), x[row, channel].item()]
            total = sum(a * b for a, b in zip(window, weight[channel].tolist(), strict=True))
            total += bias[channel].item() if biased else 0
            total = total / (1 + math.exp(-total)) if activation else total
            assert y[row, channel].item() == pytest.approx(total, abs=1e-12)
            assert after[row, :, channel].tolist() == window[1:]


def test_one_tap_needs_no_state():
    x, weight = _draw(2, 3), _draw(3, 1)
    y, after = causal_conv1d_step(x, weight, state=x.new_empty(2, 0, 3))
    assert_close(y, x * weight[:, 0])
    assert after.shape == (2, 0, 3)


def test_every_channel_of_mamba_has_a_state_of_its_own():
    x, dt, A, B, C = _draw(1, 2), _draw(1, 2).abs(), -_draw(2, 3).abs(), _draw(1, 3), _draw(1, 3)
    D, state = _draw(2), _draw(1, 2, 3)
    y, after = selective_step(x, dt, A, B, C, D=D, state=state)
    for d in range(2):
        for n in range(3):
            kept = math.exp(dt[0, d] * A[d, n]) * state[0, d, n]
            assert after[0, d, n].item() == pytest.approx(kept + dt[0, d] * x[0, d] * B[0, n])
        read = sum(after[0, d, n] * C[0, n] for n in range(3))
        assert y[0, d].item() == pytest.approx((read + D[d] * x[0, d]).item())


@pytest.mark.parametrize("wide_D", [False, True])
def test_neighbouring_heads_share_matrices(wide_D):
    x, dt, A = _draw(1, 4, 2), _draw(1, 4).abs(), -_draw(4).abs()
    B, C, state = _draw(1, 2, 3), _draw(1, 2, 3), _draw(1, 4, 2, 3)
    D = _draw(4, 2) if wide_D else _draw(4)
    y, after = ssd_step(x, dt, A, B, C, D=D, state=state)
    for h in range(4):
        new = math.exp(dt[0, h] * A[h]) * state[0, h]
        new = new + dt[0, h] * torch.outer(x[0, h], B[0, h // 2])
        assert_close(after[0, h], new)
        assert_close(y[0, h], new @ C[0, h // 2] + D[h] * x[0, h])


def test_a_key_recalls_what_it_wrote():
    """With a whole beta the memory of a key is replaced, whatever it was."""
    k = torch.nn.functional.normalize(_draw(1, 1, 4), dim=-1)
    v, other, g = _draw(1, 1, 3), 2 * _draw(1, 1, 3), torch.zeros(1, 1, dtype=F64)
    one, state = torch.ones(1, 1, dtype=F64), _draw(1, 1, 4, 3)
    _, state = gated_delta_step(k, k, other, g, one, state=state)
    o, state = gated_delta_step(k, k, v, g, one, scale=1.0, state=state)
    assert_close(o, v)
    half, _ = gated_delta_step(k, k, torch.zeros_like(v), g, one * 0.5, state=state)
    assert_close(half, v * 0.5 / 2)  # the default scale is 1 / sqrt(4)


def test_a_decay_comes_before_the_memory_is_read():
    k, v, g = _draw(1, 2, 4), _draw(1, 2, 3), -_draw(1, 2).abs()
    beta, state = _draw(1, 2).sigmoid(), _draw(1, 2, 4, 3)
    _, after = gated_delta_step(k, k, v, g, beta, state=state)
    for h in range(2):
        kept = math.exp(g[0, h]) * state[0, h]
        wrote = beta[0, h] * (v[0, h] - k[0, h] @ kept)
        assert_close(after[0, h], kept + torch.outer(k[0, h], wrote))


def test_states_are_wide_and_results_as_inputs():
    x, dt, A, B = (
        t.bfloat16() for t in (_draw(1, 2), _draw(1, 2).abs(), -_draw(2, 3), _draw(1, 3))
    )
    state = torch.zeros(1, 2, 3)
    y, after = selective_step(x, dt, A, B, B, state=state)
    assert (y.dtype, after.dtype, state.abs().sum()) == (torch.bfloat16, torch.float32, 0)
    assert wide(x) == torch.float32
    assert wide(x, _draw(1)) == F64


_STEPS = {
    causal_conv1d_step: {"x_BC": (2, 3), "weight_CW": (3, 4), "bias_C": (3,), "state": (2, 3, 3)},
    selective_step: {
        **{"x_BD": (2, 4), "dt_BD": (2, 4), "A_DN": (4, 3), "B_BN": (2, 3), "C_BN": (2, 3)},
        **{"D": (4,), "state": (2, 4, 3)},
    },
    ssd_step: {
        **{"x_BHP": (2, 4, 5), "dt_BH": (2, 4), "A_H": (4,), "B_BGN": (2, 2, 3)},
        **{"C_BGN": (2, 2, 3), "D": (4,), "state": (2, 4, 5, 3)},
    },
    gated_delta_step: {
        **{"q_BHK": (2, 4, 5), "k_BHK": (2, 4, 5), "v_BHV": (2, 4, 3), "g_BH": (2, 4)},
        **{"beta_BH": (2, 4), "state": (2, 4, 5, 3)},
    },
}


@pytest.mark.parametrize("step", _STEPS, ids=lambda each: each.__name__)
def test_no_size_is_broadcast(step):
    """A state of one row, or of another layer, is no state of these rows."""
    shapes = _STEPS[step]
    step(**{name: torch.zeros(shape) for name, shape in shapes.items()})
    for name, shape in shapes.items():
        others = [(*shape[:d], n, *shape[d + 1 :]) for d in range(len(shape)) for n in (1, 7)]
        for other in (*others, (*shape, 1), ()):
            given = {**shapes, name: other}
            with pytest.raises(ValueError, match=r"^\w+ of "):
                step(**{name: torch.zeros(shape) for name, shape in given.items()})
    with pytest.raises(ValueError, match="^state of type NoneType"):
        step(**{**{name: torch.zeros(shape) for name, shape in shapes.items()}, "state": None})
