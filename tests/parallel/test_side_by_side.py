"""Meshes of different shape in one process, and ranks of which some have nothing to learn from."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh, gather_whole, load_whole, marks
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
    column_linears,
    reduce_gradients,
    vocab_parallel_cross_entropy,
)
from megablocks_core.testing import ranks

_VOCABULARY, _H = 13, 8


class _Model(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.embedding = VocabParallelEmbedding(_VOCABULARY, _H, group=group)
        self.gate = ColumnParallelLinear(_H, 16, group=group)
        self.up = ColumnParallelLinear(_H, 16, bias=False, group=group)
        self.down = RowParallelLinear(16, _H, group=group)
        self.head = ColumnParallelLinear(_H, _VOCABULARY, bias=False, uneven=True, group=group)
        self.group = group

    def forward(self, ids):
        x = self.embedding(ids)
        gate, up = column_linears(x, self.gate, self.up)
        return self.head(x + self.down(torch.tanh(gate) * up))

    def loss(self, ids, targets, count):
        logits = self(ids)
        total = vocab_parallel_cross_entropy(
            logits, targets, vocab_size=_VOCABULARY, reduction="sum", group=self.group
        )
        return total / count


def _built(group):
    torch.manual_seed(0)
    return _Model(group).double()


def _batch(step):
    """Four sequences of ids, and their targets."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(_VOCABULARY, (2, 4, 6), generator=generator)


class _Trainer:
    """A model over one mesh, its optimizer, and a step on this rank's share of a batch."""

    def __init__(self, tp, dp):
        self.dp, self.model = dp, _built(tp)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def start(self, ids, targets):
        """Forward; backward and the step are left to ``finish``."""
        own = [x.chunk(self.dp.size)[self.dp.rank] for x in (ids, targets)]
        count = (targets != -100).sum().clamp(min=1)
        self.loss = self.model.loss(*own, count)

    def finish(self):
        self.optimizer.zero_grad()
        self.loss.backward()
        reduce_gradients(self.model, group=self.dp, reduction="sum")
        norm = clip_grad_norm_(self.model, 0.5)
        self.optimizer.step()
        return self.dp.all_reduce(self.loss.detach()), norm


@ranks(4)
def test_meshes_of_two_shapes_train_side_by_side():
    """Their forwards, backwards and steps take turns; each stays on the curve of one process."""
    wide, deep = Mesh(tp=2, dp=2), Mesh(tp=4, order="dp-tp-cp-pp")
    twisted = Mesh(tp=2, dp=2, order="dp-tp-cp-pp")
    trainers = [_Trainer(mesh.group("tp"), mesh.group("dp")) for mesh in (wide, deep, twisted)]
    alone = _Trainer(LOCAL, LOCAL)
    for step in range(3):
        ids, targets = _batch(step)
        for trainer in (*trainers, alone):
            trainer.start(ids, targets)
        expected = alone.finish()
        for trainer in reversed(trainers):
            assert_close(trainer.finish(), expected, atol=1e-10, rtol=0)
    for trainer in trainers:
        for name, tensor in gather_whole(trainer.model).items():
            assert_close(tensor, alone.model.get_parameter(name), atol=1e-10, rtol=0, msg=name)

    wide.close()
    ids, targets = _batch(9)
    with pytest.raises(RuntimeError, match="its mesh was closed"):
        trainers[0].start(ids, targets)
    for trainer in (*trainers[1:], alone):
        trainer.start(ids, targets)  # the others do not mind


@ranks(4)
@pytest.mark.parametrize("learns", ["one rank", "nobody"])
def test_ranks_whose_targets_are_all_ignored_take_part(learns):
    """Sums with counts: a rank of dp without a target adds zeros, never NaN, and nobody hangs."""
    mesh = Mesh(tp=2, dp=2)
    trainer, alone = _Trainer(mesh.group("tp"), mesh.group("dp")), _Trainer(LOCAL, LOCAL)
    ids, targets = _batch(0)
    targets[2:] = -100  # the second rank of dp
    if learns == "nobody":
        targets[:] = -100
    trainer.start(ids, targets)
    alone.start(ids, targets)
    ours, expected = trainer.finish(), alone.finish()
    assert_close(ours, expected, atol=1e-10, rtol=0)
    assert (expected[1] == 0) == (learns == "nobody")
    for name, tensor in gather_whole(trainer.model).items():
        assert tensor.isfinite().all(), name
        assert_close(tensor, alone.model.get_parameter(name), atol=1e-10, rtol=0, msg=name)


@ranks(4)
def test_parts_that_some_ranks_use_and_parts_that_none_uses():
    """None on some ranks of dp becomes the whole gradient on all; None on all stays None."""
    mesh = Mesh(tp=2, dp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    model = nn.ModuleDict(
        {name: ColumnParallelLinear(_H, 4, group=tp) for name in ("both", "second", "none")}
    ).double()
    x = torch.ones(3, _H, dtype=torch.float64) * (1 + dp.rank)
    loss = model["both"](x).square().sum()
    if dp.rank == 1:
        loss = loss + model["second"](x).square().sum()
    loss.backward()
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    reduce_gradients(model, group=dp, reduction="sum")
    norm = clip_grad_norm_(model, 1e9)
    for name, parameter, _ in marks(model):
        if name.startswith("none"):
            assert parameter.grad is None
            continue
        total = torch.zeros_like(parameter) if kept[name] is None else kept[name]
        assert parameter.grad is not None and parameter.grad.isfinite().all()
        if name.startswith("second") and dp.rank == 1:
            assert_close(parameter.grad, total)
    assert_close(norm, mesh.group("tp", "dp").all_reduce(norm, "max"), rtol=0, atol=0)
    before = {name: tensor.clone() for name, tensor in gather_whole(model).items()}
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for name, tensor in gather_whole(model).items():
        assert torch.equal(tensor, before[name]) == name.startswith("none"), name
    load_whole(model, before)
