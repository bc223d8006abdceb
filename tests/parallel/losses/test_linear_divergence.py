"""The divergence without logits is that of the logits, at every cut and chunk."""

import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import linear
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel import (
    StoredTopK,
    TeacherHead,
    linear_kl,
    vocab_parallel_kl,
)
from megablocks_core.parallel.losses import chunked_head
from megablocks_core.testing import ranks
from tests.parallel.watching import Watch


def _world():
    return Group.of(dist.group.WORLD)


def _small_chunks():
    return patch.multiple(chunked_head, _CHUNK=64, _MOST_TOKENS=4, _BLOCK=1, _FEWEST_COLUMNS=3)


def _own(whole, group, dim=0):
    part = chunk_slice(whole.shape[dim], group.size, group.rank)
    return whole.detach().narrow(dim, part.start, part.stop - part.start).clone().requires_grad_()


def _inputs(vocab_size, *shape, dtype=torch.float64):
    """A student (hidden, weight, bias), a teacher of another width, and a mask."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        [
            torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)
            for sizes in ((*shape, features), (vocab_size, features), (vocab_size,))
        ]
        for features in (6, 4)
    )
    mask = torch.rand(shape, generator=generator) < 0.7
    return [x.requires_grad_() for x in student], teacher, mask


def _capped(x, cap):
    return x if cap is None else cap * torch.tanh(x / cap)


def _weighted(loss):
    return loss.flatten() @ torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype)


def _cut(tensors, group, sequence_parallel):
    hidden, *head = tensors
    own = _own(hidden, group, dim=-2) if sequence_parallel else hidden.detach().requires_grad_()
    return [own, *(_own(x, group) for x in head)]


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_it_equals_the_divergence_of_whole_logits(direction, stored, sequence_parallel):
    group = _world()
    student, teacher, some = _inputs(13, 3, 5)
    # The mass that is not stored is known at temperature 1 alone, in reverse too.
    scales = stored and direction == "forward"
    for reduction, soft_cap, cap, temperature, missing, mask in (
        ("mean", None, 3.0, 1.0, "bucket", some),
        ("none", 4.0, None, 1.0 if stored else 2.0, "bucket", some),
        ("sum", None, None, 0.5 if scales or not stored else 1.0, None, torch.ones_like(some)),
        ("none", 5.0, 3.0, 3.0 if scales or not stored else 1.0, None, torch.zeros_like(some)),
    ):
        missing = missing or ("renormalize" if scales else "bucket")
        options = {"reduction": reduction, "temperature": temperature}
        y = _capped(linear(*teacher), cap)
        own = _cut(student, group, sequence_parallel)
        if stored:
            whose = StoredTopK(*y.log_softmax(-1).topk(3), missing)
        else:
            whose = TeacherHead(*_cut(teacher, group, sequence_parallel), soft_cap=cap)
        with _small_chunks():
            loss = linear_kl(
                *own[:2],
                whose,
                bias=own[2],
                vocab_size=13 if soft_cap else None,
                mask=mask,
                direction=direction,
                soft_cap=soft_cap,
                sequence_parallel=sequence_parallel,
                group=group,
                **options,
            )
            _weighted(loss).backward()
        expected = vocab_parallel_kl(
            _capped(linear(*student), soft_cap),
            whose if stored else y,
            mask=mask,
            direction=direction,
            **options,
        )
        dhidden, dweight, dbias = torch.autograd.grad(_weighted(expected), student)
        if sequence_parallel:
            dhidden = _own(dhidden, group, dim=-2).detach()
        assert_close(loss, expected, rtol=0, atol=1e-11)
        assert_close(own[0].grad, dhidden, rtol=0, atol=1e-11)
        assert_close(own[1].grad, _own(dweight, group).detach(), rtol=0, atol=1e-11)
        assert_close(own[2].grad, _own(dbias, group).detach(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("stored", [False, True])
def test_no_tensor_of_all_logits_exists(stored):
    student, teacher, _ = _inputs(100, 200, dtype=torch.float32)
    whose = TeacherHead(*teacher)
    if stored:
        whose = StoredTopK(*linear(*teacher).log_softmax(-1).topk(3))
    with patch.object(chunked_head, "_CHUNK", 16 * 100), Watch() as watch:
        linear_kl(*student[:2], whose).backward()
    # Logits of 16 tokens; the stored entries and the hidden states of all tokens are smaller.
    assert watch.largest <= 16 * 100 * 4


class _Peak(TorchDispatchMode):
    """The most bytes that are alive at a time, of what is made while on."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.alive = [(ref, n) for ref, n in self.alive if ref() is not None]
            storage = result.untyped_storage()
            known = {ref()._cdata for ref, _ in self.alive}
            if storage._cdata not in known:
                self.alive.append((weakref.ref(storage), storage.nbytes()))
            self.most = max(self.most, sum(n for _, n in self.alive))
        return result


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_memory_does_not_grow_with_the_tokens(direction, stored):
    peaks = []
    for length in (200, 400):
        student, teacher, _ = _inputs(100, length, dtype=torch.float32)
        whose = TeacherHead(*teacher)
        if stored:
            whose = StoredTopK(*linear(*teacher).log_softmax(-1).topk(3))
        with patch.object(chunked_head, "_CHUNK", 16 * 100), _Peak() as peak:
            linear_kl(*student[:2], whose, direction=direction).backward()
        peaks.append(peak.most)
    # But for the gradient in hidden states, 6 floats, and less than 30 numbers a token.
    assert 0 < peaks[1] - peaks[0] < 200 * (6 + 30) * 4 < 200 * 100 * 4


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages(sequence_parallel):
    group = _world()
    student, teacher, _ = _inputs(10, 8)
    own = _cut(student, group, sequence_parallel)
    whose = TeacherHead(*_cut(teacher, group, sequence_parallel))
    mask = torch.ones(8, dtype=torch.bool)
    with _small_chunks(), CommDebugMode() as traffic:
        loss = linear_kl(
            *own[:2], whose, mask=mask, sequence_parallel=sequence_parallel, group=group
        )
        total = traffic.get_total_counts()
        loss.backward()
    # The sizes once; for each of the chunks the numbers, the gradient and both hidden states.
    num_chunks = 8 // 4
    assert total == 1 + num_chunks * (4 if sequence_parallel else 2)
    assert traffic.get_total_counts() == total


