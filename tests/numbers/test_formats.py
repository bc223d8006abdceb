"""Values, rounding and codes are those of torch's dtypes and of the published tables."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.numbers.formats import (
    E2M1,
    E4M3,
    E5M2,
    codes_of,
    packed,
    power_code_above,
    power_of_code,
    rounded,
    rounded_by_chance,
    unpacked,
    values_of,
    wide,
)

TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
FORMATS = [E4M3, E5M2, E2M1]


def some(count=1 << 16):
    """Values of all magnitudes, those halfway between two numbers too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator)
    x = x * torch.exp2(torch.randint(-24, 24, (count,), generator=generator).float())
    halves = torch.arange(-256, 257) / 32.0
    return torch.cat([x, halves, halves * 2.0**-10, torch.tensor([0.0, -0.0])])


@pytest.mark.parametrize("to", [E4M3, E5M2], ids=lambda to: to.name)
def test_rounding_is_the_cast_of_torch(to):
    x = some()
    cast = x.clamp(-to.largest, to.largest).to(TORCH[to]).float()
    assert torch.equal(rounded(x, to), cast)
    assert torch.equal(rounded(x.double(), to), cast.double())
    assert torch.equal(torch.signbit(rounded(x, to)), torch.signbit(cast))


def test_four_bits_round_to_the_nearest_and_ties_to_even():
    x = torch.tensor([0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 7.0])
    to = torch.tensor([0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    assert torch.equal(rounded(x, E2M1), to)
    assert torch.equal(rounded(-x, E2M1), -to)


@pytest.mark.parametrize("to", FORMATS, ids=lambda to: to.name)
def test_what_is_no_number_of_the_format(to):
    x = torch.tensor([torch.inf, -torch.inf, 1e30, torch.nan])
    assert rounded(x, to)[:3].tolist() == [to.largest, -to.largest, to.largest]
    assert rounded(x, to)[3].isnan()


@pytest.mark.parametrize("to", FORMATS, ids=lambda to: to.name)
def test_codes_and_numbers_are_each_other(to):
    codes = torch.arange(16 if to is E2M1 else 256, dtype=torch.uint8)
    numbers = values_of(codes, to)
    finite = numbers.isfinite()
    assert numbers[finite].max() == to.largest
    assert torch.equal(codes_of(numbers[finite], to), codes[finite])
    assert torch.equal(rounded(numbers[finite], to), numbers[finite])


def test_known_codes():
    assert values_of(torch.tensor([0x38, 0x7E, 0x01, 0xB8], dtype=torch.uint8), E4M3).tolist() == [
        1.0,
        448.0,
        2.0**-9,
        -1.0,
    ]
    assert values_of(torch.tensor([0x3C, 0x7B, 0x01], dtype=torch.uint8), E5M2).tolist() == [
        1.0,
        57344.0,
        2.0**-16,
    ]
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values_of(torch.arange(8, dtype=torch.uint8), E2M1).tolist() == magnitudes
    assert codes_of(torch.tensor([-6.0, -0.0]), E2M1).tolist() == [15, 8]


@pytest.mark.parametrize("to", FORMATS, ids=lambda to: to.name)
@given(x=st.floats(-1e6, 1e6, width=32), chance=st.floats(0, 1, exclude_max=True, width=32))
def test_chance_goes_to_one_of_the_two_neighbours(to, x, chance):
    x, chance = torch.tensor([x]), torch.tensor([chance])
    found = rounded_by_chance(x, to, chance)
    numbers = values_of(torch.arange(16 if to is E2M1 else 256, dtype=torch.uint8), to)
    numbers = numbers[numbers.isfinite()]
    inside = x.clamp(-to.largest, to.largest)
    assert found in (numbers[numbers <= inside].max(), numbers[numbers >= inside].min())


def test_chance_is_right_on_average():
    chance = (torch.arange(4096) + 0.5) / 4096
    for x in (0.1, 0.6, 2.2, -2.8, -5.0, 5.9):
        mean = rounded_by_chance(torch.full((4096,), x), E2M1, chance).mean()
        torch.testing.assert_close(mean, torch.tensor(x), rtol=0, atol=1e-3)


def test_two_codes_of_four_bits_lie_in_a_byte_the_first_below():
    codes = torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)
    assert packed(codes).tolist() == [[0x21, 0xF3]]
    assert torch.equal(unpacked(packed(codes)), codes)
    with pytest.raises(ValueError, match="even last dimension"):
        packed(codes[:, :3])


def test_powers_of_two_are_rounded_up_and_are_torchs():
    x = torch.tensor([0.0, 2.0**-130, 2.0**-127, 1.0, 1.0001, 2.0, 3e38, torch.inf])
    assert power_code_above(x).tolist() == [0, 0, 0, 127, 128, 128, 254, 254]
    assert power_code_above(torch.tensor(torch.nan)) == 255
    codes = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(power_of_code(codes), codes.view(torch.float8_e8m0fnu).float())
    assert power_of_code(torch.tensor(255, dtype=torch.uint8)).isnan()
    assert torch.equal(power_code_above(power_of_code(codes)), codes)


def test_narrow_values_are_widened_and_wide_ones_left():
    assert wide(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert wide(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
