"""Mamba-2 mixers equal one process at any number of ranks, groups and norm groups."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core import ckpt
from megablocks_core.groups import LOCAL, Group, Mesh, gather_from, gather_whole, load_whole
from megablocks_core.layers.ssm import Mamba2
from megablocks_core.parallel.initial import reset_parameters
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.layers.ssm.mixers.kinds import HIDDEN, build, loss, over, tokens
from tests.traffic import Traffic

DOCUMENTS = {"cu_seqlens": torch.tensor([0, 3, 3, 4, 7])}
ROW = {"x_TH": tokens(2, 9, HIDDEN)}
PACKED = {"x_TH": tokens(1, 8, HIDDEN), **DOCUMENTS}


@ranks(1, 2, 4)
def test_heads_over_ranks_equal_one_process():
    for options, inputs in (
        ({"num_groups": 4, "bias": True}, ROW),
        ({"num_groups": 2, "norm_groups": 1, "time_step_limit": (0.01, 0.05)}, PACKED),
        ({"num_groups": 1, "norm_before_gate": True, "conv_bias": False}, ROW),
    ):
        _compare(inputs, **options)


@pytest.mark.slow
@ranks(1, 2, 4)
def test_every_number_of_groups_and_norm_groups_equals_one_process():
    for num_groups in (1, 2, 4):
        for norm_groups in (1, 2, 4, 8):
            for inputs in (ROW, PACKED):
                _compare(inputs, num_groups=num_groups, norm_groups=norm_groups)


@ranks(1, 2, 4)
def test_cut_tokens_equal_one_process():
    tp = _tp()
    for num_groups, inputs in ((2, {"x_TH": tokens(8, HIDDEN)}), (1, PACKED)):
        assert_parallel_equivalence(
            over("Mamba2", num_groups=num_groups, sequence_parallel=True),
            inputs,
            group=tp,
            loss=loss,
            split=lambda inputs: {
                **inputs,
                "x_TH": inputs["x_TH"].chunk(tp.size, dim=-2)[tp.rank],
            },
            join=lambda y_TH: gather_from(y_TH, dim=-2, group=tp),
            same_start=True,
        )


@ranks(2)
def test_f092_every_packed_part_is_cut_on_its_own():
    tp = _tp()
    mixer = Mamba2(HIDDEN, num_heads=4, head_dim=2, state_size=4, num_groups=2, tp=tp)
    rows = torch.arange(36.0)[:, None].expand(36, HIDDEN)
    load_whole(mixer, {**gather_whole(mixer), "in_proj.weight": rows.contiguous()})
    expected = [(0, 4), (8, 12), (16, 20), (24, 28), (32, 34)]
    shift = 0 if tp.rank == 0 else 4
    mine = [row + shift for start, stop in expected[:4] for row in range(start, stop)]
    mine += [32 + 2 * tp.rank, 33 + 2 * tp.rank]
    weight = mixer.get_parameter("in_proj.weight")
    assert weight[:, 0].tolist() == mine


@ranks(2)
def test_f093_one_group_over_two_ranks_is_held_by_both():
    tp = _tp()
    mixer = build("Mamba2", num_groups=1, tp=tp).double()
    whole = build("Mamba2", num_groups=1).double()
    load_whole(mixer, gather_whole(whole))
    for each in (mixer, whole):
        loss(each(ROW["x_TH"])).backward()
    shared = slice(16 // tp.size, 16 // tp.size + 6)
    assert_close(mixer.in_proj.weight.grad[shared], whole.in_proj.weight.grad[16:22])


def test_f093_groups_that_fit_no_number_of_ranks_are_refused():
    tp = Group(tuple(range(5)))
    with pytest.raises(ValueError, match="num_groups=3 must divide evenly over a group of 5"):
        Mamba2(HIDDEN, num_heads=15, head_dim=2, state_size=4, num_groups=3, tp=tp)


@ranks(4)
def test_f094_a_checkpoint_of_two_ranks_loads_into_one_and_four(tmp_path):
    world = Mesh(dp=4).group("dp")
    pairs = Mesh(tp=2).group("tp")
    folder = world.all_gather_object(str(tmp_path))[0] + "/step"
    torch.manual_seed(0)
    saved = build("Mamba2", num_groups=4, tp=pairs)
    ckpt.save(folder, {"model": saved}, group=world)
    expected = gather_whole(saved)
    for tp in (LOCAL, Mesh(tp=4).group("tp")):
        torch.manual_seed(1)
        loaded = build("Mamba2", num_groups=4, tp=tp)
        ckpt.load(folder, {"model": loaded}, group=world)
        found = gather_whole(loaded)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


@ranks(2)
def test_traffic_is_one_message_each_way():
    tp = _tp()
    shared = {"all_reduce": 3}
    for options, forward, backward in (
        ({}, {"all_reduce": 1}, {"all_reduce": 1}),
        ({"num_groups": 1, "norm_groups": 2}, {"all_reduce": 1}, shared),
        ({"norm_groups": 1}, {"all_reduce": 2}, {"all_reduce": 2}),
        (
            {"sequence_parallel": True},
            {"all_gather": 1, "reduce_scatter": 1},
            {"all_gather": 2, "reduce_scatter": 1},
        ),
    ):
        mixer = build("Mamba2", tp=tp, **options)
        x_TH = tokens(4, HIDDEN, dtype=torch.float32).requires_grad_()
        with Traffic() as traffic:
            y_TH = mixer(x_TH)
        assert traffic.counts() == forward, options
        with Traffic() as traffic:
            y_TH.sum().backward()
        assert traffic.counts() == backward, options


@ranks(1, 2, 4)
def test_one_seed_is_one_mixer_also_from_meta():
    whole = build("Mamba2")
    reset_parameters(whole, seed=5)
    mixer = build("Mamba2", tp=_tp(), device="meta").to_empty(device="cpu")
    reset_parameters(mixer, seed=5)
    expected = gather_whole(whole)
    for name, found in gather_whole(mixer).items():
        assert torch.equal(found, expected[name]), name


def test_initial_rates_and_step_sizes_lie_in_their_ranges():
    mixer = Mamba2(
        HIDDEN,
        num_heads=200,
        head_dim=1,
        state_size=2,
        rate_range=(2.0, 3.0),
        time_step_range=(0.02, 0.04),
    )
    rates = mixer.A_log.exp()
    steps = nn.functional.softplus(mixer.dt_bias)
    for values, low, high in ((rates, 2.0, 3.0), (steps, 0.02, 0.04)):
        assert low <= values.min() < low * 1.05 and high * 0.95 < values.max() <= high * 1.0001
    assert torch.equal(mixer.D, torch.ones(200))


def test_injected_parts_are_used():
    built, seen = [], []

    def linear(in_features, out_features, *, parallel_mode, bias, device, dtype, **others):
        built.append((parallel_mode, out_features))
        return nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def convolution(x, weight, bias, **options):
        seen.append(sorted(options))
        return x, None

    def scan(x, dt, A, B, C, **options):
        seen.append(sorted(options))
        return x, None

    mixer = build("Mamba2", linear=linear, convolution=convolution, scan=scan)
    assert mixer(torch.ones(3, HIDDEN)).shape == (3, HIDDEN)
    assert built == [("column", 2 * 8 + 2 * 6 + 4), ("row", HIDDEN)]
    common = ["cu_seqlens", "initial_state", "return_final_state"]
    assert seen == [["activation", *common], ["D", "chunk_size", *common]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 3}, "num_groups=3 must divide num_heads=4"),
        ({"norm_groups": 3}, "^norm_groups=3 must divide the 8 features"),
        ({"time_step_limit": (0.2, 0.1)}, "time_step_limit"),
        ({"time_step_range": (0.0, 0.1)}, "time_step_range"),
        ({"rate_range": (2.0, 1.0)}, "rate_range"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        build("Mamba2", **options)


@ranks(2)
def test_heads_that_do_not_divide_over_the_ranks_raise():
    with pytest.raises(ValueError, match="num_heads=3 must divide evenly over a group of 2"):
        build("Mamba2", num_heads=3, num_groups=1, tp=_tp())


def _compare(inputs, **options):
    assert_parallel_equivalence(
        over("Mamba2", **options), inputs, group=_tp(), loss=loss, same_start=True
    )


def _tp():
    return Mesh(tp=dist.get_world_size()).group("tp")
