"""``@ranks`` runs bodies on every rank of a fresh world, with pytest's own conveniences."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megablocks_core.testing import ranks
from megablocks_core.testing.ranks import _pickled


@ranks(1, 2, 4)
def test_body_runs_in_an_initialised_world(tmp_path):
    x = torch.ones(())
    dist.all_reduce(x)
    assert x == dist.get_world_size()
    (tmp_path / f"{dist.get_rank()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()


@pytest.mark.parametrize("value", [torch.ones(2), torch.zeros(2)])
@ranks(2)
def test_parameters_arrive(value):
    assert value.sum() in (0, 2)


@ranks(2)
def test_every_rank_has_the_same_seed_and_one_thread():
    draws = [torch.empty(1) for _ in range(2)]
    dist.all_gather(draws, torch.rand(1))
    assert draws[0] == draws[1]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("turn", [0, 1])
@ranks(2)
def test_each_test_has_a_world_of_its_own(turn):
    store = dist.distributed_c10d._get_default_store()
    assert not store.check(["left behind"])
    dist.barrier()
    store.set("left behind", "x")
    dist.new_group([0, 1])
    assert len(dist.distributed_c10d._world.pg_map) == 2


@pytest.mark.parametrize("turn", [0, 1])
@ranks(2)
def test_workers_are_reused(turn, tmp_path_factory_path):
    pids = tmp_path_factory_path / f"pid-{dist.get_rank()}"
    if turn == 0:
        pids.write_text(str(os.getpid()))
    else:
        assert pids.read_text() == str(os.getpid())


@pytest.fixture(scope="module")
def tmp_path_factory_path(tmp_path_factory):
    return tmp_path_factory.mktemp("pids")


@ranks(2)
def not_collected():
    pass


def test_every_size_is_a_test_with_its_own_id():
    (mark,) = not_collected.pytestmark
    assert mark.args == ("num_ranks", (2,))
    assert mark.kwargs["ids"] == ["2ranks"]


def test_nccl_tests_are_marked_gpu():
    test = ranks(2, backend="nccl")(lambda_free_body)
    assert "gpu" in {mark.name for mark in test.pytestmark}


def lambda_free_body():
    pass


@pytest.mark.parametrize("sizes", [(), (0,), (2, -1)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match="sizes=.* must be"):
        ranks(*sizes)


def test_only_module_level_functions_are_served():
    with pytest.raises(ValueError, match="must be a function at module level"):
        ranks(2)(lambda: None)


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(TypeError, match=r"hook=.* must be picklable"):
        _pickled({"hook": SimpleNamespace(call=lambda: None)})
