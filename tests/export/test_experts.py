"""Experts of whole models: who writes which, and what absent entries of their configs mean."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf
from megablocks_core.groups import (
    LOCAL,
    Group,
    Mesh,
    Segment,
    ShardSpec,
    gather_whole,
    mark,
    marks,
)
from megablocks_core.layers import Decoder
from megablocks_core.parallel import tensor_parallelize
from megablocks_core.testing import ranks
from tests.export.family_checks import TOKENS, saved_by_transformers
from tests.export.references import EXPERTS as STACKED
from tests.export.references import tiny

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZES, "num_local_experts": 4},
    "olmoe": {**SIZES, "num_experts": 4},
    "qwen3_moe": {**SIZES, "num_experts": 4, "moe_intermediate_size": 12},
    "glm4_moe": {**SIZES, "n_routed_experts": 4, "moe_intermediate_size": 12},
}
WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.mark.parametrize("family", MODELS)
@ranks(2)
def test_f_173_a_rank_of_ep_holds_and_writes_its_own_experts(tmp_path, family):
    """E=4 at ep 2: the second rank has experts 2 and 3, each full of its number.

    The first rank writes one file, or each rank writes some.
    """
    folder = tmp_path / "weights"
    if dist.get_rank() == 0:
        saved_by_transformers(family, MODELS[family], folder)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensor.fill_(_number(name))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    mesh, world = Mesh(ep=2), Mesh().group("dp")
    decoder: Any = decoder_from_hf(folder, mesh=mesh)
    experts = decoder.model.layers[1].mlp.experts
    first = 2 * mesh.expert.group("ep").rank
    for name in ("gate_proj", "up_proj", "down_proj"):
        stack = getattr(experts, name)
        assert [one.unique().tolist() for one in stack.detach()] == [[first], [first + 1]]
    expected = load_file(folder / "model.safetensors")
    for limit in (2**30, 2**13):
        out = tmp_path / f"{limit}"
        save_hf(decoder, out, group=world, like=folder, max_file_bytes=limit)
        dist.barrier()
        files = [load_file(path) for path in out.glob("*.safetensors")]
        assert (len(files) > 1) == (limit == 2**13)
        written = {name: tensor for file in files for name, tensor in file.items()}
        assert written.keys() == expected.keys()
        for name, tensor in written.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("family", "given", "expected"),
    [
        ("mixtral", None, True),  # Its configs do not have the entry.
        *(("olmoe", given, bool(given)) for given in (None, False, True)),
        *(("qwen3_moe", given, bool(given)) for given in (None, False, True)),
        *(("glm4_moe", given, given is not False) for given in (None, False, True)),
    ],
)
def test_f_176_weights_are_renormalised_as_the_family_has_it(tmp_path, family, given, expected):
    """Logits are those of transformers, and others are not: with the entry, and without it."""
    words = {} if given is None else {"norm_topk_prob": given}
    model = saved_by_transformers(family, MODELS[family] | words, tmp_path)
    if given is None:
        _edit(tmp_path, remove="norm_topk_prob")
    decoder = decoder_from_hf(tmp_path)
    moe = decoder.spec.moe
    assert moe is not None and moe.renormalize is expected
    other = replace(decoder.spec, moe=replace(moe, renormalize=not expected))
    wrong = Decoder(other, device="meta", dtype=torch.float32)
    load_hf(wrong, tmp_path)
    with torch.no_grad():
        theirs = model(TOKENS).logits
        errors = [(one(TOKENS).logits - theirs).norm() / theirs.norm() for one in (decoder, wrong)]
    assert errors[0] <= 2e-6 < 1e-3 < errors[1]


# What the plans of transformers' own cut; the one of GLM-4.5 leaves norms beside cut heads open.
@pytest.mark.parametrize("case", [case for case in STACKED if case != "glm4_moe"])
@ranks(2)
def test_a_cut_model_of_transformers_has_its_share_of_every_expert(tmp_path, case):
    """Stacked, gate beside up: filled on meta as its own plan cuts it, and written again."""
    world = Mesh().group("dp")
    whole = _saved(case, tmp_path / "in")
    model = _on_meta(tmp_path / "in")
    tensor_parallelize(model, group=world)
    cut = [specs for name, _, specs in marks(model) if ".experts." in name]
    assert cut and all(cut)
    load_hf(model, tmp_path / "in", group=world, device="cpu")
    with torch.no_grad():
        expected, logits = (one(TOKENS, use_cache=False).logits for one in (whole, model))
    assert (logits - expected).norm() <= 1e-5 * expected.norm()
    _check_written(model, tmp_path, world)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "nemotron_h"])
@ranks(4)
def test_stacks_that_are_dealt_and_cut_are_filled_and_written(tmp_path, case):
    """ep 2 x tp 2: by marks on the stacks of a model of transformers, whatever runs it."""
    world, mesh = Mesh().group("dp"), Mesh(tp=2)
    ep, tp = mesh.group("dp"), mesh.group("tp")
    whole = _saved(case, tmp_path / "in").state_dict()
    model = _on_meta(tmp_path / "in")
    stacks = [
        (module, name, stack)
        for module in model.modules()
        for name, stack in module.named_parameters(recurse=False)
        if name in ("gate_up_proj", "up_proj", "down_proj")
    ]
    assert len(stacks) >= 2
    for module, name, stack in stacks:
        experts, outputs, inputs = stack.shape
        parts = (Segment(outputs // 2),) * 2 if name == "gate_up_proj" else None
        cut = ShardSpec(2, tp) if name == "down_proj" else ShardSpec(1, tp, parts)
        share = [experts // 2, outputs, inputs]
        share[cut.dim] //= 2
        setattr(module, name, nn.Parameter(torch.empty(share, device="meta")))
        mark(module, name, ShardSpec(0, ep), cut, expert=True)
    load_hf(model, tmp_path / "in", group=world, device="cpu")
    _check_written(model, tmp_path, world)
    for name, tensor in gather_whole(model).items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("style", ["grouped_gemm", "ep_dispatch_experts", "ep_router"])
def test_plans_that_deal_whole_experts_are_refused_by_name(style):
    """transformers' own plans for expert parallelism, ``base_model_ep_plan``."""
    model = tiny("mixtral", torch.float32)
    name = "model.layers.*.mlp.experts.gate_up_proj"
    with pytest.raises(ValueError, match=rf"experts\.gate_up_proj'\]='{style}' must be one of"):
        tensor_parallelize(model, {name: style}, group=LOCAL)
    model._tp_plan = {name: style}
    with pytest.raises(ValueError, match=rf"not served: {{.*'{style}'}}"):
        tensor_parallelize(model, group=LOCAL)


def _saved(case: str, folder: Path) -> Any:
    """A model of transformers, which the first rank writes."""
    model = tiny(case, torch.float32)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def _on_meta(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # grouped products want wider rows
        return transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager"
        ).eval()


def _check_written(model: nn.Module, folder: Path, world: Group) -> None:
    save_hf(model, folder / "out", group=world, max_file_bytes=20_000)
    dist.barrier()
    files = [load_file(path) for path in (folder / "out").glob("*.safetensors")]
    written = {name: tensor for held in files for name, tensor in held.items()}
    kept = load_file(folder / "in" / "model.safetensors")
    assert len(files) > 2 and written.keys() == kept.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, kept[name]), name


def _number(name: str) -> float:
    return float(name.split(".experts.")[1].split(".")[0])


def _edit(folder, *, remove):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop(remove, None)
    file.write_text(json.dumps(config))
