"""A rank holds and sends the bytes that the docstring states."""

import gc
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.parallel import ShardedOptimizer, StochasticRounding
from megablocks_core.testing import ranks

WIDTH, LAYERS = 64, 4
ELEMENTS = LAYERS * WIDTH * WIDTH  # divides evenly: no padding


class _Bytes(TorchDispatchMode):
    """What is handed to messages, by their names."""

    def __init__(self):
        super().__init__()
        self.sent = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            tensors = [x for x in pytree.tree_leaves(args) if type(x) is torch.Tensor]
            self.sent.setdefault(name, []).append(max(x.nbytes for x in tensors))
        return result


@contextmanager
def _counting():
    """What is alive already is not counted, and costs no time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _alive():
    """Bytes of all storages that are new, once gloo's threads let go of what they sent."""
    sizes = [_storages()]
    while len(sizes) < 5 or sizes[-1] < sizes[-5]:
        time.sleep(0.01)
        sizes.append(_storages())
    return sizes[-1]


def _storages():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout == torch.strided:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def _bytes(dtype, **options):
    """Bytes an element when made, after the second backward and after the second step; sent."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(dtype)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, bucket_bytes=8 * WIDTH**2, **options)
    x = torch.ones(2, WIDTH, dtype=dtype)
    sizes = [_alive() - x.nbytes]
    for _ in range(2):
        traffic = _Bytes()
        with traffic:
            model(x).square().mean().backward()
            at_step = _alive() - x.nbytes
            optimizer.step()
    sizes += [at_step, _alive() - x.nbytes]
    # Flags, numbers of steps and the like are less than a twentieth of a byte.
    return [round(size / ELEMENTS, 1) for size in sizes], traffic.sent


def _formula(b, g, n, *, zero, masters):
    kept = b + (g / n if masters else 0)
    state, gradients = 2 * g / n, (g if zero == 1 else 0) + g / n
    whole = g if zero == 1 else 0
    return [round(size, 1) for size in (kept, kept + state + gradients, kept + state + whole)]


@ranks(2, 4)
def test_bytes_of_weights_gradients_and_state():
    group = Group.of(dist.group.WORLD)
    for zero in (1, 2):
        for dtype, b, g in ((torch.bfloat16, 2, 4), (torch.float64, 8, 8)):
            for masters in (True, StochasticRounding()):
                with _counting():
                    found, sent = _bytes(dtype, group=group, zero=zero, masters=masters)
                has_master = masters is True and b == 2
                expected = _formula(b, g, group.size, zero=zero, masters=has_master)
                assert found == expected, (zero, dtype, masters, found, expected)
                assert sum(sent["alltoall_base"]) == ELEMENTS * g
                assert sum(sent["allgather_base"]) == ELEMENTS * b
                assert set(sent) == {"alltoall_base", "allgather_base", "allreduce"}
                assert sum(sent["allreduce"]) == LAYERS  # which parameters were used


@ranks(4)
def test_hybrid_shards_add_an_all_reduce_of_the_shard():
    group, replicate = Mesh(dp=4).split("dp", inner=2)
    with _counting():
        _, sent = _bytes(torch.float32, group=group, replicate=replicate)
    assert sum(sent["alltoall_base"]) == sum(sent["allgather_base"]) == ELEMENTS * 4
    assert sum(sent["allreduce"]) == ELEMENTS * 4 // 2 + 2 * LAYERS


@ranks(2)
def test_over_groups_of_one_the_module_is_plain_and_nothing_is_sent():
    model = nn.Linear(WIDTH, WIDTH)
    places = [one.data_ptr() for one in model.parameters()]
    with _counting():
        optimizer = ShardedOptimizer(model, torch.optim.SGD, group=LOCAL, lr=0.1)
        assert _alive() == sum(one.nbytes for one in model.parameters())
    traffic = _Bytes()
    with traffic:
        model(torch.ones(2, WIDTH)).sum().backward()
        assert model.weight.grad is not None  # torch's own
        optimizer.step()
    assert traffic.sent == {}
    assert [one.data_ptr() for one in model.parameters()] == places
    assert not model._forward_hooks and not model._forward_pre_hooks
