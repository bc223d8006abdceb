"""Sums and counts are exact: a mean does not depend on how its terms were cut."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import Mean, Metrics, pooled

whole_terms = st.lists(
    st.tuples(st.integers(-(2**40), 2**40).map(float), st.integers(0, 2**20)), min_size=1
)


def world():
    return Mesh().group("dp")


def test_a_mean_is_a_float_that_remembers():
    mean = Mean(-9.0, 4)
    assert mean == -2.25 and f"{mean:.2f}" == "-2.25" and math.exp(mean) == math.exp(-2.25)
    assert (mean.sum, mean.count) == (-9.0, 4.0)
    assert math.isnan(Mean(0.0, 0))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_mean_remembers_too(copied):
    mean = copied(Mean(3.0, 4))
    assert (mean.sum, mean.count, mean) == (3.0, 4.0, 0.75)


@given(terms=whole_terms, data=st.data())
def test_any_cut_into_micro_batches_and_lines_gives_the_same_total(terms, data):
    metrics, lines = Metrics("loss"), []
    for total, count in terms:
        metrics.add("loss", total, count)
        if data.draw(st.booleans()):
            lines += metrics.reduce().values()
    lines += metrics.reduce().values()
    whole = pooled(lines)
    assert whole.sum == sum(total for total, _ in terms)
    assert whole.count == sum(count for _, count in terms)


@given(losses=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
def test_float32_losses_are_added_without_rounding_to_float32(losses):
    metrics = Metrics("loss")
    for loss in losses:
        metrics.add("loss", torch.tensor(loss, dtype=torch.float32), torch.tensor(1))
    assert metrics.reduce().get("loss", 0.0) == pytest.approx(
        math.fsum(losses) / len(losses), rel=1e-14, abs=1e-12
    )


def test_added_tensors_keep_no_graph_and_may_have_any_shape_of_one_element():
    metrics = Metrics("loss")
    loss = torch.ones(1, 1, requires_grad=True) * 3
    metrics.add("loss", loss, torch.tensor(2, dtype=torch.int64))
    assert not metrics._pairs.requires_grad
    assert metrics.reduce()["loss"] == 1.5


def test_a_metric_without_a_count_is_left_out_and_a_reduced_one_starts_again():
    metrics = Metrics("loss", "grad_norm")
    metrics.add("loss", 0.0, 0)
    metrics.add("grad_norm", 2.0)
    assert metrics.reduce() == {"grad_norm": 2.0}
    assert metrics.reduce() == {}


def test_a_loss_that_is_not_finite_is_not_hidden():
    metrics = Metrics("loss")
    metrics.add("loss", math.nan, 4)
    assert math.isnan(metrics.reduce()["loss"])


@ranks(1, 2, 4)
def test_ranks_with_different_data_give_the_mean_over_all_tokens():
    rank, size = dist.get_rank(), dist.get_world_size()
    metrics = Metrics("loss", "negative", group=world())
    metrics.add("loss", torch.tensor(10.0 * rank), 2 + rank)
    if rank == 0:  # a rank may have seen nothing
        metrics.add("negative", -1.5)
    with CommDebugMode() as traffic:
        means = metrics.reduce()
    assert traffic.get_total_counts() == (size > 1)
    assert means["loss"].sum == 10.0 * sum(range(size))
    assert means["loss"].count == sum(2 + r for r in range(size))
    assert means["negative"] == -1.5


@ranks(2)
def test_ranks_with_the_same_data_leave_the_mean_as_it_is():
    metrics = Metrics("loss", group=world())
    metrics.add("loss", 7.0, 3)
    assert metrics.reduce()["loss"] == 7.0 / 3


@ranks(1, 2, 4)
def test_pending_sums_move_to_another_number_of_ranks():
    metrics = Metrics("loss", group=world())
    metrics.add("loss", 1.0 + dist.get_rank(), 2)
    state = metrics.state_dict()
    size = dist.get_world_size()
    assert state == {"loss": [size * (size + 1) / 2, 2.0 * size]}
    resumed = Metrics("loss", "new", group=world())
    resumed.load_state_dict({"loss": [5.0, 4.0]})
    resumed.add("loss", 1.0, 1)
    mean = resumed.reduce()["loss"]
    assert (mean.sum, mean.count) == (5.0 + size, 4.0 + size)
    assert metrics.reduce()["loss"].sum == state["loss"][0]  # state_dict took nothing away


def test_wrong_names_and_shapes_are_refused():
    with pytest.raises(ValueError, match="different names"):
        Metrics()
    with pytest.raises(ValueError, match="different names"):
        Metrics("loss", "loss")
    metrics = Metrics("loss")
    with pytest.raises(ValueError, match=r"name='los' must be one of \['loss'\]"):
        metrics.add("los", 1.0)
    with pytest.raises(ValueError, match=r"shape \[2\] must have one element"):
        metrics.add("loss", torch.ones(2))
    with pytest.raises(ValueError, match="must only name metrics"):
        metrics.load_state_dict({"accuracy": [1, 1]})


def step_of(seed):
    """Negative losses of a step's tokens, and which of them count."""
    generator = torch.Generator().manual_seed(seed)
    losses = -3.0 + torch.rand(8, 4, generator=generator, dtype=torch.float64)
    return losses, torch.rand(8, 4, generator=generator) < 0.7


def reported(*, every, num_micro_batches, resumed_at, group):
    """Means of windows of six steps, from lines every ``every`` steps, after a resume."""
    metrics, lines = Metrics("loss", group=group), []
    for step in range(12):
        if step == resumed_at:  # between two lines too
            state = metrics.state_dict()
            metrics = Metrics("loss", group=group)
            metrics.load_state_dict(state)
        losses, mask = step_of(step)
        rows = slice(group.rank, None, group.size)
        for loss, counted in zip(
            losses[rows].chunk(num_micro_batches), mask[rows].chunk(num_micro_batches), strict=True
        ):
            metrics.add("loss", loss[counted].sum(), counted.sum())
        if step % every == every - 1:
            lines.append(metrics.reduce()["loss"])
    half = len(lines) // 2
    return pooled(lines[:half]), pooled(lines[half:])


@ranks(1, 2, 4)
def test_a_reported_loss_knows_no_interval_micro_batch_or_resume_and_keeps_its_sign():
    group = world()
    expected = []
    for first in (0, 6):
        total, count = 0.0, 0
        for losses, mask in map(step_of, range(first, first + 6)):
            total, count = total + losses[mask].sum().item(), count + mask.sum().item()
        expected.append((total / count, count))
    for every in (1, 2, 3, 6):
        for num_micro_batches in (1, 2):
            for resumed_at in (None, 4, 5):
                found = reported(
                    every=every,
                    num_micro_batches=num_micro_batches,
                    resumed_at=resumed_at,
                    group=group,
                )
                for mean, (value, count) in zip(found, expected, strict=True):
                    assert mean == pytest.approx(value, rel=1e-14) and mean < 0
                    assert mean.count == count


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "state of type NoneType must be a dict from state_dict"),
        ({"loss": 1.0}, r"state\['loss'\]=1.0 must be a sum and a count"),
        ({"loss": [1.0]}, r"state\['loss'\]=\[1.0\] must be a sum and a count"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(state, message):
    metrics = Metrics("loss", "norm")
    metrics.add("loss", 6.0, 2)
    with pytest.raises(ValueError, match=message):
        metrics.load_state_dict(state)
    assert metrics.reduce() == {"loss": 3.0}
    metrics.load_state_dict({"norm": [4.0, 2.0]})  # of another set of names, one is there
    assert metrics.reduce() == {"norm": 2.0}
