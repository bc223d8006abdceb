"""Models with experts train as in one process: every wrapper, one norm, nothing overwritten."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from megablocks_core.groups import Mesh, gather_whole, load_whole, marks, own_slices
from megablocks_core.layers import Decoder, DecoderSpec, MoESpec
from megablocks_core.layers.moe import (
    AllToAllDispatcher,
    GroupedExperts,
    LocalDispatcher,
    MoE,
    TopKRouter,
)
from megablocks_core.parallel import (
    DataParallel,
    PrecisionPolicy,
    ShardedOptimizer,
    add_lora,
    clip_grad_norm_,
    count_zeros,
    fully_shard,
    reduce_gradients,
)
from megablocks_core.testing import ranks

F64 = torch.float64
SPEC = DecoderSpec(61, 16, 24, 2, 2, 2, 8, moe=MoESpec(4, 2, 12, dense_layers=(0,)))
ROWS, LENGTH, STEPS = 4, 6, 20
# Gradients that are rounding alone must not become whole steps.
ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


def _decoder(mesh=None, **options):
    torch.manual_seed(0)
    decoder = Decoder(SPEC, mesh=mesh, dtype=F64, **options)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)  # Far from the initial values, where all is linear.
    return decoder


def _tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(61, (ROWS, LENGTH + 1), generator=generator)


def _loss(model, tokens):
    """A sum over these rows, of which those of all ranks are one process's."""
    output = model(tokens[:, :-1], gather_logits=True)
    total = cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    total = total + 0.1 * sum(losses[0] for losses in output.losses["z"])
    return total / (ROWS * LENGTH)


def _train(model, step, rows=slice(None), finish=lambda model: None):
    for number in range(STEPS):
        loss = _loss(model, _tokens(number)[rows])
        step.zero_grad()
        loss.backward()
        finish(model)
        step.step()


def _wrapped(wrapper, decoder, groups):
    """(model to call, its optimizer, what is left to do after backward)."""
    options = {**groups, "reduction": "sum"}
    if wrapper == "DataParallel":
        model = DataParallel(decoder, **options)
        return model, torch.optim.AdamW(decoder.parameters(), **ADAMW), lambda model: None
    if wrapper == "fully_shard":
        fully_shard(decoder, **options)
        return decoder, torch.optim.AdamW(decoder.parameters(), **ADAMW), lambda model: None
    if wrapper == "ShardedOptimizer":
        step = ShardedOptimizer(decoder, torch.optim.AdamW, zero=2, **options, **ADAMW)
        return decoder, step, lambda model: None
    step = torch.optim.AdamW(decoder.parameters(), **ADAMW)
    return decoder, step, lambda model: reduce_gradients(model, **options)


@ranks(4, timeout=300)
@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param("reduce_gradients", marks=pytest.mark.slow),
        pytest.param("DataParallel", marks=pytest.mark.slow),
        "ShardedOptimizer",
        "fully_shard",
    ],
)
def test_twenty_steps_of_adamw_are_one_processs(wrapper):
    mesh = Mesh(dp=4, ep=2)
    dp = mesh.group("dp")
    whole = _decoder()
    _train(whole, torch.optim.AdamW(whole.parameters(), **ADAMW))
    decoder = _decoder(mesh)
    groups = {"group": dp, "expert_group": mesh.expert.group("edp")}
    model, step, finish = _wrapped(wrapper, decoder, groups)
    _train(model, step, slice(dp.rank, dp.rank + 1), finish)
    _assert_same(decoder, gather_whole(whole), rtol=1e-10)


