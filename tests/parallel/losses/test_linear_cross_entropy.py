"""The loss without logits is torch's, at every cut of the vocabulary, the tokens and the chunks."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megablocks_core.parallel.losses import chunked_head, head_products
from megablocks_core.testing import ranks
from tests.traffic import Traffic

EVERY_OPTION = {"label_smoothing": 0.1, "z_loss": 0.01, "soft_cap": 4.0, "ignore_index": 1}


def _world():
    return Group.of(dist.group.WORLD)


def _small_chunks(tokens=4, columns=3):
    """Chunks of a few tokens and blocks of a few columns, at these tests' sizes."""
    return patch.multiple(
        chunked_head, _CHUNK=64, _MOST_TOKENS=tokens, _BLOCK=1, _FEWEST_COLUMNS=columns
    )


def _own(whole, group, dim=0):
    part = chunk_slice(whole.shape[dim], group.size, group.rank)
    return whole.detach().narrow(dim, part.start, part.stop - part.start).clone().requires_grad_()


def _inputs(vocab_size, *shape, features=6, dtype=torch.float64):
    """Hidden states, weight, bias and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((*shape, features), (vocab_size, features), (vocab_size,))
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
    targets = torch.randint(vocab_size, shape, generator=generator)
    return [x.to(dtype).requires_grad_() for x in tensors], targets


def _plain(
    hidden, weight, bias, targets, *, soft_cap=None, z_loss=0.0, reduction="mean", **options
):
    """Torch's own loss of whole logits, with the terms it lacks."""
    logits = F.linear(hidden, weight, bias).view(-1, len(weight))
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    flat = targets.flatten()
    losses = F.cross_entropy(logits, flat, reduction="none", **options)
    valid = flat != options.get("ignore_index", -100)
    losses = losses + torch.where(valid, z_loss * logits.logsumexp(-1) ** 2, 0.0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()


def _weighted(loss):
    """A scalar that gives every token, or the one loss, a gradient of its own."""
    return loss.flatten() @ torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype)


# 13 rows over 4 ranks are 4, 4, 4, 1; 5 are 2, 2, 1, 0. 5 tokens are 2, 2, 1, 0.
@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("vocab_size", [16, 13, 5])
def test_all_options_equal_torch(vocab_size, sequence_parallel):
    group = _world()
    whole, targets = _inputs(vocab_size, 3, 5)
    for options in (
        {},
        {"reduction": "none", "label_smoothing": 0.1},
        {"reduction": "sum", "z_loss": 0.01, "ignore_index": 0},
        {"reduction": "none", "soft_cap": 3.0},
        {"reduction": "mean", **EVERY_OPTION},
        {"reduction": "none", **EVERY_OPTION},
    ):
        hidden, weight, bias = whole
        cut = _own(hidden, group, dim=-2) if sequence_parallel else hidden.detach().requires_grad_()
        own = [cut, _own(weight, group), _own(bias, group)]
        with _small_chunks():
            loss = linear_cross_entropy(
                *own[:2],
                targets,
                bias=own[2],
                vocab_size=vocab_size if "soft_cap" in options else None,
                sequence_parallel=sequence_parallel,
                group=group,
                **options,
            )
            _weighted(loss).backward()
        expected = _plain(*whole, targets, **options)
        dhidden, dweight, dbias = torch.autograd.grad(_weighted(expected), whole)
        if sequence_parallel:
            dhidden = _own(dhidden, group, dim=-2).detach()
        assert_close(loss, expected, rtol=0, atol=1e-12)
        assert_close(own[0].grad, dhidden, rtol=0, atol=1e-12)
        assert_close(own[1].grad, _own(dweight, group).detach(), rtol=0, atol=1e-12)
        assert_close(own[2].grad, _own(dbias, group).detach(), rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(
    shape=st.sampled_from([(), (1,), (7,), (2, 0, 3), (3, 4)]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5)),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    ignore_index=st.integers(-1, 3),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    with_bias=st.booleans(),
)
def test_any_shape_and_chunk(
    shape, sizes, smoothing, z_loss, soft_cap, ignore_index, reduction, with_bias
):
    vocab_size, tokens, columns = sizes
    (hidden, weight, bias), targets = _inputs(vocab_size, *shape)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "soft_cap": soft_cap}
    options |= {"ignore_index": ignore_index, "reduction": reduction}
    with _small_chunks(tokens, columns):
        loss = linear_cross_entropy(
            hidden, weight, targets, bias=bias if with_bias else None, **options
        )
        gradients = torch.autograd.grad(_weighted(loss), inputs)
    if not (targets != ignore_index).any():
        assert all(x.eq(0).all() for x in (loss, *gradients))
        return
    expected = _plain(hidden, weight, bias if with_bias else None, targets, **options)
    assert_close(loss, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(_weighted(expected), inputs), strict=True
    ):
        assert_close(ours, theirs, rtol=0, atol=1e-12)


