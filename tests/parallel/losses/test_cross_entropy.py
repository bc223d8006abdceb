"""The vocabulary-parallel loss is torch's, at every cut of the vocabulary."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel import linear_cross_entropy
from megablocks_core.parallel.losses.cross_entropy import vocab_parallel_cross_entropy
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _own(whole, group, dim=-1):
    """This rank's columns, as a leaf."""
    columns = chunk_slice(whole.shape[dim], group.size, group.rank)
    return whole.detach()[..., columns].clone().requires_grad_()


def _inputs(vocab_size, *shape, dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, vocab_size, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(vocab_size, shape, generator=generator)
    return logits.to(dtype).requires_grad_(), targets


def _plain(logits, targets, *, z_loss=0.0, reduction="mean", **options):
    """Torch's own loss on whole logits, with the term of ``z_loss``."""
    flat, flat_targets = logits.view(-1, logits.shape[-1]), targets.flatten()
    losses = F.cross_entropy(flat, flat_targets, reduction="none", **options)
    valid = flat_targets != options.get("ignore_index", -100)
    losses = losses + torch.where(valid, z_loss * flat.logsumexp(-1) ** 2, 0.0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()


# 13 columns over 4 ranks are 4, 4, 4, 1; 5 are 2, 2, 1, 0; 2 are 1, 1, 0, 0.
@ranks(1, 2, 4)
@pytest.mark.parametrize("vocab_size", [16, 13, 5, 2])
@pytest.mark.parametrize("known", [False, True])
def test_all_options_equal_torch(vocab_size, known):
    group = _world()
    whole, targets = _inputs(vocab_size, 3, 5)
    for options in (
        {"reduction": "mean"},
        {"reduction": "none", "label_smoothing": 0.1},
        {"reduction": "sum", "z_loss": 0.01, "ignore_index": 0},
        {"reduction": "mean", "label_smoothing": 1.0},
        {"reduction": "mean", "label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 1},
        {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 0},
    ):
        own = _own(whole, group)
        loss = vocab_parallel_cross_entropy(
            own, targets, vocab_size=vocab_size if known else None, group=group, **options
        )
        expected = _plain(whole, targets, **options)
        weights = torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64)
        (loss.flatten() @ weights).backward()
        (gradient,) = torch.autograd.grad(expected.flatten() @ weights, whole)
        assert_close(loss, expected, rtol=0, atol=1e-12)
        assert_close(own.grad, _own(gradient, group).detach(), rtol=0, atol=1e-12)


@ranks(2)
def test_f_008_gathered_logits_are_refused():
    group = _world()
    gathered, target = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([3])
    for vocab_size in (None, 4):
        with pytest.raises(ValueError, match="gathered already"):
            vocab_parallel_cross_entropy(gathered, target, vocab_size=vocab_size, group=group)
    many, targets = _inputs(50, 64)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(ValueError, match="gathered already"):
            vocab_parallel_cross_entropy(many.to(dtype), targets, group=group)
    group.barrier()


@ranks(1, 2)
def test_f_008_equal_shards_are_served_where_they_are_constant_or_their_size_is_known():
    group = _world()
    zeros, targets = torch.zeros(3, 8 // group.size), torch.tensor([0, 5, 7])
    loss = vocab_parallel_cross_entropy(zeros, targets, group=group)
    assert_close(loss, torch.tensor(math.log(8.0)))
    repeated = torch.tensor([[0.0, 1.0]])
    loss = vocab_parallel_cross_entropy(
        repeated, torch.tensor([1]), vocab_size=2 * group.size, group=group
    )
    assert_close(loss, torch.log(repeated.exp().sum() * group.size) - 1.0)


@ranks(1, 2, 4)
def test_f_009_label_smoothing_is_over_the_whole_vocabulary():
    # Torch's rule; the other one, alpha * V / (V - 1), would give 0.6401897.
    group = _world()
    own = _own(torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64), group)
    loss = vocab_parallel_cross_entropy(own, torch.tensor([3]), label_smoothing=0.1, group=group)
    loss.backward()
    gradient = torch.tensor([[0.0070586, 0.0621443, 0.2118828, -0.2810857]], dtype=torch.float64)
    assert_close(loss.item(), 0.5901897, rtol=0, atol=1e-7)
    assert_close(own.grad, _own(gradient, group).detach(), rtol=0, atol=1e-7)


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("label", "smoothing", "right"), [(0, 0.1, 100.0), (1, 0.0, 2000.0)])
def test_f_010_smoothing_is_finite_where_the_softmax_underflows(dtype, label, smoothing, right):
    group = _world()
    own = _own(torch.tensor([[1000.0, -1000.0, 0.0, 0.0]], dtype=dtype), group)
    loss = vocab_parallel_cross_entropy(
        own, torch.tensor([label]), label_smoothing=smoothing, group=group
    )
    loss.backward()
    assert_close(loss.item(), right, rtol=1e-7, atol=0)
    assert own.grad.isfinite().all()


@ranks(2)
def test_f_011_the_rank_without_the_target_has_the_right_gradient():
    group = _world()
    own = _own(torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64), group)
    vocab_parallel_cross_entropy(own, torch.tensor([3]), group=group).backward()
    right = [[0.0320586, 0.0871443], [0.2368828, -0.3560857]][group.rank]
    assert_close(own.grad, torch.tensor([right], dtype=torch.float64), rtol=0, atol=1e-7)


