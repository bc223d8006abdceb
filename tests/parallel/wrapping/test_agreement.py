"""Ranks that were given other options than the rest are refused, all of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import LOCAL, Group, Mesh, ShardSpec, mark
from megablocks_core.parallel import (
    DataParallel,
    LossScaler,
    Muon,
    NewtonSchulz,
    PrecisionPolicy,
    ShardedOptimizer,
    StochasticRounding,
    fully_shard,
)
from megablocks_core.parallel.wrapping.agreement import check_agreed, compare_words, words_of
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _sharded(**options):
    ShardedOptimizer(_model(), torch.optim.SGD, group=_world(), **{"lr": 1.0, **options})


def _data_parallel(**options):
    DataParallel(_model(), group=_world(), **options)


def _fully_sharded(**options):
    fully_shard(_model(), group=_world(), **options)


def _muon(**options):
    Muon(_model(), group=_world(), **options)


def _muon_of_slices(**options):
    model = _model()
    mark(model[0], "weight", ShardSpec(1, _world()))
    Muon(model, **options)


def _scaler(**options):
    LossScaler(group=_world(), **options)


# What is made, an option, and a value on rank 1 that is not the default.
CASES = [
    (_sharded, "zero", 2),
    (_sharded, "reduction", "sum"),
    (_sharded, "masters", StochasticRounding(1)),
    (_sharded, "reduce_dtype", torch.float64),
    (_sharded, "wire_dtype", torch.bfloat16),
    (_sharded, "overlap", True),
    (_sharded, "offload", True),
    (_sharded, "bucket_bytes", 64),
    (_data_parallel, "reduction", "sum"),
    (_data_parallel, "reduce_dtype", torch.float64),
    (_data_parallel, "wire_dtype", torch.bfloat16),
    (_data_parallel, "bucket_bytes", 64),
    (_data_parallel, "wide_gradients", True),
    (_fully_sharded, "reduction", "sum"),
    (_fully_sharded, "units", "1"),
    (_fully_sharded, "reshard", False),
    (_fully_sharded, "precision", PrecisionPolicy()),
    (_fully_sharded, "prefetch", False),
    (_fully_sharded, "offload", True),
    *(
        (made, option, value)
        for made in (_muon, _muon_of_slices)
        for option, value in (
            ("lr", 1.0),
            ("momentum", 0.5),
            ("adjust_lr", "none"),
            ("mode", "duplicated"),
            ("newton_schulz", NewtonSchulz(dtype=torch.float64)),
        )
    ),
    (_scaler, "initial", 8.0),
    (_scaler, "growth_interval", 3),
]


@ranks(2)
@pytest.mark.parametrize(("made", "option", "value"), CASES)
def test_an_option_that_differs_is_refused_on_all_ranks(made, option, value):
    options = {option: value} if _world().rank == 1 else {}
    with pytest.raises(ValueError, match=rf"^{option}.* must be the same on all ranks"):
        made(**options)
    made()  # nothing was left behind
    made(**{option: value})


@ranks(2)
def test_optimizer_classes_are_compared():
    classes = (torch.optim.SGD, torch.optim.Adagrad)
    with pytest.raises(ValueError, match="must be the same on all ranks"):
        ShardedOptimizer(_model(), classes[_world().rank], group=_world(), lr=1.0)


@ranks(4)
def test_each_group_compares_for_itself():
    mesh = Mesh(tp=2, dp=2)
    words = words_of(number=mesh.group("dp").rank, word="a")
    check_agreed(words, groups=(LOCAL, mesh.group("tp"), mesh.group("tp")))
    with pytest.raises(ValueError, match="number must be .* it is . here and . on rank"):
        check_agreed(words, groups=(mesh.group("tp"), mesh.group("dp")))


def test_the_first_difference_is_named():
    compare_words({"a": "1"}, {"a": "1"}, 3)
    with pytest.raises(ValueError, match="b must be .*: it is missing here and '2' on rank 3"):
        compare_words({"a": "1"}, {"b": "'2'", "a": "1"}, 3)
