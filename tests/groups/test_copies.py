"""Copies between host and device; on CPU they are done at once."""

import weakref

import pytest
import torch

from megablocks_core.groups.copies import Copies


def test_a_copy_on_cpu_is_done_when_it_was_started():
    source, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    copy = Copies().start(source, target)
    assert torch.equal(source, target)
    copy.wait()
    copy.wait()


def test_both_tensors_are_held_until_it_was_waited_for():
    tensors = [torch.ones(3), torch.zeros(3)]
    alive = [weakref.ref(x.untyped_storage()) for x in tensors]
    copy = Copies().start(*tensors)
    tensors.clear()
    assert all(storage() is not None for storage in alive)
    copy.wait()
    assert all(storage() is None for storage in alive)


@pytest.mark.gpu
def test_copies_run_beside_the_main_stream_and_are_waited_for():
    source = torch.arange(1 << 20, device="cuda")
    host = torch.empty(1 << 20, dtype=torch.int64, pin_memory=True)
    back = torch.empty_like(source)
    copies = Copies()
    copies.start(source, host).wait()
    copies.start(host, back).wait()
    assert torch.equal(back, source)
