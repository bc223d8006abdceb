"""A sharded model trains as one process does, whatever its parameters are and however they lie."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core import ckpt
from megablocks_core.groups import (
    LOCAL,
    Group,
    Mesh,
    gather_whole,
    load_whole,
    marks,
    whole_tensor,
)
from megablocks_core.groups.placements import local
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import fully_shard, reset_parameters
from megablocks_core.testing import ranks
from megablocks_core.train import watch
from tests.parallel.fsdp_models import Net, assert_equal_training

SPEC = DecoderSpec(37, 8, 10, 2, 2, 2, 4)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


@ranks(1, 2, 4)
def test_five_steps_equal_one_process():
    group = Mesh().group("dp")
    for optimizer, micros, reduction in ((adamw, 1, "mean"), (sgd, 3, "sum")):
        assert_equal_training(
            lambda net, reduction=reduction: fully_shard(
                net, group=group, expert_group=group, reduction=reduction
            ),
            optimizer,
            group=group,
            micros=micros,
            reduction=reduction,
        )


@pytest.mark.parametrize(("rows", "mean"), [(3, 5.5), (1, 1.5)])
@ranks(2)
def test_f_049_a_mean_over_uneven_shards_is_that_of_the_whole(rows, mean):
    """Confirmed: not the mean of the ranks' means, of which that of nothing is NaN."""
    group = Mesh().group("dp")
    model = nn.Linear(4, rows, bias=False)
    model.weight.data = torch.arange(4.0 * rows).view(rows, 4)
    fully_shard(model, group=group)
    watched = watch(model, gradients=(), activations=(), every=1, group=group)
    watched.step()
    assert watched.read()["parameter.mean/weight"] == mean


@ranks(4)
def test_f_049_five_rows_over_four_ranks_are_gathered_as_five():
    """Confirmed: two, two, one and none."""
    group = Mesh().group("dp")
    model = nn.Linear(3, 5, bias=False)
    whole = model.weight.detach().clone()
    fully_shard(model, group=group)
    rows = group.all_gather_object(len(local(model.weight)))
    assert rows == [2, 2, 1, 0]
    assert torch.equal(gather_whole(model)["weight"], whole)


@ranks(4)
def test_hybrid_shards_equal_one_process():
    mesh = Mesh(dp=4)
    group, replicate = mesh.split("dp", inner=2)
    ranks_of = {"group": group, "replicate": replicate, "expert_group": mesh.group("dp")}
    for reduction in ("mean", "sum"):
        assert_equal_training(
            lambda net, reduction=reduction: fully_shard(net, **ranks_of, reduction=reduction),
            adamw,
            group=group,
            rank=mesh.rank,
            size=4,
            micros=3,
            reduction=reduction,
        )


@ranks(4)
def test_slices_of_tensor_parallel_shares_equal_one_process():
    mesh = Mesh(tp=2, dp=2)
    group = mesh.group("dp")
    assert_equal_training(
        lambda net: fully_shard(net, group=group, expert_group=group),
        adamw,
        group=group,
        tp=mesh.group("tp"),
        micros=3,
    )


@ranks(2, 4)
def test_experts_lie_on_their_own_group_and_are_divided_as_dense_ones():
    mesh = Mesh(ep=2)
    group, experts = mesh.group("dp"), mesh.expert.group("edp")
    assert experts.size == mesh.world_size // 2
    for reduction in ("mean", "sum"):
        assert_equal_training(
            lambda net, reduction=reduction: fully_shard(
                net, group=group, expert_group=experts, reduction=reduction
            ),
            adamw,
            group=group,
            ep=mesh.expert.group("ep"),
            micros=3,
            reduction=reduction,
        )


class Untied(nn.Module):
    """Two layers of a list that share a weight, and one between them."""

    def __init__(self, *, device: str = "cpu"):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, device=device) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor, *, beside: bool = False) -> torch.Tensor:
        """Apply the layers one after another, or the outer ones side by side."""
        first, middle, last = self.layers
        return middle(first(x)) + last(x) if beside else last(middle(first(x).tanh()).tanh())


@ranks(2)
def test_units_that_share_a_weight_train_as_one_process_does():
    group = Mesh().group("dp")
    for beside in (False, True):
        torch.manual_seed(0)
        net, twin = Untied().double(), Untied().double()
        twin.load_state_dict(net.state_dict())
        fully_shard(net, group=group)
        assert net.layers[2].weight is net.layers[0].weight
        optimizers = [sgd(list(one.parameters())) for one in (net, twin)]
        for step in range(3):
            x = torch.randn(2, 3, dtype=torch.float64, requires_grad=step > 0)
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(x[group.rank : group.rank + 1], beside=beside).square().sum().backward()
            (twin(x, beside=beside).square().sum() / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
        wanted = gather_whole(twin)
        for name, tensor in gather_whole(net).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-10, msg=name)