# Fault cases of the loss of logits: the weight is the logits, hidden states of one feature are 1.


def _of_logits(logits, targets, group, **options):
    """The loss of given logits [V] of every token, and the gradient in this rank's."""
    weight = _own(torch.tensor(logits, dtype=torch.float64).unsqueeze(-1), group)
    hidden = torch.ones(len(targets), 1, dtype=torch.float64)
    loss = linear_cross_entropy(hidden, weight, torch.tensor(targets), group=group, **options)
    loss.backward()
    return loss.item(), weight.grad.squeeze(-1)


def _assert_own(gradient, whole, group):
    right = _own(torch.tensor(whole, dtype=torch.float64), group).detach()
    assert_close(gradient, right, rtol=0, atol=1e-7)


@ranks(2)
def test_f_008_a_whole_weight_is_refused():
    group = _world()
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    for vocab_size in (None, 4):
        with pytest.raises(ValueError, match="whole"):
            linear_cross_entropy(
                hidden, weight, torch.tensor([3]), vocab_size=vocab_size, group=group
            )
    group.barrier()


@ranks(1, 2)
def test_f_008_equal_shares_are_served_where_they_are_constant_or_their_size_is_known():
    group = _world()
    hidden, targets = torch.ones(3, 2), torch.tensor([0, 5, 7])
    loss = linear_cross_entropy(hidden, torch.zeros(8 // group.size, 2), targets, group=group)
    assert_close(loss, torch.tensor(math.log(8.0)))
    weight = torch.tensor([[0.0], [1.0]])
    loss = linear_cross_entropy(
        torch.ones(1, 1), weight, torch.tensor([1]), vocab_size=2 * group.size, group=group
    )
    assert_close(loss, torch.log(weight.exp().sum() * group.size) - 1.0)


@ranks(1, 2, 4)
def test_f_009_label_smoothing_is_over_the_whole_vocabulary():
    # Torch's rule; the other one, alpha * V / (V - 1), would give 0.6401897.
    group = _world()
    loss, gradient = _of_logits([0.0, 1.0, 2.0, 3.0], [3], group, label_smoothing=0.1)
    assert_close(loss, 0.5901897, rtol=0, atol=1e-7)
    _assert_own(gradient, [0.0070586, 0.0621443, 0.2118828, -0.2810857], group)


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("label", "smoothing", "right"), [(0, 0.1, 100.0), (1, 0.0, 2000.0)])
def test_f_010_smoothing_is_finite_where_the_softmax_underflows(dtype, label, smoothing, right):
    group = _world()
    logits = torch.tensor([[1000.0], [-1000.0], [0.0], [0.0]], dtype=dtype)
    own, hidden = _own(logits, group), torch.ones(1, 1, dtype=dtype, requires_grad=True)
    with _small_chunks(columns=1):
        loss = linear_cross_entropy(
            hidden, own, torch.tensor([label]), label_smoothing=smoothing, group=group
        )
        loss.backward()
    assert_close(loss.item(), right, rtol=1e-7, atol=0)
    assert own.grad.isfinite().all() and hidden.grad.isfinite().all()


@ranks(2)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_f_011_the_rank_without_the_target_has_the_right_gradient(reduction):
    group = _world()
    _, gradient = _of_logits([0.0, 1.0, 2.0, 3.0], [3], group, reduction=reduction)
    _assert_own(gradient, [0.0320586, 0.0871443, 0.2368828, -0.3560857], group)


@ranks(1, 2, 4)
@pytest.mark.parametrize("padding", [0.0, 5.0, math.inf, math.nan])
def test_f_014_padded_rows_never_enter(padding):
    group = _world()
    loss, gradient = _of_logits([0.0, 1.0, 2.0, padding], [2], group, vocab_size=3)
    assert_close(loss, 0.4076060, rtol=0, atol=1e-7)
    _assert_own(gradient, [0.0900306, 0.2447285, -0.3347590, 0.0], group)
    loss, _ = _of_logits([0.0, 1.0, 2.0, padding], [2], group, vocab_size=3, label_smoothing=0.1)
    real = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    right = F.cross_entropy(real, torch.tensor([2]), label_smoothing=0.1)
    assert_close(loss, right.item(), rtol=0, atol=1e-12)


@ranks(4)
def test_many_padded_rows_may_leave_ranks_without_real_ones():
    group = _world()
    (hidden, weight, _), targets = _inputs(5, 7)
    own = F.pad(weight.detach(), (0, 0, 0, 11), value=math.nan)[4 * group.rank :][:4]
    own = own.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, own, targets, vocab_size=5, group=group)
    loss.backward()
    expected = _plain(hidden, weight, None, targets)
    dhidden, dweight = torch.autograd.grad(expected, (hidden, weight))
    assert_close(loss, expected, rtol=0, atol=1e-12)
    assert_close(hidden.grad, dhidden, rtol=0, atol=1e-12)
    right = F.pad(dweight, (0, 0, 0, 11))[4 * group.rank :][:4]
    assert_close(own.grad, right, rtol=0, atol=1e-12)


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ignored_tokens_are_zero_even_with_infinite_hidden_states(reduction, sequence_parallel):
    group = _world()
    (hidden, weight, _), targets = _inputs(8, 4)
    for ignored in ([1], [2, 3], [0, 1, 2, 3]):
        whole, masked = hidden.detach().clone(), targets.clone()
        whole[ignored[0]], whole[ignored[-1], ::2] = math.inf, -math.nan
        masked[ignored] = -100
        own = _own(whole, group) if sequence_parallel else whole.requires_grad_()
        share = _own(weight, group)
        options = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": reduction, "group": group}
        loss = linear_cross_entropy(
            own, share, masked, sequence_parallel=sequence_parallel, **options
        )
        loss.sum().backward()
        assert loss.isfinite().all()
        assert share.grad.isfinite().all() and own.grad.isfinite().all()
        if not sequence_parallel:
            assert own.grad[ignored].eq(0).all()
        if len(ignored) == 4:
            assert loss.eq(0).all() and share.grad.eq(0).all() and own.grad.eq(0).all()
    nothing = linear_cross_entropy(hidden[:0], _own(weight, group), targets[:0], **options)
    assert nothing.sum() == 0


