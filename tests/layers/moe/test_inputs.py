"""What does not fit is named, on every rank, and never leaves a rank waiting."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers.moe import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    ExpertChoiceRouter,
    GroupedExperts,
    LocalDispatcher,
    MoE,
    TopKRouter,
)
from megablocks_core.testing import ranks

F64 = torch.float64
WIDTH, EXPERTS, TOP_K, T = 8, 4, 2, 6

WRONG = {
    "x of type list must be a tensor": {"x": [[0.0] * WIDTH]},
    r"x of torch.int64 and shape \[6, 8\] must be floats": {"x": torch.ones(T, WIDTH).long()},
    r"x of torch.complex64": {"x": torch.ones(T, WIDTH, dtype=torch.complex64)},
    r"x of torch.float64 and shape \[\]": {"x": torch.tensor(1.0, dtype=F64)},
    r"x of shape \[6, 7\] must be \[... 8\]": {"x": torch.ones(T, 7, dtype=F64)},
    r"x of torch.float32 .* must be torch.float64": {"x": torch.ones(T, WIDTH)},
    r"x of torch.float32 and shape \[0, 8\] must be": {"x": torch.ones(0, WIDTH)},
    "mask of type list": {"mask": [True] * T},
    r"mask of shape \[5\] must be of \[6\]": {"mask": torch.ones(5, dtype=torch.bool)},
    "mask of torch.int64 must be torch.bool": {"mask": torch.ones(T).long()},
    "index of torch.float32 must be torch.int64": {"index": torch.ones(T)},
    r"choices of shape \[6\] must be of \[6, k\]": {"choices": torch.ones(T).long()},
    "choices of 3 experts a token must have top_k=2": {"choices": torch.arange(3).expand(T, 3)},
    "choices of torch.float32 must be int64": {"choices": torch.rand(T, 2)},
    "choices must be below num_experts=4 and": {"choices": torch.tensor([[0, 4]]).expand(T, 2)},
    "below num_experts=4 and different in each": {"choices": torch.tensor([[1, 1]]).expand(T, 2)},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message):
    moe = _layer()
    with pytest.raises(ValueError, match=message):
        moe(**{"x": _tokens(), **WRONG[message]})


def test_words_come_in_the_shape_of_tokens_or_in_one_row():
    moe, x = _layer(), _tokens().view(2, 3, WIDTH)
    flat, mask = torch.arange(T) % 3 > 0, (torch.arange(T) % 3 > 0).view(2, 3)
    y, routing = moe(x, mask=mask)
    assert torch.equal(moe(x, mask=flat, choices=routing.indices)[0], y)
    with pytest.raises(ValueError, match=r"mask of shape \[3, 2\] must be of \[2, 3\] or \[6\]"):
        moe(x, mask=mask.view(3, 2))


@ranks(2)
@pytest.mark.parametrize("kind", [AllToAllDispatcher, AllGatherDispatcher])
def test_one_ranks_bad_input_raises_on_all_and_the_next_step_is_clean(kind):
    moe, rank = _layer(kind), dist.get_rank()
    right = _step(moe)
    for message, wrong in WRONG.items():
        own = "dtype=" if message.startswith("x of torch.float32") else message
        others = "a rank refused its arguments|dtype=torch.float64 must be equal on all ranks"
        with pytest.raises(ValueError, match=own if rank else others):
            moe(**{"x": _tokens(), **(wrong if rank else {})})
        assert torch.equal(_step(moe), right)


@ranks(2)
def test_also_where_the_router_sends_and_where_tokens_are_replicated():
    """No router waits for the scores of a rank that refused, and no rank for a slice of results."""
    rank, bad = dist.get_rank(), torch.ones(T, 7, dtype=F64)
    for sizes, tokens in (({"dp": 2, "ep": 2}, "sharded"), ({"tp": 2}, "replicated")):
        mesh = Mesh(**sizes)
        router = ExpertChoiceRouter(
            WIDTH, num_experts=4, capacity_factor=2, choose_over=mesh.group("dp"), dtype=F64
        )
        moe = _layer(AllToAllDispatcher, mesh=mesh, router=router, tokens=tokens)
        with pytest.raises(ValueError, match="x of shape" if rank else "a rank refused"):
            moe(bad if rank else _tokens())
        moe(_tokens())[0].sum().backward()
        mesh.close()


@ranks(2)
def test_layers_that_differ_between_ranks_are_refused():
    mesh, rank = Mesh(dp=2, ep=2), dist.get_rank()
    different = {
        "num_experts": {"num_experts": 4 + 4 * rank},
        "top_k": {"top_k": 1 + rank},
        "dtype": {"dtype": (F64, torch.float32)[rank]},
        "hidden_size": {"width": 8 * (1 + rank)},
        "chunks": {"chunks": 1 + rank},
    }
    for name, options in different.items():
        moe = _layer(AllToAllDispatcher, mesh=mesh, **options)
        x = torch.ones(T, moe.hidden_size, dtype=moe.gate.weight.dtype)
        with pytest.raises(ValueError, match=f"{name}=.* must be equal on all ranks"):
            moe(x)


@ranks(2)
def test_autocast_on_one_rank_is_refused_on_both():
    """Results would travel in two dtypes."""
    moe = _layer(AllToAllDispatcher, dtype=torch.float32)
    x = _tokens().float()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=dist.get_rank() == 0),
        pytest.raises(ValueError, match="autocast=.* which have from off to torch.bfloat16"),
    ):
        moe(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe(x)[0].dtype == torch.bfloat16


def _tokens():
    return torch.randn(T, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(3))


def _step(moe):
    x = _tokens().requires_grad_()
    moe(x)[0].square().sum().backward()
    return x.grad


def _layer(
    kind=None,
    *,
    mesh=None,
    router=None,
    num_experts=EXPERTS,
    top_k=TOP_K,
    width=WIDTH,
    dtype=F64,
    tokens="sharded",
    chunks=1,
):
    torch.manual_seed(0)
    mesh = Mesh(dp=2, ep=2) if kind and mesh is None else mesh
    ep = LOCAL if mesh is None else mesh.expert.group("ep")
    words = {} if mesh is None else {"tp": mesh.group("tp"), "tokens": tokens}
    return MoE(
        router=router or TopKRouter(width, num_experts=num_experts, top_k=top_k, dtype=dtype),
        dispatcher=kind(num_experts=num_experts, ep=ep, **words) if kind else LocalDispatcher(),
        experts=GroupedExperts(num_experts, width, 6, ep=ep, dtype=dtype),
        chunks=chunks,
    )
