"""Adapters of experts give what one process gives, in any layout and under any wrapper."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import Mesh, gather_from, gather_whole, marks
from megablocks_core.layers import Decoder, DecoderSpec, MoESpec
from megablocks_core.layers.moe import GroupedExperts, LocalDispatcher
from megablocks_core.parallel import (
    DataParallel,
    ShardedOptimizer,
    add_lora,
    fully_shard,
    recompute_modules,
    reduce_gradients,
    reset_parameters,
)
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.layers.moe.experts.cases import routing
from tests.layers.moe.experts.lora_cases import with_adapters
from tests.layers.moe.test_layouts import FORMS, LAYOUTS, E, F, H, Results, layer, tokens_of

F64 = torch.float64


def _check(mesh, *, sp, dispatcher, form, patterns, kind="plain"):
    """One training step in this layout against the plain loop over all tokens in one process."""
    dp, world = mesh.group("dp"), mesh.group("tp", "dp")
    holders = world if sp else dp
    x = tokens_of(kind)
    own = torch.arange(x.shape[0]).tensor_split(holders.size)[holders.rank]

    def build(group):
        options = {"mesh": mesh, "dispatcher": dispatcher, "sp": sp} if group is world else {}
        part = layer("softmax", form if group is world else "loop", **options)
        return Results(with_adapters(part, patterns))

    def reduce(part):
        expert_group = mesh.expert.group("edp")
        reduce_gradients(part, group=dp, expert_group=expert_group, reduction="sum")

    assert_parallel_equivalence(
        build,
        x,
        group=world,
        loss=lambda y: (y + y.square()).sum(),
        split=lambda inputs: inputs[own],
        join=lambda y: gather_from(y, dim=0, group=holders),
        reduce=reduce,
        same_start=True,
    )


@ranks(1, 2, 4)
def test_every_layout_equals_the_loop_of_one_process():
    patterns = ("*_proj", ["experts.*.up_proj"], ["experts.*.gate_proj", "experts.*.down_proj"])
    for number, sizes in enumerate(LAYOUTS[dist.get_world_size()]):
        sizes = dict(sizes)
        sp = sizes.pop("sp", False)
        mesh = Mesh(**sizes)
        dispatcher, form = ("all-to-all", "all-gather")[number % 2], FORMS[(number + 2) % 4]
        _check(mesh, sp=sp, dispatcher=dispatcher, form=form, patterns=patterns[number % 3])
        kind = ("one expert", "one token", "few")[number % 3]
        _check(mesh, sp=sp, dispatcher="all-to-all", form="grouped", patterns="*_proj", kind=kind)
        mesh.close()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@ranks(1, 2, 4)
def test_every_form_in_every_layout(form):
    for sizes in LAYOUTS[dist.get_world_size()]:
        sizes = dict(sizes)
        sp = sizes.pop("sp", False)
        mesh = Mesh(**sizes)
        for dispatcher in ("all-to-all", "all-gather"):
            _check(mesh, sp=sp, dispatcher=dispatcher, form=form, patterns="*_proj")
        mesh.close()


@ranks(1, 2, 4)
@pytest.mark.parametrize("way", ["seed", "generator", "meta"])
def test_initial_values_have_the_bits_of_one_process(way):
    size = dist.get_world_size()

    def build(**groups):
        torch.manual_seed(5)
        with torch.device("meta" if way == "meta" else "cpu"):
            experts = torch.nn.ModuleDict({"experts": GroupedExperts(E, H, F, **groups)})
            add_lora(experts, "*_proj", rank=3, alpha=6, seed=1 if way == "seed" else None)
        if way == "meta":
            reset_parameters(experts.to_empty(device="cpu"), seed=1)
        return gather_whole(experts)

    whole = build()
    assert whole["experts.3.down_proj.lora_A.weight"].any()
    assert not whole["experts.3.down_proj.lora_B.weight"].any()
    if way != "generator":
        low = whole["experts.0.up_proj.lora_A.weight"]
        assert low.abs().max() <= H**-0.5 and low.abs().max() > 0.8 * H**-0.5
    for axis in ("ep", "etp"):
        mesh = Mesh(dp=size, ep=size) if axis == "ep" else Mesh(tp=size, etp=size)
        for name, value in build(**{axis: mesh.expert.group(axis)}).items():
            assert torch.equal(value, whole[name]), name
        mesh.close()


@ranks(2)
def test_whole_factors_send_one_message_backward_and_none_forward():
    etp = Mesh(tp=2, etp=2).expert.group("etp")
    experts = with_adapters(GroupedExperts(4, 8, 16, etp=etp, dtype=F64))
    cuts = {
        name: [spec.dim for spec in specs if spec.group.size > 1 and not spec.has_copies]
        for name, _, specs in marks(experts)
    }
    assert {name: dims for name, dims in cuts.items() if "lora" in name} == {
        "gate_proj_lora_A.weight": [],
        "gate_proj_lora_B.weight": [1],
        "up_proj_lora_A.weight": [],
        "up_proj_lora_B.weight": [1],
        "down_proj_lora_A.weight": [2],
        "down_proj_lora_B.weight": [],
    }
    dispatcher = LocalDispatcher()
    dispatched, _ = dispatcher.dispatch(torch.ones(3, 8, dtype=F64), routing([[0], [1], [1]]))
    with CommDebugMode() as traffic:
        y = experts(dispatched)
    assert traffic.get_total_counts() == 0
    with CommDebugMode() as traffic:
        y.sum().backward()
    assert traffic.get_total_counts() == 1


SPEC = DecoderSpec(61, 16, 24, 2, 2, 2, 8, moe=MoESpec(4, 2, 12, dense_layers=(0,)))
ROWS, LENGTH, STEPS = 4, 6, 4
ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


def _decoder(mesh=None, **options):
    torch.manual_seed(0)
    decoder = Decoder(SPEC, mesh=mesh, dtype=F64, **options)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)  # Far from the initial values, where all is linear.
    return with_adapters(decoder, ["*_proj"], rank=2, alpha=4)


def _train(model, step, rows=slice(None), finish=lambda: None):
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(61, (ROWS, LENGTH + 1), generator=generator)[rows]
        logits = model(tokens[:, :-1], gather_logits=True).logits
        step.zero_grad()
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        ).div(ROWS * LENGTH).backward()
        finish()
        step.step()


def _trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _expected():
    whole = _decoder()
    before = gather_whole(whole)
    before = {name: value.clone() for name, value in before.items()}
    _train(whole, torch.optim.AdamW(_trained(whole), **ADAMW))
    after = gather_whole(whole)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if "lora_" in name}
    return after


@ranks(4, timeout=300)
@pytest.mark.parametrize(
    "wrapper",
    [
        "fully_shard",
        "DataParallel",
        "ShardedOptimizer",
        pytest.param("reduce_gradients", marks=pytest.mark.slow),
        pytest.param("recompute", marks=pytest.mark.slow),
    ],
)
def test_steps_of_adamw_are_one_processs(wrapper):
    mesh = Mesh(dp=4, ep=2)
    dp, expected = mesh.group("dp"), _expected()
    options = {"group": dp, "expert_group": mesh.expert.group("edp"), "reduction": "sum"}
    model = decoder = _decoder(mesh)
    finish, step = lambda: None, None
    if wrapper == "fully_shard":
        fully_shard(decoder, **options)
    elif wrapper == "DataParallel":
        model = DataParallel(decoder, **options)
    elif wrapper == "ShardedOptimizer":
        step = ShardedOptimizer(decoder, torch.optim.AdamW, zero=2, **options, **ADAMW)
    else:
        finish = lambda: reduce_gradients(decoder, **options)  # noqa: E731
    if wrapper == "recompute":
        recompute_modules(decoder, "layers.*")
    step = step or torch.optim.AdamW(_trained(decoder), **ADAMW)
    _train(model, step, slice(dp.rank, dp.rank + 1), finish)
    _assert_same(decoder, expected)


@ranks(4, timeout=300)
@pytest.mark.parametrize(
    "sizes", [{"ep": 2, "etp": 2}, pytest.param({"ep": 4}, marks=pytest.mark.slow)], ids=str
)
def test_steps_with_sequence_parallel_ranks_are_one_processs(sizes):
    mesh = Mesh(tp=2, dp=2, **sizes)
    dp, expected = mesh.group("dp"), _expected()
    decoder = _decoder(mesh, sequence_parallel=True)
    recompute_modules(decoder, "layers.*")
    options = {"group": dp, "expert_group": mesh.expert.group("edp"), "reduction": "sum"}
    step = ShardedOptimizer(decoder, torch.optim.AdamW, zero=1, **options, **ADAMW)
    _train(decoder, step, slice(2 * dp.rank, 2 * dp.rank + 2))
    _assert_same(decoder, expected)


def _assert_same(model, whole):
    ours = gather_whole(model)
    assert ours.keys() == whole.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, whole[name], rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
        )