@ranks(4, timeout=300)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_twenty_steps_with_tensor_parallel_ranks_are_one_processs(sequence_parallel):
    mesh = Mesh(tp=2, dp=2, ep=2)
    dp = mesh.group("dp")
    whole = _decoder()
    _train(whole, torch.optim.AdamW(whole.parameters(), **ADAMW))
    decoder = _decoder(mesh, sequence_parallel=sequence_parallel)
    groups = {"group": dp, "expert_group": mesh.expert.group("edp")}
    model, step, finish = _wrapped("ShardedOptimizer", decoder, groups)
    _train(model, step, slice(2 * dp.rank, 2 * dp.rank + 2), finish)
    _assert_same(decoder, gather_whole(whole), rtol=1e-10)


def _layer(mesh=None):
    """A mixture of 4 experts, alone."""
    torch.manual_seed(0)
    ep = {} if mesh is None else {"ep": mesh.expert.group("ep")}
    return MoE(
        router=TopKRouter(8, num_experts=4, top_k=2, dtype=F64),
        dispatcher=AllToAllDispatcher(num_experts=4, **ep) if ep else LocalDispatcher(),
        experts=GroupedExperts(4, 8, 6, dtype=F64, **ep),
    )


@ranks(2, timeout=300)
@pytest.mark.parametrize(
    "wrapper", ["reduce_gradients", "DataParallel", "ShardedOptimizer", "fully_shard"]
)
def test_biases_where_data_parallel_ranks_cut_each_expert(wrapper):
    """Every rank of etp holds the last bias and its whole gradient, which nobody sums again."""
    mesh = Mesh(dp=2, etp=2)
    groups = {"etp": mesh.expert.group("etp"), "ep": mesh.expert.group("ep")}

    def build(**groups):
        torch.manual_seed(0)
        return MoE(
            router=TopKRouter(8, num_experts=4, top_k=2, dtype=F64),
            dispatcher=AllToAllDispatcher(num_experts=4, **groups) if groups else LocalDispatcher(),
            experts=GroupedExperts(4, 8, 6, bias=True, dtype=F64, **groups),
        )

    whole, cut = build(), build(**groups)
    group = mesh.group("dp")
    words = {"group": group, "expert_group": mesh.expert.group("edp")}
    model, step, finish = _wrapped(wrapper, cut, words)
    expected = torch.optim.AdamW(whole.parameters(), **ADAMW)
    for _ in range(2):
        for net, optimizer, rows, end in (
            (whole, expected, slice(None), lambda _: None),
            (model, step, slice(4 * group.rank, 4 * group.rank + 4), finish),
        ):
            optimizer.zero_grad()
            net(X[rows])[0].sin().sum().backward()
            end(net)
            optimizer.step()
    _assert_same(cut, gather_whole(whole), rtol=1e-10)


X = torch.randn(8, 8, dtype=F64, generator=torch.Generator().manual_seed(1))


@ranks(2)
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_f048_experts_of_other_ranks_are_not_overwritten(rate):
    """Confirmed with the layer: at rate 0 all stay and differ, at 0.1 they are one process's."""
    mesh = Mesh(dp=2, ep=2)
    dp = mesh.group("dp")
    whole, moe = _layer(), _layer(mesh)
    before = gather_whole(moe)
    options = {"group": dp, "expert_group": mesh.expert.group("edp"), "reduction": "sum"}
    step = ShardedOptimizer(moe, torch.optim.SGD, lr=rate, **options)
    plain = torch.optim.SGD(whole.parameters(), lr=rate)
    for model, optimizer, x in ((whole, plain, X), (moe, step, X.chunk(2)[dp.rank])):
        model(x)[0].square().sum().backward()
        optimizer.step()
    _assert_same(moe, gather_whole(whole), rtol=1e-12)
    changed = [name for name, value in gather_whole(moe).items() if (value != before[name]).any()]
    assert bool(changed) == (rate > 0)
    mine, theirs = dp.all_gather(moe.experts.up_proj.detach())
    assert not torch.equal(mine, theirs)


