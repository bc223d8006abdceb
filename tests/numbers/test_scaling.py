"""Scales follow the published rules, block by block, and rounding errs no more than it may.

The published package is compared under the oracle transformer-engine.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.numbers.formats import E2M1, E4M3, E5M2, codes_of, packed
from megablocks_core.numbers.scaling import (
    _SIGNS,
    amax_of,
    block_amax,
    current_scale,
    delayed_scale,
    round_blocks,
    round_mx,
    round_nvfp4,
    round_tensor,
    spread,
    turned,
)
from tests.parallel.transformer_engine import real


def matrix(rows, columns, dtype=torch.float32):
    """Rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (x * torch.exp(2 * torch.randn(rows, 1, generator=generator))).to(dtype)


ROUNDINGS = {
    "current": lambda x: round_tensor(x, E4M3, current_scale(amax_of(x), E4M3)),
    "current, powers": lambda x: round_tensor(
        x, E5M2, current_scale(amax_of(x), E5M2, power_of_two=True)
    ),
    "rows of 128": lambda x: round_blocks(x, E4M3, (1, 128)),
    "squares of 128": lambda x: round_blocks(x, E5M2, (128, 128), power_of_two=False),
    "mx": lambda x: round_mx(x, E4M3),
    "mx squares": lambda x: round_mx(x, E5M2, (32, 32)),
    "nvfp4": round_nvfp4,
    "nvfp4 squares": lambda x: round_nvfp4(x, (16, 16)),
}


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (130, 300), (0, 5), (5, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_errors_are_those_of_the_format(name, shape, dtype):
    x = matrix(*shape, dtype)
    result = ROUNDINGS[name](x)
    values = result.values()
    assert values.shape == x.shape
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if not x.numel():
        return
    block = result.block or shape
    largest = spread(block_amax(x, block), block, x.shape)
    # Half a step of a value, or of the least numbers beside its block's largest.
    relative, least = {
        "e4m3": (2.0**-4, 2.0**-10 / 224),
        "e5m2": (2.0**-3, 2.0**-17 / 28672),
        "e2m1": (0.25 + 2.0**-4, 0.25 / 6 * 1.1),
    }[_format_of(name)]
    assert (values - x).abs().le(relative * x.abs().to(values.dtype) + least * largest).all()


def _format_of(name):
    if name.startswith("nvfp4"):
        return "e2m1"
    return "e5m2" if name in ("current, powers", "squares of 128", "mx squares") else "e4m3"


@pytest.mark.parametrize("name", ["current, powers", "rows of 128", "mx", "mx squares"])
def test_rounding_again_changes_nothing_where_scales_are_powers(name):
    once = ROUNDINGS[name](matrix(130, 300)).values()
    assert torch.equal(ROUNDINGS[name](once).values(), once)


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (128, 1), (3, 5)])
def test_blocks_know_nothing_of_each_other(block):
    """The rounding of a whole is that of its blocks, one by one."""
    x = matrix(130, 300)
    whole = round_blocks(x, E4M3, block).values()
    rows, columns = block
    for row in range(0, 130, rows):
        for column in range(0, 300, columns):
            part = (slice(row, row + rows), slice(column, column + columns))
            alone = round_tensor(
                x[part], E4M3, current_scale(amax_of(x[part]), E4M3, power_of_two=True)
            )
            assert torch.equal(whole[part], alone.values())


def test_scales_of_tensors():
    amax = torch.tensor([448.0, 1.0, 3.0, 0.0, torch.inf, torch.nan, 1e-40])
    most = torch.finfo(torch.float32).max
    third = (torch.tensor(448.0) / 3).item()
    assert current_scale(amax, E4M3).tolist() == [1.0, 448.0, third, 1.0, 1.0, 1.0, most]
    powers = current_scale(amax, E4M3, power_of_two=True).tolist()
    assert powers == [1.0, 256.0, 128.0, 1.0, 1.0, 1.0, 2.0**127]
    assert current_scale(torch.tensor(0.0), E4M3, epsilon=0.5) == 896
    before = torch.full_like(amax, 7.0)
    delayed = delayed_scale(amax, before, E4M3, margin=1).tolist()
    assert delayed == [0.5, 224.0, third / 2, 7.0, 7.0, 7.0, most]


