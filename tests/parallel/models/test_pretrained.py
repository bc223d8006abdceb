"""A transformers model that is cut keeps its loss and writes whole tensors."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Group, chunk_slice, marks, whole_tensor
from megablocks_core.parallel import tensor_parallelize
from megablocks_core.testing import ranks
from tests.parallel.tiny_models import tiny_model

_TOKENS = torch.arange(16).view(2, 8) * 7 % 101


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _named(plan):
    words = {
        "colwise": "column",
        "rowwise": "row",
        "colwise_gather_output": "column_gather",
        "embedding_rowwise": "vocab",
    }
    return {name: words[style] for name, style in plan.items()}


@ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_stays_cut_has_the_models_own_loss(tied):
    """Planned as "column" the logits are cut, and ``labels=`` is the vocabulary-parallel loss."""
    group = _world()
    labels = _TOKENS.roll(3).masked_fill(_TOKENS % 5 == 0, -100)
    torch.manual_seed(0)
    whole, cut = (tiny_model("llama", tied=tied) for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    plan = {**_named(cut._tp_plan), "lm_head": "column"}
    tensor_parallelize(cut, plan, group=group)
    expected = whole(input_ids=_TOKENS, labels=labels)
    output = cut(input_ids=_TOKENS, labels=labels)
    expected.loss.backward()
    output.loss.backward()

    rows = chunk_slice(101, group.size, group.rank)
    assert_close(output.logits, expected.logits[..., rows], atol=1e-10, rtol=0)
    # transformers takes its loss in float32.
    assert_close(output.loss, expected.loss.double(), atol=2e-6, rtol=0)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter, specs in marks(cut):
        ours, theirs = whole_tensor(parameter.grad, specs), gradients[name]
        assert (ours - theirs).norm() < 2e-6 * theirs.norm() + 1e-12, name
    assert (cut.lm_head.weight is cut.model.embed_tokens.weight) == tied

    counted = cut(input_ids=_TOKENS, labels=labels, num_items_in_batch=10).loss
    theirs = whole(input_ids=_TOKENS, labels=labels, num_items_in_batch=10).loss
    assert_close(counted, theirs.double(), atol=2e-6, rtol=0)


@ranks(2)
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_save_pretrained_writes_whole_tensors(kind, tmp_path):
    group = _world()
    folder = group.broadcast_object(str(tmp_path / "saved"))
    torch.manual_seed(0)
    whole, cut = (tiny_model(kind, exact=False) for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    tensor_parallelize(cut, group=group)
    cut.save_pretrained(folder)

    loaded = type(whole).from_pretrained(folder, dtype=torch.float64)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@ranks(2)
@pytest.mark.parametrize("num_items_in_batch", [None, 10])
def test_labels_that_the_caller_has_shifted_are_taken_as_they_are(num_items_in_batch):
    """``shift_labels=``, from whoever cuts sequences: ``labels`` only ask for a loss then."""
    group = _world()
    labels = _TOKENS.roll(3)
    shifted = _TOKENS.roll(5).masked_fill(_TOKENS % 5 == 0, -100)
    torch.manual_seed(0)
    whole, cut = (tiny_model("llama") for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    tensor_parallelize(cut, {**_named(cut._tp_plan), "lm_head": "column"}, group=group)
    more = {"labels": labels, "num_items_in_batch": num_items_in_batch}
    expected = whole(input_ids=_TOKENS, shift_labels=shifted, **more).loss
    unshifted = whole(input_ids=_TOKENS, **more).loss
    loss = cut(input_ids=_TOKENS, shift_labels=shifted, **more).loss
    expected.backward()
    loss.backward()

    assert_close(loss, expected.double(), atol=2e-6, rtol=0)
    assert (expected - unshifted).abs() > 1e-3
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter, specs in marks(cut):
        ours, theirs = whole_tensor(parameter.grad, specs), gradients[name]
        assert (ours - theirs).norm() < 2e-6 * theirs.norm() + 1e-12, name
