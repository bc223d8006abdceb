"""A stack of tensors is written and read under the separate names that its mark gives."""

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from megablocks_core.groups import (
    LOCAL,
    Collection,
    Group,
    Held,
    Mesh,
    Segment,
    ShardSpec,
    gather_whole,
    load_whole,
    logical_tensors,
    mark,
    marks,
)
from megablocks_core.groups.stacks import kind_of
from megablocks_core.testing import ranks

_EXPERTS, _ROWS, _COLUMNS = 4, 6, 8
_NAMES = [f"layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(_EXPERTS)]


def _whole():
    return torch.arange(float(_EXPERTS * _ROWS * _COLUMNS)).view(_EXPERTS, _ROWS, _COLUMNS)


def _model(ep, etp):
    """Experts cut over ``ep`` by number and over ``etp`` by packed rows, below two parents."""
    specs = (ShardSpec(0, ep), ShardSpec(1, etp, (Segment(4), Segment(2))))
    share = _whole()
    for spec in specs:
        pieces = [share.movedim(spec.dim, 0)[part] for part in spec.ranges(share.shape[spec.dim])]
        share = torch.cat(pieces).movedim(0, spec.dim)
    experts = nn.Module()
    experts.up_proj = nn.Parameter(share.contiguous())
    mark(experts, "up_proj", *specs, each="experts.{}.up_proj.weight", expert=True)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": nn.Module()})])})
    model.get_submodule("layers.0.mlp").experts = experts
    return model


def _groups():
    mesh = Mesh(tp=1, ep=min(2, dist.get_world_size()), etp=max(1, dist.get_world_size() // 2))
    return mesh.expert.group("ep"), mesh.expert.group("etp")


@ranks(1, 2, 4)
def test_gathered_experts_have_names_of_their_own():
    gathered = gather_whole(_model(*_groups()))
    assert list(gathered) == _NAMES
    for name, tensor in zip(_NAMES, _whole(), strict=True):
        assert torch.equal(gathered[name], tensor), name


@ranks(1, 2, 4)
@pytest.mark.parametrize("given", ["separate", "stacked", "file"])
def test_experts_are_loaded_under_their_names_or_as_the_stack(given, tmp_path):
    model = _model(*_groups())
    own = model.get_submodule("layers.0.mlp.experts").up_proj
    expected = own.detach().clone() + 1
    own.data.zero_()
    tensors = dict(zip(_NAMES, _whole() + 1, strict=True))
    if given == "stacked":
        load_whole(model, {"layers.0.mlp.experts.up_proj": _whole() + 1})
    elif given == "separate":
        load_whole(model, tensors)
    else:
        path = str(tmp_path / f"experts-{dist.get_rank()}.safetensors")
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
        with safe_open(path, "pt") as file:
            load_whole(model, {name: file.get_slice(name) for name in _NAMES})
    assert torch.equal(own, expected)


@ranks(2)
def test_an_fsdp_cut_inside_a_stack_is_filled_and_gathered():
    model = _fully_sharded()
    gathered = gather_whole(model)
    for name, tensor in zip(_NAMES, _whole() * 3, strict=True):
        assert torch.equal(gathered[name], tensor), name


@ranks(2)
def test_a_writer_gets_each_expert_from_the_rank_that_an_fsdp_cut_gives_it():
    held = [Held(*part) for part in logical_tensors(_fully_sharded(), unstack=True)]
    assert [name for name, *_ in held] == _NAMES[2 * dist.get_rank() :][:2]
    for name, tensor, _ in held:
        assert torch.equal(tensor, 3 * _whole()[_NAMES.index(name)])


def _fully_sharded():
    model = _model(LOCAL, LOCAL)
    mesh = Mesh(dp=2).to_device_mesh()["dp"]
    fully_shard(model.get_submodule("layers.0.mlp.experts"), mesh=mesh)
    load_whole(model, dict(zip(_NAMES, _whole() * 3, strict=True)))
    return model


@ranks(1, 2, 4)
def test_a_writer_gets_each_expert_from_the_rank_that_holds_it():
    """``logical_tensors(unstack=True)`` is what files are written from: no rank holds all."""
    model, visited = _model(*_groups()), {}
    held = [Held(name, x, specs) for name, x, specs in logical_tensors(model, unstack=True)]
    assert [name for name, *_ in held] == _NAMES[: len(held)] or dist.get_rank() > 0
    world = Group.of(dist.group.WORLD)
    collection = Collection(held, group=world, task="write", raises=RuntimeError)
    boxes = [(one.name, tuple(slice(0, size) for size in one.shape)) for one in collection.wholes]
    collection.visit(
        {0: [(name, [(name, box)]) for name, box in boxes]},
        lambda name, values: visited.update({name: values[0].clone()}),
    )
    if world.rank == 0:
        assert sorted(visited) == _NAMES
        assert all(torch.equal(visited[name], x) for name, x in zip(_NAMES, _whole(), strict=True))


def test_views_of_a_stack_share_its_memory_and_its_mark():
    model = _model(LOCAL, LOCAL)
    ((_, view, specs), *_) = logical_tensors(model, unstack=True)
    view.fill_(7)
    assert model.get_parameter("layers.0.mlp.experts.up_proj")[0].eq(7).all()
    assert specs.expert and specs.each is None and [spec.dim for spec in specs] == [0]


def test_names_count_from_the_parent_of_the_owner_if_there_is_one():
    stack = nn.Module()
    stack.weight = nn.Parameter(torch.zeros(2, 3))
    mark(stack, "weight", each="experts.{}.weight")
    expected = ["experts.0.weight", "experts.1.weight"]
    assert list(gather_whole(stack)) == expected
    assert list(gather_whole(nn.ModuleDict({"moe": stack}))) == expected
    deep = nn.ModuleDict({"mlp": nn.ModuleDict({"moe": stack})})
    assert list(gather_whole(deep)) == [f"mlp.{name}" for name in expected]


def test_a_mark_that_only_names_a_stack_is_read():
    """Neither cut nor an expert: the names are all that the mark says."""
    stack = nn.Module()
    stack.weight = nn.Parameter(torch.zeros(2, 3))
    mark(stack, "weight", each="experts.{}.weight")
    assert [specs.each for _, _, specs in marks(stack)] == ["experts.{}.weight"]


def test_stacks_that_are_not_whole_or_not_alike_are_refused():
    model = _model(LOCAL, LOCAL)
    tensors = dict(zip(_NAMES, _whole() + 1, strict=True))
    partial = {name: tensors[name] for name in _NAMES[:2]}
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"all that layers.*up_proj stacks: missing .*\.2\."):
            load_whole(model, partial, strict=strict)
    with pytest.raises(ValueError, match=r"missing \['layers\.0\.mlp\.experts\.\{\}\.up_proj"):
        load_whole(model, {})
    with pytest.raises(ValueError, match=r"experts\.1.*shape \(8, 6\) must have shape \(6, 8\)"):
        load_whole(model, tensors | {_NAMES[1]: tensors[_NAMES[1]].T})
    with pytest.raises(ValueError, match=r"experts\.3.* of whole numbers"):
        load_whole(model, tensors | {_NAMES[3]: tensors[_NAMES[3]].long()})
    with pytest.raises(ValueError, match="whole numbers must have floating-point ones"):
        load_whole(model, {name: tensor.long() for name, tensor in tensors.items()})
    assert torch.equal(model.get_submodule("layers.0.mlp.experts").up_proj, _whole())


def test_the_kind_of_numbers_is_told_of_tensors_and_of_files(tmp_path):
    kinds = {
        torch.bfloat16: "floating-point",
        torch.float16: "floating-point",
        torch.float64: "floating-point",
        torch.float8_e4m3fn: "floating-point",
        torch.complex64: "complex",
        torch.int64: "whole",
        torch.uint8: "whole",
        torch.bool: "whole",
    }
    path = str(tmp_path / "kinds.safetensors")
    save_file({str(dtype): torch.zeros(2).to(dtype) for dtype in kinds}, path)
    with safe_open(path, "pt") as file:
        for dtype, kind in kinds.items():
            assert kind_of(torch.zeros(2).to(dtype)) == kind
            assert kind_of(file.get_slice(str(dtype))) == kind
