"""Adapters of experts go to a folder, come back at any layout, and are peft's and Mixtral's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import silu
from transformers import MixtralConfig, MixtralForCausalLM

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import save_hf
from megablocks_core.groups import Group, Mesh, gather_whole, marks, whole_tensor
from megablocks_core.layers.moe import GroupedExperts, LocalDispatcher, MoE, TopKRouter
from megablocks_core.parallel import add_lora, load_lora, merge_lora, remove_lora, save_lora
from megablocks_core.parallel.lora.lora import adapt
from megablocks_core.testing import ranks
from tests.layers.moe.experts.lora_cases import fill_factors

E, H, I = 4, 8, 16  # noqa: E741
F64 = torch.float64
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _moe(**groups):
    torch.manual_seed(0)
    return nn.ModuleDict({"experts": GroupedExperts(E, H, I, dtype=F64, **groups)})


@ranks(1, 2, 4)
def test_adapters_come_back_at_another_layout(tmp_path):
    size, group = dist.get_world_size(), Group.of(dist.group.WORLD)
    folder = Path(group.broadcast_object(str(tmp_path)))
    meshes = {"ep": Mesh(dp=size, ep=size), "etp": Mesh(tp=size, etp=size)}
    groups = {axis: {axis: mesh.expert.group(axis)} for axis, mesh in meshes.items()}
    for axis, own in groups.items():
        model = _moe(**own)
        adapt(
            model,
            {"experts.*.up_proj": (2, 3), "experts.*.down_proj": (3, 5)},
            rslora=True,
        )
        fill_factors(model)
        save_lora(model, folder / axis, group=group)
        expected = gather_whole(model)
        for other in ({}, *groups.values()):
            loaded = _moe(**other)
            if other is own:
                add_lora(loaded, "experts.*.up_proj", rank=2, alpha=3, rslora=True)
            names = load_lora(loaded, folder / axis)
            assert set(names) == {"experts.*.up_proj", "experts.*.down_proj"}
            ours = gather_whole(loaded)
            assert ours.keys() == expected.keys()
            assert all(torch.equal(ours[name], x) for name, x in expected.items())
            trained = {name for name, p in loaded.named_parameters() if p.requires_grad}
            assert trained == {name for name, _ in loaded.named_parameters() if "lora" in name}


def _saved(folder, patterns="*_proj"):
    model = _moe()
    add_lora(model, patterns, rank=2, alpha=3)
    save_lora(fill_factors(model), folder)
    return load_file(folder / "adapter_model.safetensors")


def test_the_names_are_those_of_peft(tmp_path):
    assert set(_saved(tmp_path / "adapters", "up_proj")) == {
        f"base_model.model.experts.{index}.up_proj.lora_{x}.weight"
        for index in range(E)
        for x in "AB"
    }


_UP = "base_model.model.experts.2.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{_UP}.lora_A.weight": None}, "experts.2.up_proj must have lora_A and _B, not"),
        (
            {f"{_UP}.lora_A.weight": None, f"{_UP}.lora_B.weight": None},
            r"experts.2.up_proj must have lora_A and _B, not \[\]",
        ),
        (
            {f"{_UP}.lora_A.weight": torch.ones(3, H), f"{_UP}.lora_B.weight": torch.ones(I, 3)},
            "experts.2.up_proj.*must have",
        ),
        ({f"{_UP}.lora_A.weight": torch.ones(2, I)}, "do not fit experts.2.up_proj"),
        (
            {"base_model.model.experts.4.up_proj.lora_A.weight": torch.ones(2, H)},
            "experts.4.up_proj.lora_A.weight names no layer",
        ),
    ],
)
def test_parts_of_a_stack_are_refused_and_nothing_changed(change, message, tmp_path):
    tensors = _saved(tmp_path / "adapters")
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, tmp_path / "adapters" / "adapter_model.safetensors")
    model = _moe()
    with pytest.raises(ValueError, match=message):
        load_lora(model, tmp_path / "adapters")
    assert all(p.requires_grad for p in model.parameters())
    assert not any("lora" in name for name in model.state_dict())


def test_scales_that_differ_in_a_stack_are_refused(tmp_path):
    _saved(tmp_path / "adapters")
    file = tmp_path / "adapters" / "adapter_config.json"
    text = file.read_text()
    file.write_text(text.replace('"alpha_pattern": {}', '"alpha_pattern": {"2.up_proj": 7}'))
    with pytest.raises(ValueError, match=r"experts.\*.up_proj must have one alpha, not \[3, 7\]"):
        load_lora(_moe(), tmp_path / "adapters")


class _Experts(nn.Module):
    """Experts as modules in a list, as peft knows them."""

    def __init__(self, experts):
        super().__init__()
        sizes = {"gate_proj": (H, I), "up_proj": (H, I), "down_proj": (I, H)}
        self.experts: Any = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
            for _ in range(E)
        )
        for index, expert in enumerate(self.experts):
            for name in PROJECTIONS:
                weight = getattr(experts, name)[index].detach().clone()
                expert[name].weight = nn.Parameter(weight)

    def forward(self, x, routing):
        y = torch.zeros_like(x)
        for slot, weights in zip(routing.indices.T, routing.weights.T, strict=True):
            parts = []
            for x_H, index in zip(x, slot.tolist(), strict=True):
                expert = self.experts[index]
                parts.append(
                    expert["down_proj"](silu(expert["gate_proj"](x_H)) * expert["up_proj"](x_H))
                )
            y = y + weights.unsqueeze(-1) * torch.stack(parts)
        return y


def _mixture():
    torch.manual_seed(0)
    return MoE(
        router=TopKRouter(H, num_experts=E, top_k=2, dtype=F64),
        dispatcher=LocalDispatcher(),
        experts=GroupedExperts(E, H, I, dtype=F64),
    )


X = torch.randn(6, H, dtype=F64, generator=torch.Generator().manual_seed(1))


def test_adapters_of_pefts_experts_are_loaded(tmp_path):
    import peft

    ours = _mixture()
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(PROJECTIONS))
    theirs = peft.get_peft_model(_Experts(ours.experts), config)  # pyright: ignore
    generator = torch.Generator().manual_seed(2)
    for name, parameter in theirs.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    theirs.save_pretrained(tmp_path / "adapters")
    names = load_lora(ours, tmp_path / "adapters", dtype=F64)
    assert set(names) == {f"experts.*.{name}" for name in PROJECTIONS}
    y, routing = ours(X)
    expected = theirs(X, routing)
    assert (y - expected).norm() < 1e-6 * expected.norm()  # peft keeps adapters in float32
    y.square().sum().backward(retain_graph=True)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if "lora" in name}
    for name in PROJECTIONS:
        for x in "AB":
            stack = ours.experts.get_parameter(f"{name}_lora_{x}.weight").grad
            for index, grad in enumerate(stack):
                path = f"base_model.model.experts.{index}.{name}.lora_{x}.default.weight"
                assert (grad - gradients[path]).norm() <= 1e-5 * (gradients[path].norm() + 1e-6)


def test_peft_loads_what_is_saved(tmp_path):
    import peft

    ours = _mixture()
    add_lora(ours, ["gate_proj", "down_proj"], rank=3, alpha=6)
    save_lora(fill_factors(ours), tmp_path / "adapters")
    theirs = peft.PeftModel.from_pretrained(_Experts(ours.experts), tmp_path / "adapters")
    y, routing = ours(X)
    expected = theirs(X, routing)
    assert (y - expected).norm() < 1e-6 * expected.norm()


def _mixtral(folder):
    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=41,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_local_experts=E,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "eager"
    model = MixtralForCausalLM(config).to(F64)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def _product(whole, layer, name):
    """A [E R I], B [E O R] and ``scale * B A`` [E O I] of one projection."""
    path = f"model.layers.{layer}.mlp.experts"
    low, high = (
        torch.stack([whole[f"{path}.{index}.{name}.lora_{x}.weight"] for index in range(E)])
        for x in "AB"
    )
    return low, high, 2.0 * high @ low


def _experts(model: Any):
    """Those of each layer, gate and up in one."""
    return [layer.mlp.experts for layer in model.model.layers]


@ranks(1, 2, 4)
def test_logits_and_gradients_are_those_of_mixtral_with_the_products_in_its_weights(tmp_path):
    size, group = dist.get_world_size(), Group.of(dist.group.WORLD)
    folder = Path(group.broadcast_object(str(tmp_path)))
    theirs = _mixtral(folder / "base")
    tokens = torch.arange(12).view(2, 6) * 7 % 41
    mesh = Mesh(tp=min(size, 2), ep=max(size // 2, 1), etp=min(size, 2))
    ours = decoder_from_hf(folder / "base", mesh=mesh)
    names = add_lora(ours, ["experts.*.*"], rank=3, alpha=6, seed=1)
    assert len(names) == 6
    whole = gather_whole(fill_factors(ours))
    with torch.no_grad():
        for index, experts in enumerate(_experts(theirs)):
            parts = [_product(whole, index, name)[2] for name in PROJECTIONS]
            experts.gate_up_proj.add_(torch.cat(parts[:2], dim=1))
            experts.down_proj.add_(parts[2])
    logits, expected = ours(tokens, gather_logits=True).logits, theirs(input_ids=tokens).logits
    # transformers rounds to float32 inside norms and rotary tables, in float64 models too.
    assert (logits - expected).norm() < 2e-6 * expected.norm()
    logits.square().mean().backward()
    expected.square().mean().backward()
    copies = mesh.size("dp")  # Ranks with the same tokens, of which each gives experts its own.
    grads = {
        name: whole_tensor(parameter.grad, specs) / copies
        for name, parameter, specs in marks(ours)
        if "lora" in name
    }
    for index, experts in enumerate(_experts(theirs)):
        dws = (*experts.gate_up_proj.grad.chunk(2, dim=1), experts.down_proj.grad)
        for name, dw in zip(PROJECTIONS, dws, strict=True):
            low, high, _ = _product(whole, index, name)
            path = f"model.layers.{index}.mlp.experts.{name}_lora"
            for x, expected_grad in (("A", 2.0 * high.mT @ dw), ("B", 2.0 * dw @ low.mT)):
                error = grads[f"{path}_{x}.weight"] - expected_grad
                assert error.norm() < 1e-5 * expected_grad.norm(), (path, x)

    merge_lora(ours)
    remove_lora(ours)
    save_hf(ours, folder / "merged", group=group)
    again = MixtralForCausalLM.from_pretrained(folder / "merged", dtype=F64)
    again.set_experts_implementation("eager")
    logits = again(input_ids=tokens).logits
    assert (logits - expected).norm() < 2e-6 * expected.norm()
