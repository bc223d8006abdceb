"""Stacks of matrices get adapters by the names of their layers, all or none, and merge."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh, Segment, ShardSpec, gather_whole, mark, marks
from megablocks_core.layers.moe import GroupedExperts, LocalDispatcher, MoE, TopKRouter
from megablocks_core.parallel import (
    add_lora,
    clip_grad_norm_,
    merge_lora,
    remove_lora,
    unmerge_lora,
)
from megablocks_core.parallel.lora.sites import StackSite, adapted_sites, sites_of, stacks_of
from megablocks_core.testing import ranks
from tests.layers.moe.experts.lora_cases import fill_factors

E, H, I = 4, 8, 16  # noqa: E741
F64 = torch.float64


class _Results(nn.Module):
    """A mixture beside a linear layer, without its routing."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = MoE(
            router=TopKRouter(H, num_experts=E, top_k=2),
            dispatcher=LocalDispatcher(),
            experts=GroupedExperts(E, H, I, **options),
        )
        self.up_proj = nn.Linear(H, H)

    def forward(self, x):
        return self.up_proj(self.mlp(x)[0])


X = torch.randn(6, H, generator=torch.Generator().manual_seed(1))


def test_names_of_layers_and_of_parameters():
    model = _Results(bias=True)
    names = list(model.state_dict())
    added = add_lora(model, ["experts.*.up_proj", "mlp.experts.*.down_proj"], rank=3, alpha=6)
    assert added == ("mlp.experts.*.up_proj", "mlp.experts.*.down_proj")
    trained = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        "mlp.experts.up_proj_lora_A.weight": [E, 3, H],
        "mlp.experts.up_proj_lora_B.weight": [E, I, 3],
        "mlp.experts.down_proj_lora_A.weight": [E, 3, I],
        "mlp.experts.down_proj_lora_B.weight": [E, H, 3],
    }
    assert [name for name in model.state_dict() if "lora" not in name] == names
    logical = {name for name in gather_whole(model) if "lora" in name}
    assert logical == {
        f"mlp.experts.{index}.{leaf}_proj.lora_{x}.weight"
        for index in range(E)
        for leaf in ("up", "down")
        for x in "AB"
    }
    assert all(specs.expert for name, _, specs in marks(model) if "lora" in name)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("up_proj", ["up_proj", "mlp.experts.*.up_proj"]),
        ("experts.*.up_proj", ["mlp.experts.*.up_proj"]),
        ("mlp.experts.?.*_proj", [f"mlp.experts.*.{x}_proj" for x in ("gate", "up", "down")]),
        ([f"experts.{index}.up_proj" for index in range(E)], ["mlp.experts.*.up_proj"]),
        ("mlp.experts.*.up_proj", ["mlp.experts.*.up_proj"]),
    ],
)
def test_patterns_match_the_layers_of_a_stack(patterns, names):
    model = _Results()
    assert list(add_lora(model, patterns, rank=2, alpha=4)) == names
    assert [site.name for site in adapted_sites(model)] == names