@ranks(1, 2, 4)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("wrong", [-1, 13, 10**9])
def test_a_target_outside_the_vocabulary_raises_on_every_rank(wrong, known):
    group = _world()
    (hidden, weight, _), targets = _inputs(13, 6)
    if group.rank == group.size - 1:
        targets[4] = wrong
    with pytest.raises(ValueError, match=f"targets must lie in the vocabulary.*found {wrong}"):
        linear_cross_entropy(
            hidden, _own(weight, group), targets, vocab_size=13 if known else None, group=group
        )
    group.barrier()


@ranks(2)
def test_what_does_not_fit_between_ranks_raises_on_all():
    group = _world()
    (hidden, weight, _), targets = _inputs(12, 6)
    share = _own(weight, group)
    with pytest.raises(ValueError, match="targets must be equal on all ranks"):
        linear_cross_entropy(hidden, share, (targets + group.rank) % 12, group=group)
    for vocab_size in (6, 14, 4):
        with pytest.raises(ValueError, match=r"weight has \[6, 6\] rows .* shares of vocab_size"):
            linear_cross_entropy(hidden, share, targets, vocab_size=vocab_size, group=group)
    with pytest.raises(ValueError, match=r"weight has \[6, 5\] rows"):
        linear_cross_entropy(
            hidden, share[: 6 - group.rank], targets % 9, vocab_size=9, group=group
        )
    group.barrier()


