"""Hybrid models equal transformers' at any layout, through Hugging Face folders."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import reduce_gradients
from megablocks_core.testing import ranks

F64 = torch.float64
TOKENS = torch.arange(28).view(4, 7) * 7 % 50
SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "eos_token_id": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {
    "num_hidden_layers": 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 2, "state_size": 4},
    "mamba2": {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 4}
    | {"state_size": 8, "chunk_size": 4},
    "nemotron_h": {
        **HEADS,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "intermediate_size": 40,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
    "bamba": {**HEADS, **MAMBA2, "intermediate_size": 40, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **HEADS,
        **MAMBA2,
        "layer_types": ["mamba", "attention"],
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "position_embedding_type": "rope",
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.25,
        "logits_scaling": 6,
    },
}
EXPERTS = ("nemotron_h", "granitemoehybrid")


def _layouts(family: str) -> list[dict[str, int]]:
    """Of this many ranks, with experts cut where there are some."""
    world = dist.get_world_size()
    layouts = [{"tp": world}]
    if family in EXPERTS:
        layouts += [{"ep": 2}] if world == 2 else [{"tp": 2, "ep": 2}]
    return layouts


@cache
def _theirs(family: str) -> Any:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for name, parameter in model.named_parameters():  # Far from the initial values.
        if name.rpartition(".")[2] not in ("A_log", "D", "dt_bias"):
            nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.1)
    return model


@cache
def _expected(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """transformers' logits and gradients by our names, in float64."""
    model = _theirs(family).to(F64)
    output = model(TOKENS, use_cache=False)
    (output.logits * _weights()).sum().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return output.logits.detach(), gradients


def _weights() -> torch.Tensor:
    return torch.randn(4, 7, 50, dtype=F64, generator=torch.Generator().manual_seed(4))


def _folder(tmp_path, family):
    folder = tmp_path / family
    if not dist.is_initialized() or dist.get_rank() == 0:
        _theirs(family).float().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


def _gradient_folder(tmp_path, family):
    """A folder whose tensors are transformers' gradients, in the files' own layout."""
    _, gradients = _expected(family)
    model = _theirs(family)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(gradients[name])
    folder = tmp_path / f"{family}-gradients"
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    if dist.is_initialized():
        dist.barrier()
    return folder


def _compare(tmp_path, family, sizes, *, sequence_parallel=False):
    mesh, world = Mesh(**sizes), Mesh().group("dp")
    dp, spec = mesh.group("dp"), DecoderSpec.from_hf(tmp_path / family)
    options = {"mesh": mesh, "sequence_parallel": sequence_parallel, "dtype": F64}
    decoder = Decoder(spec, device="meta", **options)
    load_hf(decoder, tmp_path / family, group=world)
    rows = slice(4 * dp.rank // dp.size, 4 * (dp.rank + 1) // dp.size)
    output = decoder(TOKENS[rows], gather_logits=True)
    (output.logits * _weights()[rows]).sum().backward()
    reduce_gradients(decoder, group=dp, expert_group=mesh.expert.group("edp"), reduction="sum")
    _assert_close("logits", output.logits, _expected(family)[0][rows])
    wanted = Decoder(spec, device="meta", **options)
    load_hf(wanted, tmp_path / f"{family}-gradients", group=world)
    pairs = zip(decoder.named_parameters(), wanted.parameters(), strict=True)
    for (name, parameter), gradient in pairs:
        _assert_close(name, parameter.grad, gradient)


def _assert_close(name, ours, theirs):
    """Transformers rounds to float32 inside norms, rotary tables, scans and routers."""
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, family):
    _folder(tmp_path, family)
    _gradient_folder(tmp_path, family)
    _compare(tmp_path, family, {})


@ranks(2, 4, timeout=300)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers_at_any_layout(tmp_path, family):
    _folder(tmp_path, family)
    _gradient_folder(tmp_path, family)
    for sizes in _layouts(family):
        _compare(tmp_path, family, sizes)
        if "tp" in sizes:
            _compare(tmp_path, family, sizes, sequence_parallel=True)


@ranks(4, timeout=300)
@pytest.mark.parametrize(
    "family",
    [
        "granitemoehybrid",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if "gran" not in name),
    ],
)
def test_every_layout_writes_the_same_bytes_and_reads_the_others(tmp_path, family):
    world = Mesh().group("dp")
    source, written = _folder(tmp_path, family), []
    experts = [{"ep": 2}, {"tp": 2, "ep": 2}] if family in EXPERTS else []
    for number, sizes in enumerate([{}, {"tp": 2}, {"tp": 4}, *experts]):
        decoder = Decoder(DecoderSpec.from_hf(source), mesh=Mesh(**sizes))
        load_hf(decoder, source, group=world)
        source = tmp_path / f"{number}"
        save_hf(decoder, source, group=world, max_file_bytes=40000)
        if world.rank == 0:
            verify(source)
            written.append({path.name: path.read_bytes() for path in source.iterdir()})
            assert written[-1] == written[0]
    if world.rank == 0:
        again = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
        for name, tensor in _theirs(family).state_dict().items():
            assert torch.equal(again[name], tensor), name
