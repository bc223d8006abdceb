"""The divergence of cut logits is torch's, from whole teachers and from stored ones."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel import StoredTopK, vocab_parallel_kl
from megablocks_core.testing import ranks

OPTIONS = (
    {"direction": "forward"},
    {"direction": "reverse", "temperature": 2.0, "reduction": "none"},
    {"direction": "forward", "temperature": 0.5, "reduction": "sum"},
    {"direction": "reverse", "reduction": "mean"},
)


def _world():
    return Group.of(dist.group.WORLD)


def _own(whole, group):
    columns = chunk_slice(whole.shape[-1], group.size, group.rank)
    return whole.detach()[..., columns].clone().requires_grad_()


def _inputs(vocab_size, *shape, dtype=torch.float64):
    """Logits of a student and a teacher, and a mask."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        torch.randn(*shape, vocab_size, generator=generator, dtype=torch.float64) * 3
        for _ in range(2)
    )
    mask = torch.rand(shape, generator=generator) < 0.7
    return student.to(dtype).requires_grad_(), teacher.to(dtype), mask


def _plain(x, y, mask, *, direction="forward", temperature=1.0, reduction="mean"):
    """Torch's divergence of whole logits."""
    log_p, log_q = ((z / temperature).log_softmax(-1) for z in (x, y))
    first, second = (log_p, log_q) if direction == "forward" else (log_q, log_p)
    losses = F.kl_div(first, second, reduction="none", log_target=True).sum(-1)
    return _reduced(losses.masked_fill(~mask, 0.0), mask, reduction)


def _reduced(losses, mask, reduction):
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / mask.sum()


def _weighted(loss):
    return loss.flatten() @ torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype)


@ranks(1, 2, 4)
@pytest.mark.parametrize("vocab_size", [16, 13, 5])
@pytest.mark.parametrize("known", [False, True])
def test_both_directions_equal_torch(vocab_size, known):
    group = _world()
    student, teacher, mask = _inputs(vocab_size, 3, 5)
    for options in OPTIONS:
        own = _own(student, group)
        loss = vocab_parallel_kl(
            own,
            _own(teacher, group),
            mask=mask,
            vocab_size=vocab_size if known else None,
            group=group,
            **options,
        )
        _weighted(loss).backward()
        expected = _plain(student, teacher, mask, **options)
        (gradient,) = torch.autograd.grad(_weighted(expected), student)
        assert_close(loss, expected, rtol=0, atol=1e-12)
        assert_close(own.grad, _own(gradient, group).detach(), rtol=0, atol=1e-12)


def _coarse(log_probs, indices):
    """Log-probabilities of the indexed columns, and of all others together."""
    others = torch.ones_like(log_probs).scatter(-1, indices, 0.0)
    rest = (log_probs.exp() * others).sum(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, indices), rest.log()], dim=-1)


@ranks(1, 2, 4)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_stored_teacher_whose_rest_is_one_class(direction):
    group = _world()
    student, teacher, mask = _inputs(13, 3, 5)
    log_q = (teacher / 4).log_softmax(-1)
    for count in (1, 4, 12):
        log_probs, indices = log_q.topk(count)
        own = _own(student, group)
        loss = vocab_parallel_kl(
            own,
            StoredTopK(log_probs, indices),
            mask=mask,
            direction=direction,
            reduction="none",
            group=group,
        )
        _weighted(loss).backward()
        pair = [_coarse(log_p, indices) for log_p in (student.log_softmax(-1), log_q)]
        if direction == "reverse":
            pair.reverse()
        losses = F.kl_div(*pair, reduction="none", log_target=True).sum(-1)
        expected = losses.masked_fill(~mask, 0.0)
        (gradient,) = torch.autograd.grad(_weighted(expected), student)
        # What is missing to 1 is a difference, and has the fewer digits the smaller it is.
        assert_close(loss, expected, rtol=0, atol=1e-11)
        assert_close(own.grad, _own(gradient, group).detach(), rtol=0, atol=1e-11)
        whole = _plain(student, teacher / 4, mask, direction=direction, reduction="none")
        assert (loss <= whole + 1e-11).all()


