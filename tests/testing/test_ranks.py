"""The harness runs bodies on every rank and tells who failed first."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.testing import ranks


@ranks(1, 2, 4)
def test_body_runs_in_an_initialised_world(tmp_path):
    x = torch.ones(())
    dist.all_reduce(x)
    assert x == dist.get_world_size()
    (tmp_path / f"{dist.get_rank()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()


@pytest.mark.parametrize("value", [1, 2])
@ranks(2)
def test_parameters_arrive(value):
    assert value in (1, 2)
