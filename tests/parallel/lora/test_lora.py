"""Adapters compute, train and start as in one process, on every kind of layer and any cut."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, Segment, chunk_slice, gather_from, marks, specs_of
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    add_lora,
    gather,
    gather_features,
    merge_lora,
    remove_lora,
    tensor_parallelize,
)
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.parallel.lora_models import fill
from tests.parallel.tiny_models import tiny_model

_TOKENS = torch.arange(16).view(2, 8) * 7 % 101
_ALL = ["embed_tokens", "*_proj", "lm_head"]


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _loss(output):
    logits = output.logits if hasattr(output, "logits") else output
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    return (logits.reshape(-1) * weights).sum() + logits.square().mean()


@ranks(1, 2, 4)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("kind", "num_key_value_heads"), [("llama", 2), ("qwen3", 4)])
def test_transformers_models_with_adapters_equal_one_process(
    kind, num_key_value_heads, sequence_parallel, before
):
    def build(group):
        model = tiny_model(kind, num_key_value_heads=num_key_value_heads)
        if before:
            fill_and_add(model)
            tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        else:
            tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
            fill_and_add(model)
        return model

    def fill_and_add(model):
        add_lora(model, _ALL, rank=3, alpha=6)
        fill(model)

    assert_parallel_equivalence(
        build, {"input_ids": _TOKENS}, group=_world(), loss=_loss, same_start=True
    )


_LAYERS = {
    "column": lambda group, sp: ColumnParallelLinear(12, 16, sequence_parallel=sp, group=group),
    "packed": lambda group, sp: ColumnParallelLinear(
        12, 16, segments=(Segment(8), Segment(4), Segment(4)), sequence_parallel=sp, group=group
    ),
    "gathered": lambda group, sp: ColumnParallelLinear(
        12, 16, gather_output=True, sequence_parallel=sp, group=group
    ),
    "row": lambda group, sp: RowParallelLinear(
        12, 16, input_is_parallel=False, sequence_parallel=sp, group=group
    ),
    "packed row": lambda group, sp: RowParallelLinear(
        12,
        16,
        input_is_parallel=False,
        segments=(Segment(8), Segment(4)),
        sequence_parallel=sp,
        group=group,
    ),
    "embedding": lambda group, sp: VocabParallelEmbedding(
        9, 16, padding_idx=4, sequence_parallel=sp, group=group
    ),
}


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", _LAYERS)
def test_layers_with_adapters_equal_one_process(kind, sequence_parallel):
    world = _world()
    cuts_input = sequence_parallel and kind in ("column", "packed", "gathered")
    cuts_output = sequence_parallel and not cuts_input

    def build(group):
        layer = nn.Sequential(_LAYERS[kind](group, sequence_parallel))
        add_lora(layer, "0", rank=2, alpha=3)
        return fill(layer)

    def own(x):
        return x[..., chunk_slice(8, world.size, world.rank), :] if cuts_input else x

    def join(y):
        if cuts_output:
            return gather_from(y, dim=-2, group=world)
        return gather_features(y, _cut(kind, world)) if kind in ("column", "packed") else y

    ids = torch.arange(16).view(2, 8) * 5 % 9
    features = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    assert_parallel_equivalence(
        build,
        (ids if kind == "embedding" else features,),
        group=world,
        loss=_loss,
        split=lambda inputs: tuple(own(x) for x in inputs),
        join=join,
        same_start=True,
    )


def _cut(kind, group):
    return specs_of(_LAYERS[kind](group, False), "weight")[0]


def _mlp():
    return nn.ModuleDict(
        {
            "up": nn.Linear(8, 16),
            "act": nn.GELU(),
            "down": nn.Linear(16, 8),
            "norm": nn.LayerNorm(8),
        }
    )


def test_only_adapters_train_and_other_names_stay():
    model = _mlp()
    names = list(model.state_dict())
    assert add_lora(model, ["up", "down"], rank=2, alpha=4) == ("up", "down")
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "up.lora_A.weight",
        "up.lora_B.weight",
        "down.lora_A.weight",
        "down.lora_B.weight",
    ]
    assert [name for name in model.state_dict() if "lora" not in name] == names
    model.load_state_dict(_mlp().state_dict(), strict=False)


def test_a_second_call_leaves_adapters_that_are_there_alone():
    model = _mlp()
    add_lora(model, "up", rank=2, alpha=4)
    model.get_parameter("up.lora_A.weight").requires_grad_(False)
    add_lora(model, "down", rank=3, alpha=4)
    flags = {name: p.requires_grad for name, p in model.named_parameters() if "lora" in name}
    assert list(flags.values()) == [False, True, True, True]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 12 / 4), (True, 12 / 2)])
def test_the_scale(rslora, scale):
    model = nn.Sequential(nn.Linear(8, 8))
    x = torch.randn(3, 8)
    y = model(x)
    add_lora(model, "0", rank=4, alpha=12, rslora=rslora)
    assert torch.equal(model(x), y)
    fill(model)
    a, b = model.get_parameter("0.lora_A.weight"), model.get_parameter("0.lora_B.weight")
    assert_close(model(x), y + scale * (x @ a.T @ b.T))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("q_proj", ["layers.0.attn.q_proj", "layers.1.attn.q_proj"]),
        ("layers.1.attn.*", ["layers.1.attn.q_proj", "layers.1.attn.k_proj"]),
        ("0.attn.*_proj", ["layers.0.attn.q_proj", "layers.0.attn.k_proj"]),
        ("layers.*.attn.k_proj", ["layers.0.attn.k_proj", "layers.1.attn.k_proj"]),
    ],
)
def test_patterns(pattern, names):
    layers = [
        nn.ModuleDict({"attn": nn.ModuleDict({x: nn.Linear(4, 4) for x in ("q_proj", "k_proj")})})
        for _ in range(2)
    ]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    assert list(add_lora(model, pattern, rank=2, alpha=4)) == names


@pytest.mark.parametrize(
    ("patterns", "options", "message"),
    [
        ("gone", {}, r"patterns must name layers of ModuleDict, not \['gone'\]"),
        ([], {}, "patterns must name layers"),
        (["up", "gate.*"], {}, r"not \['gate.\*'\]"),
        ("norm", {}, "norm is a LayerNorm; adapters are served on"),
        ("up", {"rank": 9}, "rank=9 must lie between 1 and 8, the smaller size of up"),
        ("up", {"rank": 0}, "rank=0 must lie between 1 and 8"),
        ("up", {"rank": 2.5}, "rank=2.5 must be an integer"),
        ("up", {"rank": True}, "rank=True must be an integer"),
        ("up", {"rank": "2"}, "rank='2' must be an integer"),
        ("up", {"dtype": torch.int64}, "dtype=torch.int64 must be floating .* adapter of up"),
        ("up", {"dtype": torch.float8_e4m3fn}, "dtype=torch.float8_e4m3fn must be floating"),
        ("up", {"alpha": 0}, "alpha=0 must be above 0"),
        ("up", {"alpha": float("nan")}, "alpha=nan must be above 0"),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_changed(patterns, options, message):
    model = _mlp()
    with pytest.raises(ValueError, match=message):
        add_lora(model, patterns, **{"rank": 2, "alpha": 4, **options})
    assert all(p.requires_grad for p in model.parameters())
    assert not any("lora" in name for name in model.state_dict())


def test_a_second_adapter_is_refused():
    model = _mlp()
    add_lora(model, "up", rank=2, alpha=4)
    with pytest.raises(ValueError, match="up has an adapter already"):
        add_lora(model, ["down", "up"], rank=2, alpha=4)
    assert not hasattr(model["down"], "lora_A")


@ranks(2)
def test_adapters_behind_a_data_parallel_wrapper_are_refused():
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="add adapters before DistributedDataParallel"):
        add_lora(model, "0", rank=2, alpha=4)


def test_removing_restores_the_model():
    model, bare = _mlp(), _mlp()
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    add_lora(model, ["up", "down"], rank=2, alpha=4)
    remove_lora(model)
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    assert str(model) == str(bare)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gather_makes_adapters_whole_again(sequence_parallel):
    torch.manual_seed(0)
    model = tiny_model("llama", num_key_value_heads=1)
    add_lora(model, _ALL, rank=3, alpha=6)
    fill(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(input_ids=_TOKENS).logits
    report = tensor_parallelize(model, group=_world(), sequence_parallel=sequence_parallel)
    layer = "model.layers.0.self_attn"
    assert f"{layer}.q_proj.lora_B.weight" in report.cut
    assert f"{layer}.o_proj.lora_A.weight" in report.cut
    assert f"{layer}.q_proj.lora_A.weight" in report.summed
    assert model.lm_head.get_parameter("lora_B.weight").shape[0] < 101
    gather(model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(not specs for _, _, specs in marks(model))
    assert torch.equal(model(input_ids=_TOKENS).logits, expected)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in before if "lora" in name}


@ranks(2)
def test_a_refused_cut_leaves_adapters_as_they_were():
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 9))
    add_lora(model, ["0", "2"], rank=2, alpha=4)
    fill(model)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    y, names = model(x), list(model.state_dict())
    with pytest.raises(ValueError, match="must divide evenly"):
        tensor_parallelize(model, {"2": "column"}, group=_world())
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), y)


@ranks(2)
def test_a_merged_adapter_is_not_cut():
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
    add_lora(model, "0", rank=2, alpha=4)
    merge_lora(model)
    with pytest.raises(ValueError, match="0 is merged with its adapter"):
        tensor_parallelize(model, {"0": "column", "2": "row"}, group=_world())


@ranks(2)
def test_whole_factors_keep_their_identity_for_an_optimizer():
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
    add_lora(model, ["0", "2"], rank=2, alpha=4)
    a, b = model.get_parameter("0.lora_A.weight"), model.get_parameter("2.lora_B.weight")
    tensor_parallelize(model, {"0": "column", "2": "row"}, group=_world())
    assert (
        model.get_parameter("0.lora_A.weight") is a and model.get_parameter("2.lora_B.weight") is b
    )


class _PeftLinear(nn.Module):
    """How peft wraps a linear layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 6, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("plan", [{"0": "column", "2": "row"}, {"2": "row"}])
def test_a_layer_that_peft_has_wrapped_is_refused_by_name(plan):
    """In the plan or not: a wrapper changes names, so that a model's own plan passes it by."""
    model = nn.Sequential(_PeftLinear(nn.Linear(8, 6)), nn.GELU(), nn.Linear(6, 8))
    with pytest.raises(ValueError, match=r"0 is wrapped by a .*_PeftLinear, .* load_lora"):
        tensor_parallelize(model, plan, group=LOCAL)
    with pytest.raises(ValueError, match=r"0 is a .*_PeftLinear; adapters are served"):
        add_lora(model, "0", rank=2, alpha=4)
