"""Validation loss is the same number at any split and batch size, and touches nothing."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import evaluate, next_token_loss

V, LENGTH, SAMPLES = 11, 6, 12


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, 8), nn.Dropout(0.5), nn.Linear(8, V)).double()


def batches(size, *, rank=0, num_ranks=1, seed=1):
    """Samples in batches of ``size``; of each, this rank's; masks of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens_NT = torch.randint(0, V, (SAMPLES, LENGTH + 1), generator=generator)
    mask_NT = (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.6).float()
    for own in torch.arange(SAMPLES)[rank::num_ranks].split(size):
        yield {
            "tokens": tokens_NT[own, :-1],
            "labels": tokens_NT[own, 1:],
            "loss_mask": mask_NT[own],
        }


@ranks(1, 2, 4)
def test_the_loss_is_that_of_one_batch_in_one_process():
    group, model = Mesh().group("dp"), small_model()
    reference = evaluate(model, batches(SAMPLES))
    for size in (1, 2, 5):
        own = batches(size, rank=group.rank, num_ranks=group.size)
        mean = evaluate(model, own, group=group)
        assert mean == pytest.approx(reference, rel=1e-12)
        assert mean.count == reference.count


@ranks(2)
def test_a_rank_without_batches_takes_part():
    group, model = Mesh().group("dp"), small_model()
    own = batches(3) if group.rank == 0 else []
    assert evaluate(model, own, group=group) == evaluate(model, batches(3))


def test_it_is_the_masked_cross_entropy():
    model = small_model().eval()
    (batch,) = batches(SAMPLES)
    mask = batch["loss_mask"].bool()
    expected = cross_entropy(model(batch["tokens"])[mask], batch["labels"][mask])
    mean = evaluate(model, [batch])
    assert mean == pytest.approx(expected.item(), rel=1e-12)
    assert mean.count == mask.sum()


def test_masked_and_ignored_labels_count_for_nothing_even_at_infinite_loss():
    logits = torch.zeros(4, V)
    logits[1, 3] = -torch.inf
    labels = torch.tensor([0, 3, -100, 1])
    batch = {"tokens": labels, "labels": labels, "loss_mask": torch.tensor([1.0, 0.0, 1.0, 1.0])}
    total, count = next_token_loss(_Always(logits), batch)
    assert count == 2
    assert total.item() == pytest.approx(2 * torch.tensor(V).log().item())


def test_every_mode_and_the_random_state_are_as_before_also_after_an_error():
    model = small_model().train()
    model[1].eval()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()

    def fails(model, batch):
        assert not model.training and not torch.is_grad_enabled()
        raise RuntimeError("loss failed")

    evaluate(model, batches(4))
    with pytest.raises(RuntimeError, match="loss failed"):
        evaluate(model, batches(4), loss=fails)
    assert [m.training for m in model.modules()] == modes
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_another_loss_can_be_given():
    mean = evaluate(small_model(), batches(4), loss=lambda _, batch: (batch["tokens"].sum(), 2))
    assert mean.sum == sum(batch["tokens"].sum().item() for batch in batches(4))
    assert mean.count == 6


def test_f_128_a_set_without_a_counted_label_is_an_error():
    for loader in ([], [{**next(batches(2)), "loss_mask": torch.zeros(2, LENGTH)}]):
        with pytest.raises(ValueError, match="must hold a batch"):
            evaluate(small_model(), loader, group=LOCAL)


@ranks(1, 2, 4)
def test_f_128_several_sets_give_their_means_by_name_in_one_message():
    """With an empty set among them: the error names it, on every rank."""
    group, model = Mesh().group("dp"), small_model()
    references = {name: evaluate(model, batches(SAMPLES, seed=s)) for s, name in enumerate("ab")}
    own = {
        name: batches(3, rank=group.rank, num_ranks=group.size, seed=seed)
        for seed, name in enumerate(references)
    }
    means = evaluate(model, own, group=group)
    assert means == pytest.approx(references, rel=1e-12) and means["a"] != means["b"]
    with CommDebugMode() as traffic:
        evaluate(model, {"a": [1], "b": [2]}, loss=lambda *_: (1.0, 1), group=group)
    assert traffic.get_total_counts() == (group.size > 1)
    with pytest.raises(ValueError, match=r"nothing counted in \['c'\]"):
        evaluate(model, {"a": batches(3), "c": []}, group=group)


class Step(NamedTuple):
    micro_batches: list
    num_tokens: int


class Loader:
    """A loader of steps that says where it is."""

    def __init__(self, consumed):
        self.consumed = consumed

    def __iter__(self):
        while self.consumed < SAMPLES:
            self.consumed += 4
            yield Step(list(batches(SAMPLES))[:1], 1)