def test_the_largest_value_becomes_the_largest_number():
    x = matrix(40, 200)
    for to in (E4M3, E5M2):
        result = round_tensor(x, to, current_scale(amax_of(x), to))
        assert result.numbers.abs().max() == to.largest
        assert_close(result.values().abs().max(), x.abs().max())
    nvfp4 = round_nvfp4(x)
    assert (nvfp4.factors.max(), nvfp4.numbers.abs().max()) == (448, 6)
    assert_close(nvfp4.values().abs().max(), x.abs().max())


def test_mx_factors_are_the_powers_that_hold_the_block():
    x = torch.tensor([[448.0] + [0.0] * 31, [449.0] + [1.0] * 31, [0.0] * 32])
    result = round_mx(x, E4M3)
    assert result.factors.tolist() == [[1.0], [2.0], [2.0**-127]]
    assert result.values()[:, 0].tolist() == [448.0, 448.0, 0.0]


def test_nvfp4_scales_of_two_levels():
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 16:18] = 6.0 * 448, torch.tensor([6.0, 0.9])
    result = round_nvfp4(x)
    assert result.factor == 1
    assert result.factors.tolist() == [[448.0, 0.0], [0.0, 1.0]]
    assert result.values()[1, 16:18].tolist() == [6.0, 1.0]
    # The largest of another share makes the scales of blocks smaller.
    assert round_nvfp4(x, amax=torch.tensor(12.0 * 448)).factors.max() == 224


def test_zeros_stay_zeros():
    for rounding in ROUNDINGS.values():
        assert torch.equal(rounding(torch.zeros(33, 40)).values(), torch.zeros(33, 40))


def test_a_turn_keeps_products_and_spreads_a_single_value():
    a, b = matrix(35, 4, torch.float64), matrix(35, 5, torch.float64)
    assert_close(turned(a).t() @ turned(b), a.t() @ b)
    single = torch.zeros(16, 1)
    single[3] = 1.0
    assert turned(single).abs().unique().tolist() == [0.25]
    assert turned(torch.eye(16))[:, 0].tolist() == [0.25] * 16
    assert turned(torch.eye(16))[0, 3] == -0.25
    assert turned(torch.zeros(0, 3)).shape == (0, 3)


@real.needs_oracle
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_nvfp4_is_the_published_reference_to_the_bit(block):
    x = matrix(64, 96)
    with real.imported():
        published = import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
        codes, scales = published.NVFP4QuantizerRef._quantize_blockwise_reference(
            x, amax_of(x).view(1), block[1], block[0], pow_2_scales=False, eps=0.0
        )
    ours = round_nvfp4(x, block)
    assert torch.equal(packed(codes_of(ours.numbers, E2M1)), codes)
    assert torch.equal(spread(ours.factors, (block[0], 1), scales.shape), scales.float())


@real.needs_oracle
def test_turns_and_scales_of_tensors_are_the_published_references():
    x = matrix(64, 48)
    with real.imported():
        four: Any = import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
        four.get_wgrad_sign_vector = lambda: torch.tensor(_SIGNS)
        names = import_module("transformer_engine.pytorch.custom_recipes.reference_utils")
        quantizer = four.NVFP4QuantizerRef(names.Fp4Formats.E2M1, with_rht=True)
        assert_close(turned(x), quantizer._apply_rht(x.t().contiguous()).t())
        eight = import_module("transformer_engine.pytorch.custom_recipes.reference_current_scaling")
        amax = torch.cat([x.abs().flatten(), torch.tensor([0.0, 1e-42])])
        for to, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
            for power_of_two in (False, True):
                scale, _, _ = eight._scale_from_amax_tensor(
                    torch.float32, amax, dtype, eps=1e-3, pow_2_scales=power_of_two
                )
                ours = current_scale(amax, to, power_of_two=power_of_two, epsilon=1e-3)
                assert_close(ours, scale, rtol=1e-7, atol=0)
