"""Optimizers of whole tensors are refused by name; of others it is known what they keep."""

import pytest
import torch

from megablocks_core.parallel.sharded_optimizer.elementwise import OptimizerMaker, probe

CPU = torch.device("cpu")


class _Scaled(torch.optim.Optimizer):
    """Divides by the tensor's own norm."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class _Lamb(torch.optim.SGD):
    """Named as one that works on whole tensors."""


class _Honest(torch.optim.SGD):
    """Says what it is."""

    elementwise = False


class _Counting(torch.optim.SGD):
    """Keeps a number of its own in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class _Rows(torch.optim.SGD):
    """Keeps two values for each parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["pair"] = torch.zeros(2)
        return super().step(closure)


def _kept(optimizer_class, **hyperparameters):
    return probe(optimizer_class, hyperparameters, options={}, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    "optimizer_class",
    [torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS, _Lamb, _Honest, _Scaled],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_optimizers_of_whole_tensors_are_refused(optimizer_class, dtype):
    with pytest.raises(ValueError, match=f"optimizer_class={optimizer_class.__name__} .*element"):
        probe(optimizer_class, {}, options={"lr": 0.0}, dtype=dtype, device=CPU)


def test_what_a_run_shows_counts_even_if_the_class_says_otherwise(monkeypatch):
    for optimizer_class in (torch.optim.Adafactor, _Scaled, torch.optim.Muon):
        monkeypatch.setattr(optimizer_class, "elementwise", True, raising=False)
        with pytest.raises(ValueError, match=optimizer_class.__name__):
            _kept(optimizer_class)
    monkeypatch.setattr(_Lamb, "elementwise", True, raising=False)
    assert _kept(_Lamb).fields == []


def test_optimizers_whose_state_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="numbers of its own in its parameter groups"):
        _kept(_Counting)
    with pytest.raises(ValueError, match="'pair' of shape"):
        _kept(_Rows)
    with pytest.raises(ValueError, match="SparseAdam cannot run on ranges"):
        _kept(torch.optim.SparseAdam)


def test_hyperparameters_are_refused_as_torch_does():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        _kept(torch.optim.AdamW, lr=-1.0)
    with pytest.raises(TypeError, match="beta"):
        _kept(torch.optim.AdamW, beta=0.9)


def test_what_is_kept():
    fields = {one.name: one.elements for one in _kept(torch.optim.AdamW).fields}
    assert fields == {"step": False, "exp_avg": True, "exp_avg_sq": True}
    assert _kept(torch.optim.SGD).fields == []
    (momentum,) = _kept(torch.optim.SGD, momentum=0.9, lr=torch.tensor(0.0)).fields
    assert (momentum.name, momentum.elements, momentum.dtype) == (
        "momentum_buffer",
        True,
        torch.float32,
    )
    assert _kept(torch.optim.Adagrad).at_once
    assert not _kept(torch.optim.Adam).at_once


def test_every_group_is_tried_with_its_own_options():
    groups = [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "momentum": 0.9}]
    maker = OptimizerMaker(torch.optim.SGD, {"lr": 0.5})
    assert maker.check(groups)["lr"] == 0.5
    assert maker.kept({"momentum": 0.9}, torch.ones(1)).fields
    groups = [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "capturable": True}]
    with pytest.raises(ValueError, match=r"AdamW cannot run on ranges .*capturable"):
        OptimizerMaker(torch.optim.AdamW, {}).check(groups)