class Stateful:
    """A loader of batches with a state dict."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        for batch in batches(4):
            self.position += 1
            yield batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_a_loader_of_steps_is_left_where_it_was():
    loader, model = Loader(consumed=4), small_model()
    reference = evaluate(model, list(batches(SAMPLES)) * 2)
    for _ in range(2):
        mean = evaluate(model, loader)
        assert (loader.consumed, mean, mean.count) == (4, reference, reference.count)
    stateful = Stateful()
    evaluate(model, stateful)
    assert stateful.position == 0
    with pytest.raises(KeyError):
        evaluate(model, loader, loss=lambda model, batch: batch["nothing"])
    assert loader.consumed == 4


class _Mute(list):
    """A loader that cannot tell where it is."""

    def state_dict(self):
        raise OSError("no position")

    def load_state_dict(self, state):
        """Never called."""


@ranks(2)
def test_a_loader_that_fails_to_tell_its_position_ends_the_evaluation_of_all():
    group, model = Mesh().group("dp"), small_model()
    loader = (_Mute if group.rank == 1 else list)(batches(2))
    kind, words = (OSError, "no position") if group.rank == 1 else (RuntimeError, "failed on 1 of")
    with pytest.raises(kind, match=words):
        evaluate(model, loader, group=group)
    assert model.training


@ranks(2, 4)
def test_a_rank_that_fails_ends_the_evaluation_of_all():
    group, model = Mesh().group("dp"), small_model()
    own = list(batches(1, rank=group.rank, num_ranks=group.size))

    def fails(model, batch):
        if group.rank == 1 and batch is own[1]:
            raise KeyError("no labels")
        return next_token_loss(model, batch)

    def broken():
        yield own[0]
        if group.rank == 1:
            raise KeyError("no labels")
        yield from own[1:]

    for in_step in (False, True):
        for sets, loss in ((own, fails), (broken(), next_token_loss)):
            with pytest.raises(KeyError if group.rank == 1 else RuntimeError) as caught:
                evaluate(model, {"a": sets, "b": own}, loss=loss, in_step=in_step, group=group)
            if group.rank != 1:
                where = "on rank 1" if in_step else f"on 1 of {group.size} ranks"
                assert where in str(caught.value)
    assert evaluate(model, own, group=group) > 0  # the ranks are still in step


@ranks(2, 4)
def test_a_model_that_sends_over_the_group_takes_batches_in_step():
    """A rank without any batch, and ranks that run out early, neither hang nor count twice."""
    from torch.distributed.fsdp import fully_shard  # a second's import, for this test alone

    group, model = Mesh().group("dp"), small_model()
    reference = evaluate(model, batches(SAMPLES))
    sharded = fully_shard(small_model(), mesh=init_device_mesh("cpu", (group.size,)))
    everything = list(batches(2))
    own = {0: everything[:4], group.size - 1: everything[4:]}.get(group.rank, [])
    if group.size == 2:
        own = everything if group.rank == 1 else []
    mean = evaluate(sharded, own, in_step=True, group=group)
    assert mean == pytest.approx(reference, rel=1e-12)
    assert mean.count == reference.count


def test_a_loss_that_draws_changes_no_generator():
    model, state = small_model(), torch.get_rng_state()
    evaluate(model, batches(4), loss=lambda *_: (torch.rand(()), 1))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_decoder_is_asked_for_whole_logits_of_packed_documents():
    seen = {}

    class Decoder(nn.Module):
        def forward(self, tokens, *, positions=None, cu_seqlens=None, gather_logits=False):
            seen.update(positions=positions, cu_seqlens=cu_seqlens, gather_logits=gather_logits)
            return type("Output", (), {"logits": torch.zeros(*tokens.shape, V)})()

    plain = next(batches(1))
    evaluate(Decoder(), [{**plain, "cu_seqlens": None, "position_ids": "unused"}])
    assert seen == {"positions": None, "cu_seqlens": None, "gather_logits": True}
    packed = {"cu_seqlens": torch.tensor([0, 2, LENGTH]), "position_ids": torch.arange(LENGTH)}
    evaluate(Decoder(), [{**plain, **packed}])
    assert seen["cu_seqlens"] is packed["cu_seqlens"]
    assert seen["positions"] is packed["position_ids"]


class _Always(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, tokens):
        return self.logits


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([batches(3), batches(3)], "loader yields another, a generator: several go in by name"),
        ([[1], [2]], "a batch of type list must be a dict with tokens, labels, loss_mask; several"),
        (next(batches(3)), "loader 'tokens' of type Tensor must yield batches"),
        ([{"tokens": 1}], r"a batch of \['tokens'\] must be a dict with tokens, labels, loss_mask"),
        (None, "loader 'loss' of type NoneType must yield batches"),
        ({"a": None}, "loader 'a' of type NoneType must yield batches"),
        ({}, "loader={} must name at least one loader"),
    ],
)
def test_what_is_no_loader_or_batch_is_named(loader, message):
    model = small_model()
    with pytest.raises(ValueError, match=message):
        evaluate(model, loader)
    assert model.training


@ranks(2)
def test_a_loss_that_is_no_pair_is_named_and_no_rank_waits():
    group = Mesh().group("dp")
    found = torch.tensor(1.0) if group.rank == 0 else (1.0, 1)
    error, message = (ValueError, "must be a pair") if group.rank == 0 else (RuntimeError, "1 of 2")
    with pytest.raises(error, match=message):
        evaluate(small_model(), batches(3), loss=lambda *_: found, group=group)
