"""A recomputed call keeps what it promises until backward, and nothing after it."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.parallel.memory.recompute import recompute
from megablocks_core.testing import ranks
from tests.parallel.recompute_blocks import (
    CALLS,
    are_alive,
    block_of,
    ramp,
    saved_bytes,
    watching,
)
from tests.parallel.watching import Operations


def test_only_inputs_are_saved():
    block, x, note = block_of(), ramp(4, 8), torch.arange(5)
    x = (x * 1).requires_grad_() * 1
    for call in (
        lambda: recompute(lambda x, note: block(x), x, note),
        lambda: recompute(lambda x, note: block(x), x, note, keep=["matmul"]),
        lambda: recompute(lambda x, note: recompute(block, x), x, note),
    ):
        saved, _ = saved_bytes(call, *block.parameters())
        assert saved == x.nbytes + note.nbytes
    plain, _ = saved_bytes(lambda: block(x), *block.parameters())
    assert plain == x.nbytes * 2 + 4 * 16 * 8 * 4  # sin: its input and result; gate, up, 2 more


def test_what_the_function_makes_is_freed():
    block, made = block_of(), []
    inner = watching(block.inner, made)
    x = ramp(4, 8).requires_grad_()
    y = recompute(lambda x: block.down(inner(x)), x)
    assert are_alive(made) == [False]
    y.sum().backward()
    assert not any(are_alive(made))
    z = block.down(inner(x))
    assert are_alive(made)[-1]
    assert z.shape == y.shape


def test_kept_results_are_held_until_backward_is_done():
    block, made = block_of(), []
    up = watching(block.up, made)
    x = ramp(4, 8).requires_grad_()
    y = recompute(lambda x: block.down(block.act(block.gate(x), up(x))), x, keep=["matmul"])
    assert are_alive(made) == [True]
    with Operations() as seen:
        y.sum().backward()
    assert not any(are_alive(made))
    assert seen.count("aten::mm", "aten::addmm") == 6  # Gradients take two each.
    assert seen.names.count("aten::silu") == 1


def test_messages_that_are_kept_are_not_sent_again():
    _kept_messages()


@ranks(2)
def test_messages_that_are_kept_are_not_sent_again_over_ranks():
    _kept_messages()


def _kept_messages():
    group = Mesh(tp=dist.get_world_size()).group("tp") if dist.is_initialized() else LOCAL
    block = block_of(group)

    def function(x):
        return block(block(x)).exp()

    sent = {}
    for kept in (None, (), ("messages",)):
        x = ramp(4, 8).requires_grad_()
        y = function(x) if kept is None else recompute(function, x, keep=kept)
        with Operations() as seen:
            y.sum().backward()
        sent[kept] = seen.count("_c10d_functional::all_reduce")
    twice = 0 if group.size == 1 else 2
    assert sent == {None: twice, (): 2 * twice, ("messages",): twice}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_kept_alive_after_backward(name):
    """Neither with a graph that was walked, nor with one that was dropped."""
    block, made = block_of(), []
    inner, act = watching(block.inner, made), watching(block.act, made)
    block.inner, block.act = inner, act  # type: ignore
    gc.collect()
    gc.disable()
    try:
        for walked in (True, False):
            x = (ramp(4, 8).requires_grad_()).clone()
            made.append(weakref.ref(x.untyped_storage()))
            y = CALLS[name](block, x)
            if walked:
                y.sum().backward()
            del x, y
            assert len(made) > 1 and not any(are_alive(made))
    finally:
        gc.enable()


def test_memory_is_flat_over_50_steps():
    block, alive = block_of(), []
    for step in range(50):
        for call in CALLS.values():
            call(block, ramp(4, 8).requires_grad_()).sum().backward()
        block.zero_grad()
        if step in (2, 49):
            alive.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    assert alive[0] == alive[1]