@ranks(1, 2, 4)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_stored_teacher_that_is_renormalized(temperature):
    group = _world()
    student, teacher, mask = _inputs(13, 3, 5)
    log_probs, indices = teacher.log_softmax(-1).topk(4)
    own = _own(student, group)
    loss = vocab_parallel_kl(
        own,
        StoredTopK(log_probs, indices, missing="renormalize"),
        mask=mask,
        temperature=temperature,
        group=group,
    )
    loss.backward()
    only = torch.full_like(teacher, -torch.inf).scatter(-1, indices, log_probs)
    q = (only / temperature).softmax(-1)
    log_p = (student / temperature).log_softmax(-1)
    losses = (torch.xlogy(q, q) - q * log_p).sum(-1)
    expected = _reduced(losses.masked_fill(~mask, 0.0), mask, "mean")
    (gradient,) = torch.autograd.grad(expected, student)
    assert_close(loss, expected, rtol=0, atol=1e-12)
    assert_close(own.grad, _own(gradient, group).detach(), rtol=0, atol=1e-12)


@ranks(1, 2)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_equal_models_have_no_divergence_and_no_gradient(direction):
    group = _world()
    student, _, mask = _inputs(12, 4)
    log_probs, indices = student.detach().log_softmax(-1).topk(3)
    for teacher in (_own(student, group).detach(), StoredTopK(log_probs, indices)):
        own = _own(student, group)
        loss = vocab_parallel_kl(own, teacher, direction=direction, group=group)
        loss.backward()
        assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-12)
        assert_close(own.grad, torch.zeros_like(own), rtol=0, atol=1e-12)


@ranks(1, 2)
def test_a_column_without_mass_adds_nothing():
    group = _world()
    student, teacher, mask = _inputs(8, 3)
    some, other = teacher.clone(), student.detach().clone()
    some[0, 1], other[0, 2] = -math.inf, -math.inf
    for direction, x, y in (("forward", student, some), ("reverse", other, teacher)):
        own = _own(x, group)
        loss = vocab_parallel_kl(own, _own(y, group), direction=direction, group=group)
        loss.backward()
        p, q = x.detach().softmax(-1), y.softmax(-1)
        front, back = (q, p) if direction == "forward" else (p, q)
        right = (torch.xlogy(front, front) - torch.xlogy(front, back)).sum(-1).mean()
        assert_close(loss, right, rtol=0, atol=1e-12)
        assert own.grad.isfinite().all()


@ranks(1, 2)
def test_padded_columns_never_enter():
    group = _world()
    student, teacher, mask = _inputs(5, 4)
    own, hers = (
        _own(F.pad(x.detach(), (0, 3), value=value), group)
        for x, value in ((student, math.nan), (teacher, math.inf))
    )
    loss = vocab_parallel_kl(own, hers, vocab_size=5, mask=mask, group=group)
    loss.backward()
    expected = _plain(student, teacher, mask)
    (gradient,) = torch.autograd.grad(expected, student)
    assert_close(loss, expected, rtol=0, atol=1e-12)
    assert_close(own.grad, _own(F.pad(gradient, (0, 3)), group).detach(), rtol=0, atol=1e-12)


@ranks(1, 2)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_masked_tokens_are_zero_even_with_infinite_logits(reduction):
    group = _world()
    student, teacher, _ = _inputs(8, 4)
    log_probs, indices = teacher.log_softmax(-1).topk(2)
    for masked in ([1], [0, 1, 2, 3]):
        whole, mask = student.detach().clone(), torch.ones(4, dtype=torch.bool)
        whole[masked[0]], mask[masked] = math.inf, False
        nonsense = log_probs.clone()
        nonsense[masked[0]] = math.nan
        for other in (_own(whole, group).detach(), StoredTopK(nonsense, indices)):
            own = _own(whole, group)
            loss = vocab_parallel_kl(own, other, mask=mask, reduction=reduction, group=group)
            loss.sum().backward()
            assert loss.isfinite().all() and own.grad.isfinite().all()
            assert own.grad[masked].eq(0).all()
            if len(masked) == 4:
                assert loss.eq(0).all()
        nothing = vocab_parallel_kl(own[:0], own[:0].detach(), reduction=reduction, group=group)
        assert nothing.sum() == 0