@ranks(2)
def test_f046_experts_of_all_ranks_enter_the_norm():
    """Confirmed with the layer: tp 2, ep 2, etp 1; all gradients 1, then all 0."""
    mesh = Mesh(tp=2, ep=2)
    ep = mesh.expert.group("ep")
    moe = MoE(
        router=TopKRouter(1, num_experts=2, top_k=1),
        dispatcher=AllToAllDispatcher(
            num_experts=2, ep=ep, tp=mesh.group("tp"), tokens="replicated"
        ),
        experts=GroupedExperts(2, 1, 1, activation="relu", ep=ep),
    )
    for parameter in moe.parameters():
        parameter.grad = torch.ones_like(parameter)
    # The router has 2 numbers, each expert 2 of its own.
    assert_close(clip_grad_norm_(moe, 1e9).item(), math.sqrt(6))
    for parameter in moe.parameters():
        parameter.grad.zero_()
    assert count_zeros(moe).item() == 6


@ranks(2)
def test_f047_dense_and_expert_gradients_have_one_norm():
    """Confirmed with the layer: 3 on both ranks, 4 and 12 on one each, make 13 everywhere."""
    mesh = Mesh(dp=2, ep=2)
    moe = MoE(
        router=TopKRouter(1, num_experts=2, top_k=1, dtype=F64),
        dispatcher=AllToAllDispatcher(num_experts=2, ep=mesh.expert.group("ep")),
        experts=GroupedExperts(2, 1, 1, ep=mesh.expert.group("ep"), dtype=F64),
    )
    for parameter in moe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    moe.gate.weight.grad[0] = 3.0
    moe.experts.up_proj.grad.fill_((4.0, 12.0)[dist.get_rank()])
    assert_close(clip_grad_norm_(moe, 6.5).item(), 13.0)
    assert_close(moe.experts.up_proj.grad.item(), (2.0, 6.0)[dist.get_rank()], rtol=1e-6, atol=0)
    assert_close(moe.gate.weight.grad[0].item(), 1.5, rtol=1e-6, atol=0)


@ranks(2)
def test_choices_are_the_same_under_a_bf16_policy():
    """The router is float32 however the wrapper casts: it sees weights and tokens as they come."""
    group = Mesh(dp=2).group("dp")
    x = X.bfloat16()
    torch.manual_seed(0)
    plain = _layer().bfloat16()
    wrapped = _layer().float()
    load_whole(wrapped, {name: value.float() for name, value in gather_whole(plain).items()})
    policy = PrecisionPolicy(params=torch.bfloat16)
    fully_shard(wrapped, group=group, expert_group=group, precision=policy)
    expected, ours = plain(x)[1], wrapped(x)[1]
    assert torch.equal(ours.indices, expected.indices)
    assert ours.weights.dtype == ours.logits.dtype == torch.float32
    assert_close(ours.weights, expected.weights)


def test_adapters_of_attention_alone_leave_experts_as_they_are():
    decoder = _decoder()
    tokens = _tokens(0)
    before = _loss(decoder, tokens)
    add_lora(decoder, ["self_attn.q_proj", "self_attn.v_proj"], rank=2, alpha=4)
    assert_close(_loss(decoder, tokens), before)
    _loss(decoder, tokens).backward()
    trained = {name for name, value in decoder.named_parameters() if value.grad is not None}
    assert len(trained) == 2 * SPEC.num_layers * 2
    assert all("self_attn" in name for name in trained)


def _assert_same(model: nn.Module, whole, *, rtol):
    """Every rank's shares are those of the whole tensors."""
    for name, value in gather_whole(model).items():
        assert_close(
            value, whole[name], rtol=rtol, atol=rtol, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert whole.keys() == gather_whole(model).keys()
    for name, parameter, specs in marks(model):
        if not hasattr(parameter, "full_tensor") and specs.each is None:
            for theirs, ours in own_slices(specs, tuple(whole[name].shape)):
                assert_close(parameter.detach()[ours], whole[name][theirs], rtol=rtol, atol=rtol)
