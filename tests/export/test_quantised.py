"""Quantised tensors are read as the plain ones that they stand for, to the bit."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.export.lazies import lazy
from megablocks_core.export.quantised import dequantised
from megablocks_core.groups import Mesh, gather_whole
from megablocks_core.testing import ranks
from tests.export.quantised_folders import (
    FP8,
    MXFP4,
    edit_config,
    quantise_fp8,
    quantise_mxfp4,
    quantised_fp8,
    tiny_gpt_oss,
)
from tests.export.tiny_models import TOKENS, pretrained

CODES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
}


def _read(tensors, settings):
    lazies = {name: lazy(tensor, CODES[tensor.dtype]) for name, tensor in tensors.items()}
    return dequantised(lazies, {"quantization_config": settings})


def _fp8(weight, scales, block=(128, 128)):
    found = _read(
        {"a.weight": weight, "a.weight_scale_inv": scales},
        {**FP8, "weight_block_size": list(block)},
    )
    assert list(found) == ["a.weight"] and found["a.weight"].get_dtype() == "BF16"
    return found["a.weight"]


def _mxfp4(blocks, scales):
    (whole,) = _read({"down_proj_blocks": blocks, "down_proj_scales": scales}, MXFP4).values()
    assert whole.get_dtype() == "BF16"
    return whole


def _all_floats8():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes[codes.float().isfinite()]


def _same(found, expected):
    """Equal bits, with one kind of NaN."""
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found.isnan(), expected.isnan())
    bits = [x.nan_to_num(0).contiguous().view(torch.int16) for x in (found, expected)]
    assert torch.equal(*bits)


@pytest.mark.parametrize("shape", [(256, 384), (300, 130), (1, 1), (128, 129), (3, 200, 140)])
def test_fp8_blocks_with_edges_equal_transformers(shape):
    torch.manual_seed(0)
    weight, scales = quantised_fp8(torch.randn(shape), (128, 128))
    whole = _fp8(weight, scales)
    assert tuple(whole.get_shape()) == shape
    _same(whole[...], _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32).bfloat16())
    if all(size % 128 == 0 for size in shape[-2:]):
        theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scales, torch.bfloat16)
        _same(whole[...], theirs)


def test_fp8_every_code_with_extreme_scales():
    codes = _all_floats8()
    numbers = torch.tensor([1e-45, 2.0**-126, 1e-3, 1.0, 3.3, 2.0**120, 3e38, 0.0])
    weight = codes.repeat(len(numbers), 1)
    expected = (weight.float() * numbers[:, None]).bfloat16()
    _same(_fp8(weight, numbers[:, None], block=(1, len(codes)))[...], expected)
    narrow = numbers.bfloat16()
    expected = (weight.float() * narrow.float()[:, None]).bfloat16()
    _same(_fp8(weight, narrow[:, None], block=(1, len(codes)))[...], expected)


def test_mxfp4_every_code_with_every_scale():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    found = _mxfp4(codes, scales)[...]
    assert found.shape == (1, 512, 256)
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16)
    _same(found[..., :255], theirs[..., :255])
    assert found[..., 255].isnan().all()  # which transformers takes for 2**128
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found[0, ::2, 127][:16].tolist() == numbers + [-number for number in numbers]
    assert found[..., 0].abs().unique().tolist() == [2.0**-127 * number for number in numbers]


def _boxes(shape):
    parts = [st.tuples(st.integers(0, size), st.integers(0, size)) for size in shape]
    return st.tuples(*parts).map(lambda ends: tuple(slice(min(x), max(x)) for x in ends))


@settings(max_examples=60, deadline=None)
@given(_boxes((2, 40, 21)), st.integers(1, 9), st.integers(1, 9), st.integers(1, 400))
def test_boxes_of_fp8_are_slices_of_the_whole(box, rows, columns, piece):
    torch.manual_seed(0)
    weight, scales = quantised_fp8(torch.randn(2, 40, 21), (rows, columns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megablocks_core.export.quantised._PIECE", piece)
        whole = _fp8(weight, scales, block=(rows, columns))
        expected = _dequantize_fp8_weight(weight, scales, [rows, columns], torch.float32)
        _same(whole[box], expected.bfloat16()[box])
        _same(whole[box[0]], expected.bfloat16()[box[0]])


@settings(max_examples=60, deadline=None)
@given(_boxes((3, 96, 5)), st.integers(1, 400))
def test_boxes_of_mxfp4_are_slices_of_the_whole(box, piece):
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 3, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (3, 5, 3), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megablocks_core.export.quantised._PIECE", piece)
        expected = convert_moe_packed_tensors(blocks, scales)
        _same(_mxfp4(blocks, scales)[box], expected[box])


def test_a_box_reads_no_more_than_its_blocks():
    torch.manual_seed(0)
    weight, scales = quantised_fp8(torch.randn(40, 40), (8, 8))
    read = {}

    def watched(name, tensor):
        class Watched:
            get_shape, get_dtype = lambda _: tensor.shape, lambda _: CODES[tensor.dtype]

            def __getitem__(self, box):
                read[name] = tensor[box].numel()
                return tensor[box]

        return Watched()

    tensors = {"a": watched("a", weight), "a_scale_inv": watched("a_scale_inv", scales)}
    config = {"quantization_config": {**FP8, "weight_block_size": [8, 8]}}
    dequantised(tensors, config)["a"][8:24, :4]
    assert read == {"a": 16 * 4, "a_scale_inv": 2}
    packed = torch.zeros(4, 6, 2, 16, dtype=torch.uint8)
    tensors = {"a_blocks": watched("a", packed), "a_scales": watched("scales", packed[..., 0])}
    dequantised(tensors, {"quantization_config": MXFP4})["a"][1:2, 40:50, 2:5]
    assert read == {"a": 3 * 16, "scales": 3, "a_scale_inv": 2}


def test_what_does_not_fit_is_named():
    weight, scales = quantised_fp8(torch.randn(20, 20), (8, 8))
    good = {"a": weight, "a_scale_inv": scales}
    fp8 = {**FP8, "weight_block_size": [8, 8]}
    packed = torch.zeros(1, 4, 2, 16, dtype=torch.uint8)
    mxfp4 = {"b_blocks": packed, "b_scales": packed[..., 0]}
    for tensors, chosen, message in (
        (good, {"quant_method": "awq"}, "quant_method='awq' must be one of fp8, mxfp4"),
        (good, {**fp8, "weight_block_size": None}, "weight_block_size=None must be a block's"),
        (good, {**fp8, "weight_block_size": [8, 0]}, r"weight_block_size=\[8, 0\] must be"),
        ({"a": weight}, fp8, "a_scale_inv is missing"),
        ({"a_scale_inv": scales}, fp8, "a is missing, but a_scale_inv is there"),
        ({**good, "a": weight.bfloat16()}, fp8, "a is BF16 and must be F8_E4M3"),
        ({**good, "a": weight.view(torch.int8)}, fp8, "a is I8 and must be F8_E4M3"),
        ({**good, "a_scale_inv": scales.double()}, fp8, "a_scale_inv is F64 and must be one of"),
        ({**good, "a_scale_inv": scales.T[:2]}, fp8, r"has shape \(2, 3\) and must have \(3, 3\)"),
        ({**good, "a_scale_inv": scales[0, 0]}, fp8, r"has shape \(\) and must have \(3, 3\)"),
        ({"b_blocks": packed}, MXFP4, "b_scales is missing"),
        ({"b_scales": packed[..., 0]}, MXFP4, "b_blocks is missing"),
        ({**mxfp4, "b": weight}, MXFP4, "b is there beside b_blocks"),
        ({**mxfp4, "b_scales": packed[:, 1:, :, 0]}, MXFP4, r"\(1, 3, 2\) and must have \(1, 4, 2"),
        ({**mxfp4, "b_blocks": packed[..., :8]}, MXFP4, r"must be \[E O G 16\]"),
        ({**mxfp4, "b_scales": weight.view(torch.int8)}, MXFP4, "b_scales is I8 and must be U8"),
    ):
        with pytest.raises(ValueError, match=message):
            _read(tensors, chosen)


@ranks(1, 2)
def test_an_fp8_folder_gives_what_transformers_makes_of_it(tmp_path):
    pretrained(tmp_path / "in", dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        quantise_fp8(tmp_path / "in")
    dist.barrier()
    verify(tmp_path / "in")
    mesh = Mesh(tp=dist.get_world_size())
    decoder = decoder_from_hf(tmp_path / "in", mesh=mesh)
    whole = gather_whole(decoder)
    save_hf(decoder, tmp_path / "out", group=mesh.group("tp"), like=tmp_path / "in")
    save_hf(decoder, tmp_path / "own", group=mesh.group("tp"))
    dist.barrier()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "in",
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=(8, 8)
        ),
    )
    assert reference.dtype == torch.bfloat16 and whole.keys() == reference.state_dict().keys()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(whole[name], tensor), name
    for folder in ("out", "own"):
        verify(tmp_path / folder)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert "quantization_config" not in config and config["dtype"] == "bfloat16"
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert torch.equal(plain(TOKENS).logits, reference(TOKENS).logits)
    logits = decoder.float()(TOKENS, gather_logits=True).logits
    assert_close(logits, reference.float()(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_scales_of_another_shape_are_named_by_verify(tmp_path):
    pretrained(tmp_path)
    quantise_fp8(tmp_path, scale_dtype=torch.bfloat16)
    verify(tmp_path)
    edit_config(tmp_path, quantization_config={**FP8, "weight_block_size": [8, 16]})
    with pytest.raises(ValueError, match="weight_scale_inv has shape .* and must have"):
        verify(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    for read in (verify, decoder_from_hf):
        with pytest.raises(ValueError, match="quant_method='gptq' must be one of fp8, mxfp4"):
            read(tmp_path)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(ValueError, match="q_proj.weight_scale_inv"):
        verify(tmp_path)


def test_an_mxfp4_folder_gives_what_transformers_makes_of_it(tmp_path):
    model = tiny_gpt_oss()
    model.save_pretrained(tmp_path)
    quantise_mxfp4(tmp_path)
    verify(tmp_path)
    load_hf(model, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True),
    )
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(model(TOKENS).logits, reference(TOKENS).logits)
    save_hf(model, tmp_path / "out", like=tmp_path)
    verify(tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(plain(TOKENS).logits, reference(TOKENS).logits)


def test_fp8_experts_one_by_one_fill_a_stack(tmp_path):
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=10,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    model = transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    quantise_fp8(tmp_path)
    verify(tmp_path)
    load_hf(model, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=(8, 8)
        ),
    )
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name].to(tensor.dtype), tensor), name
