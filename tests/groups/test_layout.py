"""Rank arithmetic agrees with counting, for every order, size and view."""

from itertools import permutations, product
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.groups.layout import (
    DENSE_AXES,
    EXPERT_AXES,
    Layout,
    check_same_stages,
    dense_layout,
    expert_layout,
    read_as_dense,
    split_family,
)

ORDERS = ["-".join(axes) for axes in permutations(DENSE_AXES)]
SIZES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in DENSE_AXES})


def count_groups(axes, sizes, asked):
    """Count through all coordinates, and put together the ranks that agree in what is not asked."""
    slow_first = list(reversed(axes))
    groups = {}
    for rank, places in enumerate(product(*(range(sizes[axis]) for axis in slow_first))):
        place = dict(zip(slow_first, places, strict=True))
        fixed = tuple(sorted((axis, place[axis]) for axis in axes if axis not in asked))
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


def world_of(sizes):
    return sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]


@given(SIZES, st.sampled_from(ORDERS), st.sets(st.sampled_from(DENSE_AXES), min_size=1))
def test_family_is_what_counting_gives(sizes, order, asked):
    layout = dense_layout(world_of(sizes), sizes, order)
    assert layout.family(*asked) == count_groups(order.split("-"), sizes, asked)


@given(SIZES, st.sampled_from(ORDERS), st.data())
def test_expert_family_is_what_counting_gives(sizes, order, data):
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    etp = data.draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = data.draw(st.sampled_from([n for n in range(1, stage + 1) if stage // etp % n == 0]))
    asked = data.draw(st.sets(st.sampled_from(EXPERT_AXES), min_size=1))
    expert_order = order.replace("etp", "tp").replace("tp", "etp").replace("dp", "ep-edp")
    axes = [axis for axis in expert_order.split("-") if axis != "cp"]
    expert_sizes = {"etp": etp, "ep": ep, "edp": stage // etp // ep, "pp": sizes["pp"]}

    dense = dense_layout(world_of(sizes), sizes, order)
    expert = expert_layout(dense, ep=ep, etp=etp)

    assert expert.family(*asked) == count_groups(axes, expert_sizes, asked)
    if expert.family("pp") == dense.family("pp"):
        check_same_stages(dense, expert)
    else:
        with pytest.raises(ValueError, match=f"order='{order}' must give .* same pp groups"):
            check_same_stages(dense, expert)


def test_families_of_sixteen_ranks_are_the_known_ones():
    layout = dense_layout(16, {"tp": 2, "cp": 1, "dp": -1, "pp": 4}, "tp-cp-dp-pp")
    assert layout.family("tp") == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert layout.family("dp") == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15],
    ]  # fmt: skip
    assert layout.family("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert layout.family("tp", "pp")[0] == [0, 1, 4, 5, 8, 9, 12, 13]


@given(SIZES, st.sampled_from(ORDERS))
def test_coordinates_number_the_ranks(sizes, order):
    layout = dense_layout(world_of(sizes), sizes, order)
    seen = {
        tuple(layout.coordinate(axis, rank) for axis in DENSE_AXES)
        for rank in range(layout.world_size)
    }
    assert seen == set(product(*(range(sizes[axis]) for axis in DENSE_AXES)))
    for axis in DENSE_AXES:
        for group in layout.family(axis):
            assert [layout.coordinate(axis, rank) for rank in group] == list(range(sizes[axis]))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_split_covers_the_family_both_ways(blocks, inner, stride):
    layout = Layout(("tp", "dp"), (stride, blocks * inner))
    shard, replicate = split_family(layout.family("dp"), inner=inner, name="dp")
    # The same as an axis cut in two: dp = inner fast, blocks slow.
    cut = {"tp": stride, "inner": inner, "blocks": blocks}
    assert sorted(shard) == sorted(count_groups(list(cut), cut, {"inner"}))
    assert sorted(replicate) == sorted(count_groups(list(cut), cut, {"blocks"}))


def test_4096_ranks_take_milliseconds():
    start = perf_counter()
    layout = dense_layout(4096, {"tp": 8, "cp": 2, "dp": -1, "pp": 16}, "tp-cp-dp-pp")
    expert = expert_layout(layout, ep=32, etp=1)
    families = [layout.family(axis) for axis in DENSE_AXES] + [layout.family("dp", "cp")]
    families += [expert.family(axis) for axis in EXPERT_AXES]
    assert perf_counter() - start < 1.0
    assert all(sorted(sum(family, [])) == list(range(4096)) for family in families)


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(6, {"tp": 4}), (8, {"tp": 2, "pp": 3}), (8, {"tp": 0}), (8, {"tp": -1}), (8, {"dp": 3}),
     (8, {"dp": 0}), (8, {"dp": -2}), (2, {"tp": 4}), (0, {}), (8, {"tp": 2.0})],
)  # fmt: skip
def test_f_007_sizes_that_do_not_make_up_the_world(world_size, sizes):
    """Proposed: a ValueError before any collective that lists the world and each size."""
    sizes = {"tp": 1, "cp": 1, "dp": -1, "pp": 1, **sizes}
    with pytest.raises(ValueError, match="must be") as error:
        dense_layout(world_size, sizes, "tp-cp-dp-pp")
    listed = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    assert f"world_size={world_size}, {listed}" in str(error.value)


def test_f_002a_expert_data_size_is_computed_from_etp():
    dense = dense_layout(4, {"tp": 4, "cp": 1, "dp": -1, "pp": 1}, "tp-cp-dp-pp")
    assert expert_layout(dense, ep=4, etp=1).size("edp") == 1


def test_f_002c_experts_that_need_more_ranks_name_every_size():
    dense = dense_layout(2, {"tp": 1, "cp": 1, "dp": -1, "pp": 2}, "tp-cp-dp-pp")
    with pytest.raises(ValueError, match=r"etp \* ep = 2 must divide .* = 1") as error:
        expert_layout(dense, ep=2, etp=1)
    assert "world_size=2, tp=1, cp=1, dp=1, pp=2, ep=2, etp=1" in str(error.value)


@pytest.mark.parametrize("sizes", [{"ep": 0, "etp": 1}, {"ep": 1, "etp": -1}])
def test_expert_sizes_are_positive(sizes):
    dense = dense_layout(4, {"tp": 4, "cp": 1, "dp": -1, "pp": 1}, "tp-cp-dp-pp")
    with pytest.raises(ValueError, match="must be a positive whole number; got world_size=4"):
        expert_layout(dense, **sizes)


@pytest.mark.parametrize("inner", [0, -1, 4, 5, 7, 12])
def test_f_003_a_split_that_does_not_divide_is_refused(inner):
    family = Layout(("dp",), (6,)).family("dp")
    with pytest.raises(ValueError, match=f"inner={inner} must divide dp=6"):
        split_family(family, inner=inner, name="dp")


@pytest.mark.parametrize("order", ["tp-cp-dp", "tp-cp-ep-dp-pp", "tp-tp-dp-pp", "", "tp,cp,dp,pp"])
def test_order_names_each_axis_once(order):
    with pytest.raises(ValueError, match=f"order='{order}' must name tp, cp, dp, pp once each"):
        dense_layout(1, {"tp": 1, "cp": 1, "dp": -1, "pp": 1}, order)


def test_f_004_an_axis_that_does_not_exist_is_named_with_those_that_do():
    layout = dense_layout(8, {"tp": 2, "cp": 1, "dp": 2, "pp": 2}, "tp-cp-dp-pp")
    for ask in (layout.family, layout.size):
        with pytest.raises(ValueError, match="axis='encoder' must be one of tp, cp, dp, pp"):
            ask("encoder")


@pytest.mark.parametrize("axes", [(), ("dp", "dp")])
def test_axes_are_named_once(axes):
    with pytest.raises(ValueError, match="must name one axis or several different ones"):
        Layout(("tp", "dp"), (2, 2)).family(*axes)


def test_dimensions_of_a_device_mesh_read_as_sizes_and_order():
    dims = Layout(("tp", "dp_shard", "dp_replicate", "pp"), (2, 3, 4, 5))
    assert read_as_dense(dims) == ({"tp": 2, "cp": 1, "dp": 12, "pp": 5}, "tp-dp-pp-cp")
    for names in [("dp_replicate", "dp_shard"), ("tp", "x"), ("tp", "tp"), ()]:
        with pytest.raises(ValueError, match="mesh_dim_names=.* must be different ones of tp"):
            read_as_dense(Layout(names, (2,) * len(names)))
