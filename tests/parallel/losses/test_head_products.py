"""Products add up wide, whatever their factors are, in memory that is used again."""

import pytest
import torch

from megablocks_core.parallel.losses.head_products import Products, stays_narrow


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32, torch.float64])
def test_results_and_sums_are_as_wide_as_what_they_go_into(narrow):
    a, b = torch.randn(3, 4).to(narrow), torch.randn(4, 5).to(narrow)
    wide = torch.promote_types(narrow, torch.float32)
    products, right = Products(), a.double() @ b.double()
    out, total = torch.empty(3, 5, dtype=wide), torch.ones(3, 5, dtype=wide)
    products.put(out, a, b)
    products.add(total, a, b)
    put = torch.full_like(total, torch.nan)
    products.add(put, a, b, fresh=True)
    assert torch.equal(put, out)
    rounding = 2**-8 if narrow == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.double(), right, rtol=rounding, atol=1e-5)
    torch.testing.assert_close(total - 1, out, rtol=0, atol=1e-6)


def test_a_sum_of_many_products_is_not_rounded_to_16_bits():
    one, total, products = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1, 1), Products()
    for _ in range(1000):  # bfloat16 holds 256 + 1 no more
        products.add(total, one, one)
    assert total.item() == 1000


def test_factors_of_one_name_share_memory_and_others_do_not():
    products, x = Products(), torch.randn(4, 6)
    first = products.factor("rows", x, torch.bfloat16)
    assert torch.equal(first, x.bfloat16())
    other = products.factor("gradient", x + 1, torch.bfloat16)
    again = products.factor("rows", x[:2, :3] * 2, torch.bfloat16)
    assert torch.equal(again, (x[:2, :3] * 2).bfloat16())
    assert again.data_ptr() == first.data_ptr()
    assert torch.equal(other, (x + 1).bfloat16())
    assert products.factor("rows", x, torch.float32) is x
    larger = products.factor("rows", torch.ones(9, 9), torch.bfloat16)
    assert torch.equal(larger, torch.ones(9, 9, dtype=torch.bfloat16))
    assert torch.equal(products.factor("rows", x, torch.float64), x.double())


def test_wide_numbers_and_float16_on_a_cpu_do_not_stay_narrow():
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert not stays_narrow(torch.empty(1, dtype=dtype))