@ranks(1, 2)
@pytest.mark.parametrize("stored", [False, True])
def test_it_compiles_into_one_graph_once_for_all_lengths(stored):
    group = _world()
    torch._dynamo.reset()

    def loss_of(hidden, weight, bias, mask, *teacher):
        whose = StoredTopK(*teacher) if stored else TeacherHead(*teacher, soft_cap=3.0)
        return linear_kl(hidden, weight, whose, bias=bias, mask=mask, soft_cap=5.0, group=group)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for length in range(3, 9):
        student, teacher, mask = _inputs(11, length)
        mask[0] = True
        extra = _cut(teacher, group, False)
        if stored:
            extra = linear(*teacher).log_softmax(-1).topk(3)
        twins = []
        for function in (compiled, loss_of):
            own = _cut(student, group, False)
            own[0] = own[0].clone().detach().requires_grad_()
            loss = function(*own, mask, *(x.detach() for x in extra))
            loss.backward()
            twins.append([loss, *(x.grad for x in own)])
        for ours, theirs in zip(*twins, strict=True):
            assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3


@ranks(2)
def test_under_sequence_parallelism_a_mask_tells_the_number_of_tokens():
    group = _world()
    student, teacher, _ = _inputs(4, 6)
    own, whose = _cut(student, group, True), TeacherHead(*_cut(teacher, group, True))
    with pytest.raises(ValueError, match="mask=None must be given under sequence parallelism"):
        linear_kl(*own[:2], whose, sequence_parallel=True, group=group)
    group.barrier()


def test_a_teacher_that_does_not_fit_is_refused():
    student, teacher, mask = _inputs(5, 3)
    hidden, weight, bias = teacher
    for match, whose, options in (
        ("weight of the teacher has 4 rows", TeacherHead(hidden, weight[1:]), {}),
        ("must be those of the tokens", TeacherHead(hidden[1:], weight), {}),
        ("bias of shape .4,. must have an entry", TeacherHead(hidden, weight, bias[1:]), {}),
        ("soft_cap=-1.0 must be positive", TeacherHead(*teacher), {"soft_cap": -1.0}),
        ("mask .2,. of torch.bool|must be those", TeacherHead(*teacher), {"mask": mask[:2]}),
    ):
        with pytest.raises(ValueError, match=match):
            linear_kl(*student[:2], whose, **options)


@pytest.mark.parametrize("teacher", [torch.ones(3, 5), None])
def test_a_teacher_that_is_none_is_named(teacher):
    """Its logits go to ``vocab_parallel_kl``; here they would have no weight to come from."""
    kind = type(teacher).__name__
    with pytest.raises(ValueError, match=f"teacher of type {kind} must be a TeacherHead or a"):
        linear_kl(torch.ones(3, 4), torch.ones(5, 4), teacher)


def test_a_mask_that_is_no_tensor_is_named():
    teacher = TeacherHead(torch.ones(3, 4), torch.ones(5, 4))
    with pytest.raises(ValueError, match="mask of type list must be a tensor"):
        linear_kl(torch.ones(3, 4), torch.ones(5, 4), teacher, mask=[True] * 3)
