"""Gated delta nets equal one process at any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core import ckpt
from megablocks_core.groups import LOCAL, Mesh, gather_from, gather_whole
from megablocks_core.parallel.initial import reset_parameters
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.layers.ssm.mixers.kinds import HIDDEN, build, loss, over, tokens
from tests.traffic import Traffic

PACKED = {"x_TH": tokens(8, HIDDEN), "cu_seqlens": torch.tensor([0, 3, 3, 4, 7])}


@ranks(1, 2, 4)
def test_heads_over_ranks_equal_one_process():
    for options in ({}, {"num_value_heads": 4}):
        assert_parallel_equivalence(
            over("GatedDeltaNet", **options), PACKED, group=_tp(), loss=loss, same_start=True
        )


@ranks(2, 4)
def test_cut_tokens_equal_one_process():
    tp = _tp()
    assert_parallel_equivalence(
        over("GatedDeltaNet", sequence_parallel=True),
        PACKED,
        group=tp,
        loss=loss,
        split=lambda inputs: {**inputs, "x_TH": inputs["x_TH"].chunk(tp.size)[tp.rank]},
        join=lambda y_TH: gather_from(y_TH, dim=0, group=tp),
        same_start=True,
    )


@ranks(2)
def test_traffic_is_one_message_each_way_and_one_for_the_norm():
    tp = _tp()
    for options, forward, backward in (
        ({}, {"all_reduce": [4 * 8]}, {"all_reduce": [2, 4 * 8]}),
        (
            {"sequence_parallel": True},
            {"all_gather": [8 * 8], "reduce_scatter": [8 * 8]},
            {"all_gather": [8 * 8, 8 * 8], "all_reduce": [2], "reduce_scatter": [8 * 8]},
        ),
    ):
        mixer = build("GatedDeltaNet", recurrent=True, tp=tp, **options)
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
    saved = build("GatedDeltaNet", tp=pairs)
    ckpt.save(folder, {"model": saved}, group=world)
    expected = gather_whole(saved)
    for tp in (LOCAL, Mesh(tp=4).group("tp")):
        loaded = build("GatedDeltaNet", tp=tp)
        ckpt.load(folder, {"model": loaded}, group=world)
        assert all(torch.equal(x, expected[name]) for name, x in gather_whole(loaded).items())


@ranks(1, 2, 4)
def test_one_seed_is_one_mixer_also_from_meta():
    whole = build("GatedDeltaNet")
    reset_parameters(whole, seed=5)
    mixer = build("GatedDeltaNet", tp=_tp(), device="meta").to_empty(device="cpu")
    reset_parameters(mixer, seed=5)
    expected = gather_whole(whole)
    for name, found in gather_whole(mixer).items():
        assert torch.equal(found, expected[name]), name


def test_queries_and_keys_have_length_one_for_each_value_head():
    seen = []

    def scan(q, k, v, g, beta, **options):
        seen.extend((q, k, g, beta))
        return v, None

    mixer = build("GatedDeltaNet", scan=scan).double()
    mixer(tokens(5, HIDDEN))
    q, k, g, beta = seen
    for heads in (q, k):
        assert heads.shape == (1, 5, 8, 3)
        assert torch.equal(heads[:, :, ::2], heads[:, :, 1::2])
        assert_close(
            heads.norm(dim=-1), torch.ones(1, 5, 8, dtype=torch.float64), atol=1e-2, rtol=0
        )
    assert (g < 0).all() and (beta > 0).all() and (beta < 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_key_heads": 3}, "num_key_heads=3 must divide num_value_heads=8"),
        ({"rate_range": (2.0, 1.0)}, "rate_range"),
        ({"time_step_range": (0.2, 0.1)}, "time_step_range"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        build("GatedDeltaNet", **options)


@ranks(2)
def test_f093_key_heads_that_do_not_divide_over_the_ranks_raise():
    with pytest.raises(ValueError, match="num_key_heads=1 must divide evenly over a group of 2"):
        build("GatedDeltaNet", num_key_heads=1, tp=_tp())


def _tp():
    return Mesh(tp=dist.get_world_size()).group("tp")