class _NoAdapters(nn.Module):
    """Holds a stack and computes with it alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(E, I, H))
        mark(self, "weight", each="experts.{}.up_proj.weight")


@pytest.mark.parametrize(
    ("patterns", "options", "message"),
    [
        ("experts.3.up_proj", {}, r"all of mlp.experts.\*.up_proj or none, not 1 of 4"),
        ("experts.[01].*_proj", {}, r"patterns must match all of mlp.experts.\*.gate_proj or none"),
        ("experts.*.w1", {}, r"patterns must name layers of .*_Results, not \['experts.\*.w1'\]"),
        ("experts.4.up_proj", {}, "patterns must name layers"),
        ("mlp.experts", {}, "mlp.experts is a .*GroupedExperts; adapters are served on Linear"),
        ("experts.*.up_proj", {"rank": 9}, r"rank=9 must lie between 1 and 8, the smaller size of"),
        ("experts.*.up_proj", {"alpha": -1}, "alpha=-1 must be above 0"),
        ("experts.*.up_proj", {"dtype": torch.int8}, r"dtype=torch.int8 must be floating"),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_changed(patterns, options, message):
    model = _Results()
    with pytest.raises(ValueError, match=message):
        add_lora(model, patterns, **{"rank": 2, "alpha": 4, **options})
    assert all(p.requires_grad for p in model.parameters())
    assert not any("lora" in name for name in model.state_dict())


def test_stacks_of_modules_without_adapters_are_refused():
    model = nn.ModuleDict({"experts": _NoAdapters()})
    message = r"experts.\*.up_proj are held by a .*_NoAdapters without adapters"
    with pytest.raises(ValueError, match=message):
        add_lora(model, "up_proj", rank=2, alpha=4)


def test_a_second_adapter_is_refused_and_other_stacks_get_theirs():
    model = _Results()
    add_lora(model, "experts.*.up_proj", rank=2, alpha=4)
    with pytest.raises(ValueError, match=r"mlp.experts.\*.up_proj has an adapter already"):
        add_lora(model, "experts.*.*_proj", rank=2, alpha=4)
    add_lora(model, "experts.*.gate_proj", rank=3, alpha=4)
    trained = {name.split(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{x}_proj_lora_{y}" for x in ("up", "gate") for y in "AB"}


@ranks(2)
def test_cuts_that_are_not_known_are_refused():
    group = Mesh(dp=2, ep=2).expert.group("ep")
    for specs in ((ShardSpec(1, group), ShardSpec(2, group)), _copies(group)):
        experts = GroupedExperts(E, H, I)
        mark(experts, "up_proj", *specs, each="experts.{}.up_proj.weight")
        (site,) = (site for site in stacks_of(experts) if site.leaf == "up_proj")
        with pytest.raises(ValueError, match="are cut by .*, which adapters do not serve"):
            site.place()


def _copies(group):
    return (ShardSpec(1, group, (Segment(I, parts=1),)),)


@ranks(2)
def test_factors_that_are_whole_count_once_in_the_norm():
    mesh = Mesh(tp=2, etp=2)
    experts = GroupedExperts(E, H, I, etp=mesh.expert.group("etp"))
    add_lora(experts, "*_proj", rank=2, alpha=2)
    total = 0
    for _, parameter, _ in marks(experts):
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    total = E * 2 * 3 * (H + I)
    assert clip_grad_norm_(experts, 1.0) == pytest.approx(total**0.5)


@ranks(1, 2, 4)
def test_merged_stacks_compute_the_same_and_equal_one_process():
    size, whole = dist.get_world_size(), _filled()
    merge_lora(whole)
    for axis in ("ep", "etp"):
        mesh = Mesh(dp=size, ep=size) if axis == "ep" else Mesh(tp=size, etp=size)
        model = _filled(**{axis: mesh.expert.group(axis)})
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with CommDebugMode() as traffic:
            merge_lora(model)
        assert traffic.get_total_counts() == 0
        merged = gather_whole(model)
        for name, tensor in gather_whole(whole).items():
            assert_close(merged[name], tensor, atol=1e-14, rtol=0)
        assert not torch.equal(model.up_proj, before["up_proj"])
        unmerge_lora(model)
        assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
        mesh.close()


def _filled(**groups):
    torch.manual_seed(0)
    experts = GroupedExperts(E, H, I, dtype=F64, **groups)
    add_lora(experts, "*_proj", rank=2, alpha=3, seed=2)
    return fill_factors(experts)


@pytest.mark.parametrize("form", ["grouped", "loop"])
def test_merged_adapters_rest_and_may_be_removed(form):
    model = _Results(form=form).double()
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    bare = model(X.double())
    add_lora(model, "*_proj", rank=2, alpha=4)
    fill_factors(model)
    y = model(X.double())
    assert (y - bare).abs().max() > 0.1
    merge_lora(model)
    assert_close(model(X.double()), y, atol=1e-12, rtol=0)
    assert not model(X.double()).requires_grad
    unmerge_lora(model)
    assert torch.equal(model(X.double()), y)
    with torch.no_grad():
        merge_lora(model)
        model.mlp.experts.up_proj.add_(1)
        with pytest.raises(ValueError, match=r"mlp.experts.\*.up_proj has changed since merge"):
            unmerge_lora(model)
        model.mlp.experts.up_proj.sub_(1)
    remove_lora(model)
    assert_close(model(X.double()), y)
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    assert not adapted_sites(model) and str(model) == str(_Results(form=form).double())


def test_sites_are_known_by_name():
    sites = sites_of(_Results())
    stack = sites["mlp.experts.*.up_proj"]
    assert isinstance(stack, StackSite) and stack.adapter is None and stack.factors() == []
    assert stack.layers() == [f"mlp.experts.{index}.up_proj" for index in range(E)]
    assert stack.path("lora_A") == "mlp.experts.up_proj_lora_A"
    assert sites["up_proj"].place().shape == (H, H) and sites["up_proj"].place().group is LOCAL