@ranks(1, 2, 4)
@pytest.mark.parametrize("padding", [0.0, 5.0, math.inf, math.nan])
def test_f_014_padded_columns_never_enter(padding):
    group = _world()
    own = _own(torch.tensor([[0.0, 1.0, 2.0, padding]], dtype=torch.float64), group)
    for label_smoothing in (0.0, 0.1):
        real = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64, requires_grad=True)
        expected = F.cross_entropy(real, torch.tensor([2]), label_smoothing=label_smoothing)
        expected.backward()
        own.grad = None
        loss = vocab_parallel_cross_entropy(
            own,
            torch.tensor([2]),
            vocab_size=3,
            label_smoothing=label_smoothing,
            z_loss=0.0,
            group=group,
        )
        loss.backward()
        assert_close(loss, expected, rtol=0, atol=1e-12)
        if not label_smoothing:
            assert_close(loss.item(), 0.4076060, rtol=0, atol=1e-7)
        gradient = F.pad(real.grad, (0, 1))
        assert_close(own.grad, _own(gradient, group).detach(), rtol=0, atol=1e-12)


@ranks(4)
def test_many_padded_columns_may_leave_ranks_without_real_ones():
    group = _world()
    whole, targets = _inputs(5, 7)
    own = F.pad(whole.detach(), (0, 11), value=math.nan)[..., 4 * group.rank :][..., :4]
    own = own.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, targets, vocab_size=5, group=group)
    loss.backward()
    expected = F.cross_entropy(whole, targets)
    assert_close(loss, expected, rtol=0, atol=1e-12)
    gradient = F.pad(torch.autograd.grad(expected, whole)[0], (0, 11))
    assert_close(own.grad, gradient[..., 4 * group.rank :][..., :4], rtol=0, atol=1e-12)


@ranks(1, 2, 4)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ignored_tokens_are_zero_even_with_infinite_logits(reduction):
    group = _world()
    whole, targets = _inputs(8, 4)
    for ignored in ([1], [0, 1, 2, 3]):
        logits = whole.detach().clone()
        logits[ignored[0]] = math.inf
        logits[ignored[-1], ::2] = -math.inf
        masked = targets.clone()
        masked[ignored] = -100
        own = _own(logits, group)
        loss = vocab_parallel_cross_entropy(
            own, masked, label_smoothing=0.1, z_loss=0.1, reduction=reduction, group=group
        )
        loss.sum().backward()
        assert loss.isfinite().all()
        assert own.grad[ignored].eq(0).all()
        assert own.grad.isfinite().all()
        if len(ignored) == 4:
            assert loss.eq(0).all()
    nothing = vocab_parallel_cross_entropy(own[:0], targets[:0], reduction=reduction, group=group)
    assert nothing.sum() == 0


@ranks(1, 2, 4)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("wrong", [-1, 13, 10**9])
def test_a_target_outside_the_vocabulary_raises_on_every_rank(wrong, known):
    group = _world()
    whole, targets = _inputs(13, 6)
    targets[4] = wrong
    with pytest.raises(
        ValueError, match="targets must lie in the vocabulary or equal ignore_index"
    ):
        vocab_parallel_cross_entropy(
            _own(whole, group), targets, vocab_size=13 if known else None, group=group
        )
    group.barrier()


@ranks(2)
def test_a_target_outside_on_one_rank_alone_raises_on_all():
    group = _world()
    whole, targets = _inputs(12, 6)
    if group.rank == 1:
        targets[0] = 12
    with pytest.raises(ValueError, match="targets must lie in the vocabulary"):
        vocab_parallel_cross_entropy(_own(whole, group), targets, group=group)
    group.barrier()