def test_bf16_is_float32_inside():
    student, teacher, mask = _inputs(1000, 16, dtype=torch.bfloat16)
    exact = student.detach().double().requires_grad_()
    loss = vocab_parallel_kl(student, teacher, mask=mask)
    right = _plain(exact, teacher.double(), mask)
    loss.backward()
    right.backward()
    assert loss.dtype == torch.float32 and student.grad.dtype == torch.bfloat16
    assert_close(loss.double(), right, rtol=1e-6, atol=1e-6)
    assert_close(student.grad.double(), exact.grad, rtol=2**-8, atol=1e-8)


def test_stored_mass_of_more_than_one_stays_finite():
    # Rounded probabilities may sum to more than 1, and a sure student leaves nothing to the rest.
    student = torch.tensor([[200.0, 0.0, -200.0, 0.0]], requires_grad=True)
    stored = StoredTopK(torch.tensor([[0.9, 0.2]]).log(), torch.tensor([[0, 1]]))
    for direction in ("forward", "reverse"):
        loss = vocab_parallel_kl(student, stored, direction=direction)
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.isfinite() and gradient.isfinite().all()


@ranks(2)
def test_it_sends_sizes_and_numbers_forward_and_nothing_backward():
    group = _world()
    student, teacher, mask = _inputs(10, 4)
    own = _own(student, group)
    with CommDebugMode() as traffic:
        loss = vocab_parallel_kl(own, _own(teacher, group), mask=mask, group=group)
        assert traffic.get_total_counts() == 2
        loss.backward()
    assert traffic.get_total_counts() == 2


@ranks(1, 2)
def test_logits_are_left_as_they_were_and_saved_as_they_are():
    group = _world()
    student, teacher, mask = _inputs(10, 4, dtype=torch.float32)
    own, hers = _own(student, group), _own(teacher, group).detach()
    before, saved = own.detach().clone(), {}

    def pack(x):
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = vocab_parallel_kl(own, hers, mask=mask, reduction="none", group=group)
    loss.sum().backward()
    assert torch.equal(own, before) and own._version == 0
    # Both logits, the mask, five numbers a token, and which columns this rank has.
    assert sum(saved.values()) == 2 * own.numel() * 4 + 4 + 4 * 5 * 4 + 4 * 8


@ranks(2)
def test_gathered_logits_and_foreign_indices_are_refused_on_all_ranks():
    group = _world()
    student, teacher, mask = _inputs(8, 4)
    with pytest.raises(ValueError, match="logits must be this rank's share"):
        vocab_parallel_kl(student, teacher, group=group)
    log_probs, indices = teacher.log_softmax(-1).topk(2)
    own = _own(student, group)
    for wrong, match in (
        (indices + 8 * group.rank, "lie in"),
        ((indices + group.rank) % 8, "be equal"),
    ):
        with pytest.raises(ValueError, match=f"indices and mask must {match}"):
            vocab_parallel_kl(own, StoredTopK(log_probs, wrong), group=group)
    group.barrier()


