"""A region that runs again finds the choices and results of its first run."""

import pytest
import torch

from megablocks_core.parallel.memory.recompute import recompute
from megablocks_core.parallel.memory.replay import Region, remember


class _Counter:
    """A choice that is another one each time."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return torch.tensor(self.calls)


def test_outside_a_region_it_calls():
    counter = _Counter()
    assert [int(remember(counter)) for _ in range(3)] == [1, 2, 3]


def test_a_choice_has_no_gradient_inside_and_outside():
    x = torch.ones(2, requires_grad=True)
    assert not remember(lambda: x * 2).requires_grad
    y = recompute(lambda x: x * remember(lambda: x * 3), x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_second_run_gets_the_choices_of_the_first(depth):
    """Also where regions nest, and where each level chooses."""
    counter, seen = _Counter(), []

    def function(x, level=depth):
        before = remember(counter)
        y = x.exp() * before
        y = recompute(lambda x: function(x, level - 1), y) if level > 1 else y.exp()
        after = remember(lambda: (int(counter()), "text"))
        seen.append((level, int(before), after[0]))
        return (y * after[0]).sin()

    x = torch.full((3,), 0.01, requires_grad=True)
    outputs = [recompute(function, x) for _ in range(2)]
    calls, first = counter.calls, list(seen)
    assert calls == 2 * 2 * depth
    for output in reversed(outputs):
        output.sum().backward()
    assert counter.calls == calls
    assert len(seen) > len(first)
    assert set(seen) == set(first)


def test_a_draw_inside_a_choice_is_not_drawn_again_and_not_missed_after():
    """A second run goes on with the random state that the choice left behind."""
    x = torch.ones(1000, requires_grad=True)

    def function(x):
        kept = remember(lambda: torch.rand(1000) < 0.5)
        return torch.nn.functional.dropout(torch.where(kept, x, 0.0), 0.5) * x

    torch.manual_seed(0)
    y = recompute(function, x)
    torch.rand(7)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert 100 < (y == 0).sum() < 900


def test_operations_of_a_choice_are_not_taken_for_kept_results():
    weight = torch.randn(4, 4, dtype=torch.float64)

    def function(x):
        order = remember(lambda: (x @ weight).argsort(-1))
        return (x.gather(-1, order) @ weight.sin()).exp() @ weight

    results = []
    for call in (function, lambda x: recompute(function, x, keep=["matmul"])):
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
        y = call(x)
        y.sum().backward()
        results.append((y, x.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_another_path_and_changed_choices_raise():
    paths = iter([1, 2])

    def longer(x):
        for _ in range(next(paths)):
            x = (x * remember(lambda: 2)).exp()
        return x.exp()

    y = recompute(longer, torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="remembers more than the 1 choices"):
        y.sum().backward()

    def changing(x):
        choice = remember(lambda: torch.ones(2))
        y = x.exp() * choice
        choice.add_(1)
        return y

    y = recompute(changing, torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="choice was changed in place"):
        y.sum().backward()


def test_a_kept_result_that_was_changed_or_is_another_raises():
    weight = torch.ones(2, 2)

    def changing(x):
        return (x.exp() @ weight).add_(1).exp()

    y = recompute(changing, torch.ones(2, 2, requires_grad=True), keep=["matmul"])
    with pytest.raises(RuntimeError, match=r"kept result of aten.mm.default was changed"):
        y.sum().backward()

    operations = iter([torch.mm, lambda x, y: torch.addmm(x, x, y)])

    def switching(x):
        return next(operations)(x.exp(), x).exp() @ weight

    y = recompute(switching, torch.ones(2, 2, requires_grad=True), keep=["matmul"])
    with pytest.raises(RuntimeError, match="take the same path"):
        y.sum().backward()


def test_an_exception_ends_the_region():
    counter = _Counter()

    def failing(x):
        remember(counter)
        raise KeyError("of the function")

    for _ in range(2):
        with pytest.raises(KeyError, match="of the function"):
            recompute(failing, torch.ones(2, requires_grad=True))
    assert int(remember(counter)) == 3


def test_runs_of_a_region_replay_from_its_start():
    region, counter = Region(), _Counter()
    for _ in range(3):
        with region.run():
            assert [int(remember(counter)) for _ in range(2)] == [1, 2]