@ranks(1, 2)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_bf16_is_float32_inside(reduction):
    group = _world()
    (hidden, weight, _), targets = _inputs(300, 64, dtype=torch.bfloat16)
    share, exact = _own(weight, group), [x.detach().double() for x in (hidden, weight)]
    widen = patch.object(head_products, "_cpu_multiplies_bfloat16", return_value=False)
    with _small_chunks(tokens=3, columns=50), widen:
        loss = linear_cross_entropy(hidden, share, targets, reduction=reduction, group=group)
        loss.sum().backward()
    right = _plain(*(x.requires_grad_() for x in exact), None, targets, reduction=reduction)
    right.sum().backward()
    assert loss.dtype == torch.float32
    assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
    # Each gradient is rounded to 16 bits once.
    for ours, theirs in ((hidden.grad, exact[0].grad), (share.grad, _own(exact[1].grad, group))):
        assert ours.dtype == torch.bfloat16
        assert_close(ours.double(), theirs.detach(), rtol=2**-8, atol=1e-6)


@ranks(1, 2)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_where_bf16_is_multiplied_only_products_are_rounded(reduction):
    group = _world()
    (hidden, weight, _), targets = _inputs(300, 64, dtype=torch.bfloat16)
    share = _own(weight, group)
    narrow = patch.object(head_products, "_cpu_multiplies_bfloat16", return_value=True)
    with _small_chunks(tokens=3, columns=50), narrow:
        loss = linear_cross_entropy(hidden, share, targets, reduction=reduction, group=group)
        loss.sum().backward()
    exact = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    logits = F.linear(*exact).double()  # rounded once, as the head's own layer does
    right = F.cross_entropy(logits, targets, reduction=reduction)
    right.sum().backward()
    assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
    for ours, theirs in ((hidden.grad, exact[0].grad), (share.grad, _own(exact[1].grad, group))):
        distance = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert distance < 2**-7


def test_a_head_of_another_dtype_and_layout():
    (hidden, weight, bias), targets = _inputs(11, 2, 3)
    inputs = [hidden.detach().float().requires_grad_(), weight, bias]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(
            inputs[0].transpose(0, 1), weight.t().contiguous().t(), targets.t(), bias=bias
        )
    loss.backward()
    assert_close(loss, _plain(hidden, weight, bias, targets), rtol=0, atol=1e-6)
    assert inputs[0].grad.dtype == torch.float32


@ranks(1, 2)
def test_minus_the_losses_are_log_probabilities_of_the_targets():
    group = _world()
    (hidden, weight, _), targets = _inputs(9, 2, 4)
    advantages = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    share = _own(weight, group)
    log_probs = -linear_cross_entropy(hidden, share, targets, reduction="none", group=group)
    (log_probs.exp() * advantages).sum().backward()
    every = F.linear(hidden, weight).log_softmax(-1)
    right = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    gradients = torch.autograd.grad((right.exp() * advantages).sum(), (hidden, weight))
    assert_close(log_probs, right, rtol=0, atol=1e-12)
    assert_close(hidden.grad, gradients[0], rtol=0, atol=1e-12)
    assert_close(share.grad, _own(gradients[1], group).detach(), rtol=0, atol=1e-12)