def test_options_that_do_not_fit_are_refused():
    student, teacher, mask = _inputs(5, 3)
    stored = StoredTopK(*teacher.log_softmax(-1).topk(2))
    for match, other, options in (
        ("teacher of shape .3, 4. must have the shape", teacher[:, 1:], {}),
        ("direction='back' must be", teacher, {"direction": "back"}),
        ("temperature=0 must be positive", teacher, {"temperature": 0}),
        ("reduction='max' must be", teacher, {"reduction": "max"}),
        ("mask .2,. of torch.bool must be booleans .3,.", teacher, {"mask": mask[:2]}),
        ("log_probs .2, 2. and indices .3, 2.", stored._replace(log_probs=stored[0][:2]), {}),
        ("missing='drop' must be", stored._replace(missing="drop"), {}),
        ("temperature=2.0 must be 1 with missing", stored, {"temperature": 2.0}),
        (
            'direction="reverse" must be "forward"',
            stored._replace(missing="renormalize"),
            {"direction": "reverse"},
        ),
    ):
        with pytest.raises(ValueError, match=match):
            vocab_parallel_kl(student, other, **options)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = vocab_parallel_kl(student, teacher) * factor
    (gradient,) = torch.autograd.grad(loss, student, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@ranks(1, 2)
@pytest.mark.parametrize("stored", [False, True])
def test_it_compiles_into_one_graph_once_for_all_lengths(stored):
    group = _world()
    torch._dynamo.reset()

    def loss_of(logits, mask, *teacher):
        whose = StoredTopK(*teacher) if stored else teacher[0]
        return vocab_parallel_kl(logits, whose, mask=mask, group=group)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for length in range(3, 9):
        student, teacher, mask = _inputs(11, length)
        mask[0] = True
        tensors = teacher.log_softmax(-1).topk(3) if stored else (_own(teacher, group).detach(),)
        own, plain = _own(student, group), _own(student, group)
        loss, expected = compiled(own, mask, *tensors), loss_of(plain, mask, *tensors)
        loss.backward()
        expected.backward()
        assert_close(loss, expected, rtol=0, atol=1e-12)
        assert_close(own.grad, plain.grad, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_teacher_stored_whole_is_the_whole_teacher(direction, dtype):
    """Where nothing is missing, nothing is made up for want of digits."""
    group = _world()
    student, teacher, mask = _inputs(7, 3, 5, dtype=dtype)
    results = []
    for whose in (StoredTopK(*teacher.log_softmax(-1).topk(7)), _own(teacher, group).detach()):
        own = _own(student, group)
        loss = vocab_parallel_kl(own, whose, mask=mask, direction=direction, group=group)
        loss.backward()
        results.append((loss, own.grad))
    close = 1e-12 if dtype == torch.float64 else 3e-6
    for ours, right in zip(*results, strict=True):
        assert_close(ours, right, rtol=0, atol=close)


@pytest.mark.parametrize("stored", ["probabilities", "logits"])
def test_what_is_stored_must_be_log_probabilities(stored):
    logits = torch.arange(12.0).view(2, 6)
    values, indices = (logits.softmax(-1) if stored == "probabilities" else logits).topk(3)
    with pytest.raises(ValueError, match="logarithms of probabilities"):
        vocab_parallel_kl(torch.zeros(2, 6), StoredTopK(values, indices))
    rounded, indices = logits.log_softmax(-1).bfloat16().topk(6)
    vocab_parallel_kl(torch.zeros(2, 6), StoredTopK(rounded, indices))


@pytest.mark.parametrize("teacher", [None, [[0.1, 0.9]], (torch.ones(1, 2), torch.ones(1, 2))])
def test_a_teacher_that_is_none_is_named(teacher):
    kind = type(teacher).__name__
    with pytest.raises(ValueError, match=f"teacher of type {kind} must be a tensor of logits or a"):
        vocab_parallel_kl(torch.ones(1, 2), teacher)


def test_stored_entries_and_masks_that_are_no_tensors_are_named():
    logits = torch.ones(1, 2)
    with pytest.raises(ValueError, match="indices of type list must be a tensor"):
        vocab_parallel_kl(logits, StoredTopK(torch.zeros(1, 1), [[0]]))
    with pytest.raises(ValueError, match="mask of type list must be a tensor"):
        vocab_parallel_kl(logits, logits, mask=[True])
    with pytest.raises(ValueError, match="logits of type list must be a tensor"):
        vocab_parallel_kl([[1.0, 2.0]], logits)
    with pytest.raises(ValueError, match="temperature='1' must be positive"):
        vocab_parallel_kl(logits, logits, temperature="1")