@ranks(4)
def test_a_model_from_meta_has_the_bits_of_one_process():
    mesh = Mesh(tp=2, dp=2)
    alone = Decoder(SPEC)
    reset_parameters(alone, seed=7)
    wanted = gather_whole(alone)
    net = Decoder(SPEC, mesh=mesh, device="meta")
    fully_shard(net, group=mesh.group("dp"))
    net.to_empty(device="cpu")
    reset_parameters(net, seed=7)
    for name, tensor in gather_whole(net).items():
        assert torch.equal(tensor, wanted[name]), name
    plain, twin = nn.Sequential(Untied(device="meta"), nn.LayerNorm(3, device="meta")), Untied()
    fully_shard(plain, group=mesh.group("tp", "dp"), units=["0.layers.*", "1"])
    plain.to_empty(device="cpu")
    reset_parameters(plain, seed=3)
    reset_parameters(twin := nn.Sequential(twin, nn.LayerNorm(3)), seed=3)
    for name, tensor in gather_whole(plain).items():
        assert torch.equal(tensor, gather_whole(twin)[name]), name


@ranks(4)
def test_saved_under_one_layout_loaded_under_others(tmp_path):
    """Model and optimizer: from fsdp 4 to fsdp 2 x tp 2, and to one process."""
    layouts = {"fsdp": Mesh(dp=4), "both": Mesh(tp=2, dp=2)}

    def build(mesh: Mesh | None, value: float) -> dict[str, Any]:
        torch.manual_seed(1)
        net = Net(LOCAL if mesh is None else mesh.group("tp")).double()
        if mesh is not None:
            dp = mesh.group("dp")
            fully_shard(net, group=dp, expert_group=dp)
        optimizer = adamw(list(net.parameters()))
        for _, parameter, _ in marks(net):
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return {"model": net, "optimizer": optimizer}

    world = Group.of(dist.group.WORLD)
    saved = build(layouts["fsdp"], 1.0)
    ckpt.save(tmp_path / "a", saved, group=world)
    wanted = gather_whole(saved["model"])
    for mesh in (layouts["both"], None):
        state = build(mesh, -3.0)
        assert ckpt.load(tmp_path / "a", state, group=LOCAL if mesh is None else world) == ([], [])
        for name, tensor in gather_whole(state["model"]).items():
            assert torch.equal(tensor, wanted[name]), name
        parameters = dict(state["model"].named_parameters())
        moment = state["optimizer"].state[parameters["layers.0.down.weight"]]["exp_avg"]
        local = moment.to_local() if mesh is not None else moment
        torch.testing.assert_close(local, torch.full_like(local, 0.1))


@ranks(2)
def test_offloaded_slices_train_as_others_do():
    group = Mesh().group("dp")
    assert_equal_training(
        lambda net: fully_shard(net, group=group, expert_group=group, offload=True),
        adamw,
        group=group,
        micros=3,
    )
    mesh = Mesh(ep=2)
    with pytest.raises(ValueError, match="offload=True: experts lie whole"):
        fully_shard(Net(ep=mesh.expert.group("ep")), group=mesh.group("dp"), offload=True)


@ranks(2)
def test_what_is_wrong_is_refused_on_all_ranks():
    group = Mesh().group("dp")
    with pytest.raises(ValueError, match="reduction='sums' must be"):
        fully_shard(nn.Linear(2, 2), group=group, reduction="sums")
    with pytest.raises(ValueError, match="expert_group='ep' must be a Group"):
        fully_shard(nn.Linear(2, 2), group=group, expert_group="ep")
    net = fully_shard(nn.Linear(2, 2), group=group)
    with pytest.raises(ValueError, match="must not be wrapped twice: it is a FSDPModule"):
        fully_shard(net, group=group)
    torch.manual_seed(group.rank)
    with pytest.raises(ValueError, match="'weight' must be the same on all ranks"):
        fully_shard(nn.Linear(2, 2), group=group)
    odd = nn.Linear(2, 2)
    if group.rank == 1:
        odd.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="'gain' is a scalar"):
        fully_shard(odd, group=group)


@ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_decoder_under_recomputation_has_the_gradients_of_one_process(sequence_parallel):
    mesh = Mesh(tp=2, dp=2)
    group = mesh.group("dp")
    twin = Decoder(SPEC).double()
    net = Decoder(
        SPEC, mesh=mesh, recompute="layers.*", sequence_parallel=sequence_parallel
    ).double()
    load_whole(net, gather_whole(twin))
    fully_shard(net, group=group)
    tokens = torch.arange(24).view(4, 6) % 37
    for _ in range(2):
        net.zero_grad()
        twin.zero_grad()
        logits = net(tokens.chunk(2)[group.rank], gather_logits=True).logits
        logits.square().mean().backward()
        twin(tokens).logits.square().mean().backward()
        wanted = dict(twin.named_parameters())
        for name, parameter, specs in marks(net):
            gradient = whole_tensor(parameter.grad, specs)
            torch.testing.assert_close(gradient, wanted[name].grad, rtol=0, atol=1e-12, msg=name)


@pytest.mark.slow
@ranks(2)
def test_compiled_units_have_the_gradients_of_one_process():
    group = Mesh().group("dp")
    torch.manual_seed(0)
    twin = Untied().double()
    net: Any = Untied().double()
    net.load_state_dict(twin.state_dict())
    for layer in net.layers:
        layer.compile(backend="aot_eager")
    fully_shard(net, group=group)
    x = torch.randn(2, 3, dtype=torch.float64)
    for _ in range(3):
        net.zero_grad()
        net(x[group.rank : group.rank + 1]).sum().backward()
    (twin(x).sum() / 2).backward()
    wanted = dict(twin.named_parameters())
    for name, parameter in net.named_parameters():
        gradient = parameter.grad.full_tensor()
        torch.testing.assert_close(gradient, wanted[name].grad, rtol=0, atol=1e-12, msg=name)