@ranks(1, 2)
def test_a_head_tied_to_an_uneven_embedding():
    group = _world()
    gradients = []
    for where in (group, Group()):
        torch.manual_seed(0)
        embedding = VocabParallelEmbedding(7, 4, group=where, dtype=torch.float64)
        head = ColumnParallelLinear(4, 7, uneven=True, group=where, dtype=torch.float64)
        head.weight = embedding.weight
        ids = torch.tensor([0, 6, 3, 3, 5])
        hidden = embedding(ids).tanh()
        loss = linear_cross_entropy(
            hidden[:-1], head.weight, ids[1:], bias=head.bias, vocab_size=7, group=where
        )
        (loss + vocab_parallel_cross_entropy(head(hidden[:-1]), ids[1:], group=where)).backward()
        gradients.append((embedding.weight.grad, head.bias.grad))
    for ours, whole in zip(*gradients, strict=True):
        assert_close(ours, _own(whole, group).detach(), rtol=0, atol=1e-12)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_messages(reduction, sequence_parallel):
    group = _world()
    (hidden, weight, _), targets = _inputs(10, 8)
    own = _own(hidden, group) if sequence_parallel else hidden
    with _small_chunks(tokens=4), Traffic() as traffic:
        loss = linear_cross_entropy(
            own,
            _own(weight, group),
            targets,
            reduction=reduction,
            sequence_parallel=sequence_parallel,
            group=group,
        )
        forward = traffic.counts()
        loss.sum().backward()
        both = traffic.counts()
    # Two chunks: numbers of each, its hidden states and their gradient; and once the sizes.
    gathers = 1 + (4 if sequence_parallel else 2)
    gradient = "reduce_scatter" if sequence_parallel else "all_reduce"
    once = {"all_gather": gathers}
    assert forward == (once | {gradient: 2} if reduction == "mean" else once)
    again = 1 if reduction == "mean" else 2
    assert both == {"all_gather": gathers * again, gradient: 2}


@ranks(1, 2)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_compiles_into_one_graph_once_for_all_lengths(reduction):
    group = _world()
    torch._dynamo.reset()

    def loss_of(hidden, weight, bias, targets):
        return linear_cross_entropy(
            hidden, weight, targets, bias=bias, reduction=reduction, group=group, **EVERY_OPTION
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for length in range(3, 12):
        whole, targets = _inputs(11, length)
        twins = []
        for function in (compiled, loss_of):
            leaves = [
                whole[0].detach().clone().requires_grad_(),
                *(_own(x, group) for x in whole[1:]),
            ]
            with _small_chunks():
                loss = function(*leaves, targets)
                _weighted(loss).backward()
            twins.append([loss, *(leaf.grad for leaf in leaves)])
        for ours, theirs in zip(*twins, strict=True):
            assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3
    with pytest.raises(ValueError, match="targets must lie in the vocabulary"):
        compiled(*leaves, targets + 11)
    group.barrier()


def test_shapes_and_options_that_do_not_fit_are_refused():
    (hidden, weight, bias), targets = _inputs(5, 3)
    for match, arguments, options in (
        ("hidden of shape .6,. must be .T H.", (hidden[0], weight[0], targets[0]), {}),
        ("hidden has 5 features, which must be the 6", (hidden[:, 1:], weight, targets), {}),
        ("targets of shape .2,. must be those of the tokens", (hidden, weight, targets[:2]), {}),
        ("targets of torch.float32 must be integers", (hidden, weight, targets.float()), {}),
        ("must be floating-point", (hidden.long(), weight, targets), {}),
        ("bias of shape .4,. must have an entry", (hidden, weight, targets), {"bias": bias[1:]}),
        ("label_smoothing=1.5 must lie", (hidden, weight, targets), {"label_smoothing": 1.5}),
        ("soft_cap=0.0 must be positive", (hidden, weight, targets), {"soft_cap": 0.0}),
        ("reduction='max' must be", (hidden, weight, targets), {"reduction": "max"}),
    ):
        with pytest.raises(ValueError, match=match):
            linear_cross_entropy(*arguments, **options)


@ranks(2)
def test_under_sequence_parallelism_targets_are_those_of_all_tokens():
    group = _world()
    (hidden, weight, _), targets = _inputs(4, 6)
    with pytest.raises(ValueError, match="must be those of all ranks' tokens"):
        linear_cross_entropy(
            _own(hidden, group),
            _own(weight, group),
            targets[:3],
            sequence_parallel=True,
            group=group,
        )
    group.barrier()