@ranks(2)
def test_columns_that_are_not_this_ranks_share_are_refused():
    group = _world()
    logits, targets = torch.randn(3, 6), torch.zeros(3, dtype=torch.int64)
    for vocab_size in (6, 14, 4):
        with pytest.raises(ValueError, match="logits have 6 columns and must have this rank's"):
            vocab_parallel_cross_entropy(logits, targets, vocab_size=vocab_size, group=group)
    # Six are the share of rank 1 and not that of rank 0: both hear of it.
    with pytest.raises(ValueError, match="logits (have 6 columns|must be cut alike)"):
        vocab_parallel_cross_entropy(logits, targets, vocab_size=13, group=group)
    uneven = logits[:, : 6 - group.rank]
    with pytest.raises(ValueError, match="logits must be cut alike"):
        vocab_parallel_cross_entropy(uneven, targets, vocab_size=9, group=group)
    group.barrier()


@ranks(1, 2, 4)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_bf16_logits_are_within_2_ulp_of_one_process(label_smoothing):
    group = _world()
    whole, targets = _inputs(1000, 32, dtype=torch.bfloat16)
    options = {"label_smoothing": label_smoothing, "z_loss": 1e-3, "reduction": "none"}
    own, one = _own(whole, group), whole.detach().clone().requires_grad_()
    exact = whole.detach().double().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, targets, group=group, **options)
    alone = vocab_parallel_cross_entropy(one, targets, **options)
    right = _plain(exact, targets, **options)
    for result in (loss, alone, right):
        result.sum().backward()
    assert loss.dtype == torch.float32
    assert own.grad.dtype == torch.bfloat16
    for expected, gradient in ((alone, one.grad), (right, exact.grad)):
        assert _ulps(loss, expected).max() <= 2
        assert _ulps(own.grad, _own(gradient, group)).max() <= 2


def _ulps(ours, theirs):
    """Distance in units of the last place of bfloat16."""
    ours, theirs = (x.detach().to(torch.bfloat16).view(torch.int16).int() for x in (ours, theirs))
    ours, theirs = (torch.where(x < 0, -32768 - x, x) for x in (ours, theirs))
    return (ours - theirs).abs()


@ranks(1, 2)
def test_logits_are_left_as_they_were():
    group = _world()
    whole, targets = _inputs(10, 4, dtype=torch.float32)
    own = _own(whole, group)
    version, before = own._version, own.detach().clone()
    vocab_parallel_cross_entropy(own, targets, label_smoothing=0.1, group=group).backward()
    assert own._version == version
    assert torch.equal(own, before)


@ranks(1, 2)
@pytest.mark.parametrize("known", [False, True])
def test_it_sends_a_maximum_and_a_sum_forward_and_nothing_backward(known):
    group = _world()
    whole, targets = _inputs(10, 4)
    own = _own(whole, group)
    messages = 2 if group.size > 1 else 0
    with CommDebugMode() as traffic:
        loss = vocab_parallel_cross_entropy(
            own, targets, vocab_size=10 if known else None, label_smoothing=0.1, group=group
        )
        assert traffic.get_total_counts() == messages
        loss.backward()
    assert traffic.get_total_counts() == messages


@ranks(1, 2)
def test_it_saves_the_logits_themselves_and_four_numbers_a_token():
    group = _world()
    whole, targets = _inputs(10, 4, dtype=torch.bfloat16)
    own = _own(whole, group)
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        losses = vocab_parallel_cross_entropy(own, targets, reduction="none", group=group)
    assert losses.requires_grad
    assert own.data_ptr() in saved
    assert sum(saved.values()) == own.numel() * 2 + 4 * (4 + 4 + 8 + 1) + 4


@given(
    widths=st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any),
    data=st.data(),
)
def test_one_process_takes_any_shape(widths, data):
    logits, targets = _inputs(sum(widths), *data.draw(st.sampled_from([(), (3,), (2, 0, 3)])))
    loss = vocab_parallel_cross_entropy(logits, targets, reduction="none")
    assert loss.shape == targets.shape
    if loss.numel():
        assert_close(loss, _plain(logits, targets, reduction="none"))


