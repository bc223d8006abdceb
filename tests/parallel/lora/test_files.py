"""Adapters go to a folder and come back at any cut; peft reads it, and its folders are read."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from megablocks_core.groups import LOCAL, Group, gather_whole
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    add_lora,
    load_lora,
    save_lora,
    tensor_parallelize,
)
from megablocks_core.parallel.lora.lora import adapt
from megablocks_core.parallel.tensor.adapters import adapted_layers
from megablocks_core.testing import ranks
from tests.parallel.lora_models import fill
from tests.parallel.tiny_models import tiny_model

_TOKENS = torch.arange(16).view(2, 8) * 7 % 101


def _model(group=LOCAL):
    torch.manual_seed(0)
    return nn.Sequential(
        VocabParallelEmbedding(9, 8, group=group),
        ColumnParallelLinear(8, 16, group=group),
        RowParallelLinear(16, 8, group=group),
        nn.Linear(8, 8),
    )


@ranks(1, 2, 4)
@pytest.mark.parametrize("present", [True, False])
def test_adapters_come_back_at_another_cut(present, tmp_path):
    group = Group.of(dist.group.WORLD)
    folder = group.broadcast_object(str(tmp_path / "adapters"))
    model = _model(group)
    add_lora(model, ["0", "1", "2"], rank=2, alpha=3, rslora=True)
    add_lora(model, "3", rank=4, alpha=2.5, rslora=True)
    save_lora(fill(model), folder, group=group)

    for other in (LOCAL, group):
        loaded = _model(other)
        if present:
            add_lora(loaded, ["0", "1", "2"], rank=2, alpha=3, rslora=True)
        names = load_lora(loaded, folder)
        assert set(names) == {"0", "1", "2", "3"}
        for name, tensor in gather_whole(model).items():
            assert torch.equal(gather_whole(loaded)[name], tensor), name
        ids = torch.arange(9)
        torch.testing.assert_close(loaded(ids), model(ids))
        assert [p.requires_grad for p in loaded.parameters()] == [
            p.requires_grad for p in model.parameters()
        ]


def test_the_names_are_those_of_peft(tmp_path):
    model = _model()
    add_lora(model, ["0", "1"], rank=2, alpha=3)
    save_lora(model, tmp_path / "adapters")
    assert {path.name for path in tmp_path.rglob("*.*")} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert set(load_file(tmp_path / "adapters" / "adapter_model.safetensors")) == {
        "base_model.model.0.lora_embedding_A",
        "base_model.model.0.lora_embedding_B",
        "base_model.model.1.lora_A.weight",
        "base_model.model.1.lora_B.weight",
    }


@pytest.mark.parametrize("alphas", [(8, 32, 64), (8, 32, 8)])
def test_a_name_that_ends_in_another_keeps_its_own_scale(alphas, tmp_path):
    names = ("first", "up", "block.up")
    model, other = (
        nn.ModuleDict(
            {
                "first": nn.Linear(4, 4),
                "up": nn.Linear(4, 4),
                "block": nn.ModuleDict({"up": nn.Linear(4, 4)}),
            }
        )
        for _ in range(2)
    )
    settings = {name: (2, alpha) for name, alpha in zip(names, alphas, strict=True)}
    adapt(model, settings, rslora=False)
    save_lora(model, tmp_path / "adapters")
    load_lora(other, tmp_path / "adapters")
    assert {name: (x.rank, x.alpha) for name, _, x in adapted_layers(other)} == settings


@ranks(2)
def test_a_folder_with_files_is_refused_on_every_rank(tmp_path):
    group = Group.of(dist.group.WORLD)
    model = _model(group)
    add_lora(model, "1", rank=2, alpha=3)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        save_lora(model, tmp_path, group=group)


def test_a_model_without_adapters_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="must have adapters"):
        save_lora(_model(), tmp_path / "adapters")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not served"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not served"),
        ({"bias": "all"}, "bias='all' is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not served"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' is not served"),
        ({"use_qalora": True}, "use_qalora=True is not served"),
    ],
)
def test_settings_that_are_not_served_are_refused(settings, message, tmp_path):
    model = _model()
    add_lora(model, "1", rank=2, alpha=3)
    save_lora(model, tmp_path / "adapters")
    file = tmp_path / "adapters" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(ValueError, match=message):
        load_lora(model, tmp_path / "adapters")


_GOOD = {
    "base_model.model.1.lora_A.weight": torch.ones(2, 8),
    "base_model.model.1.lora_B.weight": torch.ones(16, 2),
}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"base_model.model.9.lora_A.weight": torch.ones(2, 8)}, "9.lora_A.weight names no layer"),
        ({"base_model.model.1.lora_C.weight": torch.ones(2, 8)}, "lora_C.weight names no layer"),
        ({"base_model.model.2.lora_A.weight": torch.ones(2, 16)}, "2 must have lora_A and _B"),
        ({"base_model.model.1.lora_A.weight": torch.ones(2, 7)}, r"\[2 7\] and \[16 2\] do not"),
        ({"base_model.model.1.lora_B.weight": torch.ones(16, 3)}, r"\[16 3\] do not fit 1"),
        ({}, "1 has an adapter of another rank"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors, message, tmp_path):
    model = _model()
    add_lora(model, "1", rank=2, alpha=3)
    save_lora(model, tmp_path / "adapters")
    save_file({**_GOOD, **tensors}, tmp_path / "adapters" / "adapter_model.safetensors")
    other = _model()
    add_lora(other, "1", rank=2 if tensors else 3, alpha=3)
    before = {name: x.clone() for name, x in other.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_lora(other, tmp_path / "adapters")
    assert all(torch.equal(before[name], x) for name, x in other.state_dict().items())


# The same against peft itself.

_TARGETS = ["embed_tokens", "q_proj", "v_proj", "down_proj", "lm_head"]


def _peft_model(**options):
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=_TARGETS, **options)
    model = peft.get_peft_model(tiny_model("llama"), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"1.*v_proj": 2}},
    ],
)
def test_adapters_of_peft_are_loaded(options, tmp_path):
    theirs = _peft_model(**options)
    theirs.save_pretrained(tmp_path / "adapters")
    torch.manual_seed(0)
    ours = tiny_model("llama")
    load_lora(ours, tmp_path / "adapters", dtype=torch.float64)
    expected = theirs(input_ids=_TOKENS).logits
    logits = ours(input_ids=_TOKENS).logits
    # peft keeps adapters in float32.
    assert (logits - expected).norm() < 1e-5 * expected.norm()

    (logits.square().mean()).backward()
    (expected.square().mean()).backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        path, _, leaf = name.removesuffix(".weight").rpartition(".")
        ending = "default" if "embedding" in leaf else "default.weight"
        gradient = gradients[f"base_model.model.{path}.{leaf}.{ending}"].grad
        assert (parameter.grad - gradient).norm() < 1e-5 * gradient.norm() + 1e-9, name


@ranks(2)
def test_adapters_of_peft_are_loaded_into_a_cut_model(tmp_path):
    theirs = _peft_model()
    group = Group.of(dist.group.WORLD)
    folder = group.broadcast_object(str(tmp_path / "adapters"))
    if group.rank == 0:
        theirs.save_pretrained(folder)
    group.broadcast_object(None)
    torch.manual_seed(0)
    ours = tiny_model("llama")
    tensor_parallelize(ours, group=group, sequence_parallel=True)
    load_lora(ours, folder)
    expected = theirs(input_ids=_TOKENS).logits
    assert (ours(input_ids=_TOKENS).logits - expected).norm() < 1e-5 * expected.norm()


def test_peft_loads_what_is_saved(tmp_path):
    import peft

    torch.manual_seed(0)
    ours, base = tiny_model("llama"), tiny_model("llama")
    base.load_state_dict(ours.state_dict())
    add_lora(ours, ["embed_tokens", "q_proj", "lm_head"], rank=3, alpha=6)
    add_lora(ours, "layers.1.mlp.down_proj", rank=2, alpha=2.5)
    save_lora(fill(ours), tmp_path / "adapters")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    expected = ours(input_ids=_TOKENS).logits
    logits = theirs(input_ids=_TOKENS).logits
    assert (logits - expected).norm() < 1e-5 * expected.norm()
    theirs.merge_and_unload()


def test_a_peft_model_is_refused_by_the_name_of_a_layer():
    theirs = _peft_model()
    for model in (theirs, theirs.base_model.model):
        with pytest.raises(ValueError, match="embed_tokens is wrapped by a peft"):
            tensor_parallelize(model, group=LOCAL)


@ranks(2)
def test_cut_adapters_are_not_saved_by_a_part_of_their_ranks(tmp_path):
    group = Group.of(dist.group.WORLD)
    model = _model(group)
    add_lora(model, ["1"], rank=2, alpha=1)
    message = r"group of ranks \[0\] must include the ranks \[0, 1\], which hold parts of 1"
    with pytest.raises(ValueError, match=message):
        save_lora(model, tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


@ranks(4)
def test_ranks_that_save_without_their_group_leave_one_whole_folder(tmp_path):
    """Equal adapters, equal path, no ``group``: one rank is first and the others are told."""
    group = Group.of(dist.group.WORLD)
    folder = Path(group.broadcast_object(str(tmp_path))) / "adapters"
    model = _model()
    add_lora(model, ["1"], rank=2, alpha=1)
    group.barrier()
    try:
        save_lora(model, folder)
        refused = None
    except ValueError as error:
        refused = str(error)
    outcomes = group.all_gather_object(refused)
    assert outcomes.count(None) == 1
    assert all("must be new or an empty folder" in text for text in outcomes if text)
    assert [path.name for path in folder.parent.iterdir()] == ["adapters"]
    assert load_lora(_model(), folder) == ("1",)
