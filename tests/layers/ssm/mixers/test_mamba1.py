"""Mamba mixers equal one process at any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core import ckpt
from megablocks_core.groups import LOCAL, Mesh, gather_from, gather_whole
from megablocks_core.layers.ssm import Mamba1
from megablocks_core.layers.ssm.mixers.mamba1 import StepProjection
from megablocks_core.parallel.initial import reset_parameters
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.layers.ssm.mixers.kinds import HIDDEN, build, loss, over, tokens
from tests.traffic import Traffic

PACKED = {"x_TH": tokens(8, HIDDEN), "cu_seqlens": torch.tensor([0, 3, 3, 4, 7])}


@ranks(1, 2, 4)
def test_channels_over_ranks_equal_one_process():
    for options in (
        {},
        {"projection_norms": None, "bias": True, "conv_bias": False},
        {"projection_norms": "plain"},
    ):
        assert_parallel_equivalence(
            over("Mamba1", **options), PACKED, group=_tp(), loss=loss, same_start=True
        )


@ranks(2, 4)
def test_cut_tokens_equal_one_process():
    tp = _tp()
    assert_parallel_equivalence(
        over("Mamba1", sequence_parallel=True),
        PACKED,
        group=tp,
        loss=loss,
        split=lambda inputs: {**inputs, "x_TH": inputs["x_TH"].chunk(tp.size)[tp.rank]},
        join=lambda y_TH: gather_from(y_TH, dim=0, group=tp),
        same_start=True,
    )


@ranks(2)
def test_traffic_is_two_messages_each_way():
    tp = _tp()
    for options, forward, backward in (
        ({}, {"all_reduce": [4 * 8, 4 * 8]}, {"all_reduce": [4 * 8, 4 * 8]}),
        (
            {"sequence_parallel": True},
            {"all_gather": [8 * 8], "all_reduce": [8 * 8], "reduce_scatter": [8 * 8]},
            {"all_gather": [8 * 8, 8 * 8], "all_reduce": [8 * 8], "reduce_scatter": [8 * 8]},
        ),
    ):
        mixer = build("Mamba1", recurrent=True, tp=tp, **options)
        x_TH = tokens(4, HIDDEN, dtype=torch.float32).requires_grad_()
        with Traffic() as traffic:
            y_TH = mixer(x_TH)
        assert traffic.sorted_sizes() == forward
        with Traffic() as traffic:
            y_TH.sum().backward()
        assert traffic.sorted_sizes() == backward


@ranks(4)
def test_f094_a_checkpoint_of_two_ranks_loads_into_one_and_four(tmp_path):
    world, pairs = Mesh(dp=4).group("dp"), Mesh(tp=2).group("tp")
    folder = world.all_gather_object(str(tmp_path))[0] + "/step"
    torch.manual_seed(0)
    saved = build("Mamba1", tp=pairs)
    ckpt.save(folder, {"model": saved}, group=world)
    expected = gather_whole(saved)
    for tp in (LOCAL, Mesh(tp=4).group("tp")):
        loaded = build("Mamba1", tp=tp)
        ckpt.load(folder, {"model": loaded}, group=world)
        assert all(torch.equal(x, expected[name]) for name, x in gather_whole(loaded).items())


@ranks(1, 2, 4)
def test_one_seed_is_one_mixer_also_from_meta():
    whole = build("Mamba1")
    reset_parameters(whole, seed=5)
    mixer = build("Mamba1", tp=_tp(), device="meta").to_empty(device="cpu")
    reset_parameters(mixer, seed=5)
    expected = gather_whole(whole)
    for name, found in gather_whole(mixer).items():
        assert torch.equal(found, expected[name]), name


def test_defaults_are_those_of_the_paper():
    mixer = Mamba1(40)
    assert mixer.A_log.shape == (80, 16)
    assert mixer.get_parameter("dt_proj.weight").shape == (80, 3)
    assert_close(mixer.A_log.exp()[5], torch.arange(1.0, 17.0))


def test_step_sizes_are_wide():
    steps = StepProjection(2, 6, time_step_range=(1e-3, 0.1), dtype=torch.bfloat16)
    dt = steps(torch.zeros(3, 2, dtype=torch.bfloat16))
    assert dt.dtype == torch.float32 and dt.min() > 9e-4 and dt.max() < 0.11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection_norms": "none"}, "projection_norms='none'"),
        ({"time_step_range": (0.2, 0.1)}, "time_step_range"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        build("Mamba1", **options)


@ranks(2)
def test_channels_that_do_not_divide_over_the_ranks_raise():
    with pytest.raises(ValueError, match="inner_size=15 must divide evenly over a group of 2"):
        build("Mamba1", inner_size=15, tp=_tp())


def _tp():
    return Mesh(tp=dist.get_world_size()).group("tp")