def test_shapes_and_options_that_do_not_fit_are_refused():
    logits, targets = _inputs(5, 3)
    with pytest.raises(ValueError, match="logits of shape .3, 5. must have the shape of targets"):
        vocab_parallel_cross_entropy(logits, targets[:2])
    with pytest.raises(ValueError, match="label_smoothing=1.5 must lie"):
        vocab_parallel_cross_entropy(logits, targets, label_smoothing=1.5)
    with pytest.raises(ValueError, match="reduction='max' must be"):
        vocab_parallel_cross_entropy(logits, targets, reduction="max")
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, targets) * weight
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@ranks(1, 2)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_targets_that_are_not_integers_are_refused(dtype, known):
    """Cut to whole numbers in silence, 1.9 would be taken for class 1."""
    group = _world()
    whole, targets = _inputs(16, 3)
    vocab_size = 16 if known else None
    with pytest.raises(ValueError, match=f"targets of {dtype} must be integers"):
        vocab_parallel_cross_entropy(
            _own(whole, group), targets.to(dtype), vocab_size=vocab_size, group=group
        )


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_may_be_integers_of_any_width(dtype):
    """The index 156 of one byte is a target, although as a byte it equals -100."""
    group = _world()
    whole, _ = _inputs(160, 3)
    targets = torch.tensor([0, 156, 100], dtype=torch.uint8).to(dtype)
    loss = vocab_parallel_cross_entropy(_own(whole, group), targets, group=group)
    assert_close(loss, _plain(whole, targets.long()), atol=1e-10, rtol=0)


@pytest.mark.parametrize("targets", [[1, 2, 3], None, torch.rand(3, 5), torch.arange(3).numpy()])
def test_targets_that_are_no_tensor_of_classes_are_refused(targets):
    with pytest.raises(ValueError, match="targets of (type .* a tensor|torch.float32 must be int)"):
        vocab_parallel_cross_entropy(torch.rand(3, 5), targets)
    with pytest.raises(ValueError, match="targets of (type .* a tensor|torch.float32 must be int)"):
        linear_cross_entropy(torch.rand(3, 4), torch.rand(5, 4), targets)


@ranks(2)
def test_a_rank_whose_targets_are_no_tensor_is_heard_by_the_others():
    group = _world()
    whole, targets = _inputs(16, 3)
    mine = targets.tolist() if group.rank == 1 else targets
    with pytest.raises(ValueError, match="must be a tensor" if group.rank == 1 else "refused"):
        vocab_parallel_cross_entropy(_own(whole, group), mine, group=group)


@ranks(2)
def test_cut_logits_without_their_group_are_noticed_by_sizes_or_targets():
    """With neither ``vocab_size`` nor a target beyond this rank's columns nothing can tell."""
    group = _world()
    whole, _ = _inputs(16, 3)
    own = _own(whole, group)
    with pytest.raises(ValueError, match="logits have 8 columns and must have this rank's share"):
        vocab_parallel_cross_entropy(own, torch.tensor([0, 1, 2]), vocab_size=16)
    with pytest.raises(ValueError, match=r"found \[9\] with 8 entries; .* need their group="):
        vocab_parallel_cross_entropy(own, torch.tensor([0, 9, 2]))
    with pytest.raises(ValueError, match=r"found \[17\] with 16 entries$"):
        vocab_parallel_cross_entropy(own, torch.tensor([0, 17, 2]), group=group)


def test_logits_that_are_not_floating_point_are_refused():
    with pytest.raises(ValueError, match="logits of torch.int64 must be floating-point"):
        vocab_parallel_cross_entropy(torch.ones(3, 4, dtype=torch.int64), torch.ones(3).long())


@ranks(1, 2)
@pytest.mark.parametrize("known", [False, True])
def test_it_compiles_into_one_graph_once_for_all_lengths(known):
    group = _world()
    torch._dynamo.reset()
    vocab_size = 11 if known else None
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": vocab_size, "group": group}

    def loss_of(logits, targets):
        return vocab_parallel_cross_entropy(logits, targets, **options)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for length in range(3, 23):
        whole, targets = _inputs(11, length)
        own, plain = _own(whole, group), _own(whole, group)
        loss, expected = compiled(own, targets), loss_of(plain, targets)
        loss.backward()
        expected.backward()
        assert_close(loss, expected, rtol=0, atol=1e-12)
        assert_close(own.grad, plain.grad, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3
    wrong = targets.clone()
    wrong[0] = 11
    with pytest.raises(RuntimeError, match="targets must lie in the vocabulary"):
        compiled(own, wrong)
    group.barrier()
