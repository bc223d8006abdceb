"""Every router, dispatcher and form of experts gives what one process gives, in any layout.

The twin is the plain loop over all tokens in one process. Tokens lie over the data-parallel
ranks, and under sequence parallelism over the tensor-parallel ones too.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from megablocks_core.groups import LOCAL, Mesh, gather_from
from megablocks_core.layers.moe import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Capacity,
    ExpertChoiceRouter,
    GroupedExperts,
    GroupLimit,
    LocalDispatcher,
    MoE,
    TopKRouter,
)
from megablocks_core.parallel import reduce_gradients
from megablocks_core.testing import assert_parallel_equivalence, ranks

E, H, F, T = 8, 16, 8, 24

ROUTERS = {
    "softmax": {"score": "softmax"},
    "sigmoid": {"score": "sigmoid", "renormalize": False, "scale": 2.5},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "renormalize": 2.0},
    "groups": {"score": "sigmoid", "groups": GroupLimit(4, 2), "selection_bias": True},
    "all": {"top_k": E},
    "expert choice": {},
}
FORMS = ("loop", "capacity", "grouped", "block_sparse")

# Ranks, and how they are cut; "sp": tokens lie over tp too.
LAYOUTS = {
    1: [{}],
    2: [
        {"ep": 2},
        {"ep": 1},
        {"etp": 2},
        {"tp": 2, "ep": 2, "sp": True},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 1, "sp": True},
    ],
    4: [
        {"ep": 4},
        {"ep": 2},
        {"ep": 2, "etp": 2},
        {"tp": 2, "ep": 4, "sp": True},
        {"tp": 2, "ep": 2, "etp": 2},
        {"tp": 2, "ep": 2, "sp": True},
        {"tp": 4, "ep": 2, "sp": True},
        {"tp": 2, "ep": 2, "etp": 2, "sp": True},
    ],
}


def tokens_of(kind):
    """Whole inputs; with what makes routers unbalanced."""
    number = {"one token": 1, "few": 3}.get(kind, T)
    x = torch.randn(number, H, generator=torch.Generator().manual_seed(5)).double()
    if kind == "one expert":  # all tokens are alike, so all choose alike
        x = x[:1].expand(number, H).clone()
    if kind == "ties":
        x = torch.zeros(number, H).double()
    return x


def layer(router, form, *, mesh=None, dispatcher="local", sp=False):
    """The layer of one seed, in one process or over a mesh."""
    torch.manual_seed(0)
    tp = LOCAL if mesh is None else mesh.group("tp")
    ep, etp = (LOCAL if mesh is None else mesh.expert.group(axis) for axis in ("ep", "etp"))
    words = {"num_experts": E, "ep": ep, "etp": etp, "tp": tp}
    dispatchers = {
        "local": LocalDispatcher,
        "all-gather": lambda: AllGatherDispatcher(
            **words, tokens="sharded" if sp else "replicated"
        ),
        "all-to-all": lambda: AllToAllDispatcher(**words, tokens="sharded" if sp else "replicated"),
    }
    common = {"num_experts": E, "group": tp if sp else LOCAL, "dtype": torch.float64}
    options = {"top_k": 2, **ROUTERS[router]}
    if form == "capacity":
        options["capacity"] = Capacity(factor=E)  # of all tokens: none is dropped
    if router == "expert choice":
        holders = LOCAL if mesh is None else mesh.group(*(("tp", "dp") if sp else ("dp",)))
        gate = ExpertChoiceRouter(H, capacity_factor=2, choose_over=holders, **common)
    else:
        gate = TopKRouter(H, **common, **options)
    if getattr(gate, "e_score_correction_bias", None) is not None:
        gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, E))
    experts = GroupedExperts(E, H, F, ep=ep, etp=etp, form=form, dtype=torch.float64)
    return MoE(router=gate, dispatcher=dispatchers[dispatcher](), experts=experts)


class Results(nn.Module):
    """A layer without its routing."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x)[0]


def check(mesh, *, sp, router, dispatcher, form, kind="plain"):
    """One training step in this layout against the twin."""
    dp, world = mesh.group("dp"), mesh.group("tp", "dp")
    holders = world if sp else dp
    x = tokens_of(kind)
    own = torch.arange(x.shape[0]).tensor_split(holders.size)[holders.rank]

    def build(group):
        if group is not world:
            return Results(layer(router, "loop"))
        return Results(layer(router, form, mesh=mesh, dispatcher=dispatcher, sp=sp))

    def reduce(part):
        expert_group = mesh.expert.group("edp")
        reduce_gradients(part, group=dp, expert_group=expert_group, reduction="sum")

    assert_parallel_equivalence(
        build,
        x,
        group=world,
        loss=lambda y: (y + y.square()).sum(),
        split=lambda x: pytree.tree_map(lambda each: each[own], x),
        join=lambda y: gather_from(y, dim=0, group=holders),
        reduce=reduce,
        same_start=True,
    )


def run(combinations, *, every=1, kind="plain"):
    """All combinations in all layouts of this many ranks; or each ``every``-th, another one in
    each layout."""
    for number, sizes in enumerate(LAYOUTS[dist.get_world_size()]):
        sizes = dict(sizes)
        sp = sizes.pop("sp", False)
        mesh = Mesh(**sizes)
        is_whole = mesh.expert.size("ep") == mesh.expert.size("etp") == 1
        is_even = tokens_of(kind).shape[0] % dist.get_world_size() == 0
        served = [
            (router, dispatcher, form)
            for router, dispatcher, form in combinations
            if (dispatcher != "local" or (is_whole and (sp or mesh.size("tp") == 1)))
            # Ranks with a capacity must hold equally many tokens.
            and (form != "capacity" or is_even or dispatcher == "local")
        ]
        for router, dispatcher, form in served[number % every :: every]:
            check(mesh, sp=sp, router=router, dispatcher=dispatcher, form=form, kind=kind)
        mesh.close()


PAIRS = list(itertools.product(("local", "all-gather", "all-to-all"), FORMS))
KINDS = ("one expert", "ties", "one token", "few")


@ranks(1, 2, 4)
def test_forms_and_dispatchers_equal_the_loop_of_one_process():
    run([(router, *pair) for router in ROUTERS for pair in PAIRS], every=9)


@ranks(1, 2, 4)
def test_so_do_odd_numbers_of_tokens():
    for kind in KINDS:
        run([("softmax", *pair) for pair in PAIRS], every=7, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
@ranks(1, 2, 4)
def test_all_forms_and_dispatchers_in_all_layouts(router):
    run([(router, *pair) for pair in PAIRS])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@ranks(1, 2, 4)
def test_all_of_them_with_odd_numbers_of_tokens(kind):
    run([("softmax", *pair) for pair in PAIRS], kind=kind)
