"""Slices of a Mamba-2 layer compute the layer's heads."""

import torch

from megablocks_core.export.lazies import lazy
from megablocks_core.export.trtllm.mamba import mamba_layer
from megablocks_core.export.trtllm.model import model_of
from tests.export.trtllm.plain import MAMBA2

INNER, GROUPS, HEADS, HIDDEN = 32, 24, 4, 16


def weights():
    torch.manual_seed(5)
    shapes = {
        "in_proj.weight": (2 * INNER + 2 * GROUPS + HEADS, HIDDEN),
        "in_proj.bias": (2 * INNER + 2 * GROUPS + HEADS,),
        "conv1d.weight": (INNER + 2 * GROUPS, 1, 4),
        "conv1d.bias": (INNER + 2 * GROUPS,),
        "out_proj.weight": (HIDDEN, INNER),
        "out_proj.bias": (HIDDEN,),
        "norm.weight": (INNER,),
        "A_log": (HEADS,),
        "D": (HEADS,),
        "dt_bias": (HEADS,),
    }
    return {f"m.mixer.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def layer(index, count):
    whole = {name: lazy(tensor, "BF16") for name, tensor in weights().items()}
    model = model_of({**MAMBA2, "model_type": "mamba2", "use_bias": True})
    pieces = mamba_layer(model, whole, "m", "o", (index, count), torch.bfloat16)
    for piece in pieces:
        assert piece.value[...].dtype in (piece.dtype, torch.bfloat16)
    return {piece.name: piece.value[...].to(piece.dtype) for piece in pieces}


def test_the_parts_of_packed_tensors_are_cut_one_by_one():
    whole, halves = layer(0, 1), [layer(0, 2), layer(1, 2)]
    assert torch.equal(whole["o.ssm.in_proj.weight"], weights()["m.mixer.in_proj.weight"])
    sizes = [INNER, INNER, GROUPS, GROUPS, HEADS]
    for kind in ("weight", "bias"):
        parts = [
            one[f"o.ssm.in_proj.{kind}"].split([size // 2 for size in sizes]) for one in halves
        ]
        again = torch.cat([torch.cat(pair) for pair in zip(*parts, strict=True)])
        assert torch.equal(again, whole[f"o.ssm.in_proj.{kind}"])
        parts = [
            one[f"o.ssm.conv1d.{kind}"].split([INNER // 2, GROUPS // 2, GROUPS // 2])
            for one in halves
        ]
        again = torch.cat([torch.cat(pair) for pair in zip(*parts, strict=True)])
        assert torch.equal(again, whole[f"o.ssm.conv1d.{kind}"])
    assert whole["o.ssm.conv1d.weight"].shape == (INNER + 2 * GROUPS, 1, 4, 1)
    assert torch.equal(
        torch.cat([one["o.ssm.out_proj.weight"] for one in halves], 1),
        whole["o.ssm.out_proj.weight"],
    )
    assert torch.equal(halves[1]["o.ssm.out_proj.bias"], whole["o.ssm.out_proj.bias"])


def test_rates_are_float32_of_what_the_model_holds():
    found = layer(0, 1)
    log = weights()["m.mixer.A_log"]
    assert found["o.ssm.A"].dtype == torch.float32
    torch.testing.assert_close(found["o.ssm.A"], -log.float().exp(), rtol=1e-7, atol=0)
    # In bfloat16 it would be rounded.
    assert not torch.equal(found["o.ssm.A"], found["o.ssm.A"].bfloat16().float())
    assert torch.equal(layer(1, 2)["o.ssm.A"], found["o.ssm.A"][2:])
    for name in ("D", "dt_bias"):
        assert torch.equal(found[f"o.ssm.{name}"], weights()[f"m.mixer.{name}"].float())
