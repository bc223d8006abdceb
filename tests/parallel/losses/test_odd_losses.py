"""Losses under inputs, options and surroundings that nobody plans for."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear
from torch.testing import assert_close

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel import (
    HostBuffers,
    StoredTopK,
    TeacherHead,
    linear_cross_entropy,
    linear_kl,
    offload,
    recompute,
    vocab_parallel_cross_entropy,
    vocab_parallel_kl,
)
from megablocks_core.testing import ranks

_T, _V, _H = 5, 12, 4


def _random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _own(whole, group, dim=0):
    part = chunk_slice(whole.shape[dim], group.size, group.rank)
    own = whole.detach().narrow(dim, part.start, part.stop - part.start).clone()
    return own.requires_grad_()


def _world():
    return Group.of(dist.group.WORLD)


def _inputs(kind, group=None):
    """Arguments of a loss by name, the weight or logits cut over ``group``."""
    group = group or Group()
    hidden, weight = _random(_T, _H).requires_grad_(), _random(_V, _H, seed=1)
    logits, teacher = linear(hidden.detach(), weight), _random(_T, _V, seed=2)
    targets = torch.arange(_T)
    stored = StoredTopK(*teacher.log_softmax(-1).topk(3))
    head = TeacherHead(_random(_T, 3), _own(_random(_V, 3, seed=3), group))
    own_logits = _own(logits, group, dim=-1)
    with_weight = {"hidden": hidden, "weight": _own(weight, group), "bias": None}
    return {
        "logits": (vocab_parallel_cross_entropy, {"logits": own_logits, "targets": targets}),
        "head": (linear_cross_entropy, {**with_weight, "targets": targets}),
        "kl": (
            vocab_parallel_kl,
            {"logits": own_logits, "teacher": _own(teacher, group, dim=-1).detach()},
        ),
        "stored kl": (vocab_parallel_kl, {"logits": own_logits, "teacher": stored}),
        "head kl": (linear_kl, {**with_weight, "teacher": head}),
        "stored head kl": (linear_kl, {**with_weight, "teacher": stored}),
    }[kind]


_ALL = ("logits", "head", "kl", "stored kl", "head kl", "stored head kl")
_HEADS = tuple(kind for kind in _ALL if "head" in kind)
_DIVERGENCES = tuple(kind for kind in _ALL if "kl" in kind)
_STORED = tuple(kind for kind in _ALL if "stored" in kind)
_NAN = math.nan


def _teachers():
    hidden, weight = _random(_T, 3), _random(_V, 3)
    log_probs, indices = _random(_T, _V).log_softmax(-1).topk(2)
    return hidden, weight, log_probs, indices


_HIDDEN, _WEIGHT, _LOG_PROBS, _INDICES = _teachers()


@pytest.mark.parametrize(
    ("kinds", "changes", "match"),
    [
        (("logits", "head"), {"label_smoothing": _NAN}, "label_smoothing=nan must lie"),
        (("logits", "head"), {"z_loss": _NAN}, "z_loss=nan must not be negative, and finite"),
        (("logits", "head"), {"z_loss": -0.1}, "z_loss=-0.1 must not be negative"),
        (("logits", "head"), {"z_loss": math.inf}, "z_loss=inf must not"),
        (("logits", "head"), {"ignore_index": -100.0}, "ignore_index=-100.0 must be an integer"),
        (("logits", "head"), {"targets": torch.arange(_T).bool()}, "targets of torch.bool must"),
        (_HEADS, {"soft_cap": _NAN}, "soft_cap=nan must be positive and finite"),
        (_HEADS, {"soft_cap": math.inf}, "soft_cap=inf must be positive and finite"),
        (_HEADS, {"weight": torch.ones(_V, _H).bool()}, "weight of torch.bool must be floating"),
        (_HEADS, {"bias": torch.ones(_V, dtype=torch.int64)}, "bias of torch.int64 must be float"),
        (_HEADS, {"weight": torch.ones(_H)}, "weight of shape .4,. this rank's rows"),
        (_ALL, {"vocab_size": 0}, "vocab_size=0 must be a whole number of at least 1"),
        (_ALL, {"vocab_size": -3}, "vocab_size=-3 must be a whole number"),
        (_ALL, {"vocab_size": 12.0}, "vocab_size=12.0 must be a whole number"),
        (_ALL, {"vocab_size": _V + 1}, f"must .*vocab_size={_V + 1}"),
        (_ALL, {"reduction": None}, "reduction=None must be"),
        (_DIVERGENCES, {"temperature": _NAN}, "temperature=nan must be positive and finite"),
        (_DIVERGENCES, {"temperature": math.inf}, "temperature=inf must be positive and finite"),
        (_DIVERGENCES, {"mask": torch.ones(_T)}, "mask .5,. of torch.float32 must be booleans"),
        (_DIVERGENCES, {"mask": torch.ones(_T).long()}, "mask .5,. of torch.int64 must be boo"),
        (
            ("head kl",),
            {"teacher": TeacherHead(_HIDDEN, _WEIGHT, soft_cap=0.0)},
            "soft_cap of the teacher=0.0 must be positive",
        ),
        (("kl",), {"teacher": torch.ones(_T, _V).long()}, "teacher of torch.int64 must be float"),
        (
            _STORED,
            {"teacher": StoredTopK(_LOG_PROBS, _INDICES.double())},
            "indices of torch.float64 must be floating-point numbers and integers",
        ),
        (
            _STORED,
            {"teacher": StoredTopK(_LOG_PROBS.long(), _INDICES)},
            "log_probs of torch.int64 .* must be floating-point",
        ),
        (
            _STORED,
            {"teacher": StoredTopK(_LOG_PROBS[:, :0], _INDICES[:, :0])},
            "must store at least one entry",
        ),
        (
            _STORED,
            {"teacher": StoredTopK(_LOG_PROBS, _INDICES[:, :1].expand(-1, 2))},
            "indices must name a column at most once",
        ),
    ],
)
def test_what_is_no_option_or_input_is_refused_by_name(kinds, changes, match):
    for kind in kinds:
        loss, arguments = _inputs(kind)
        with pytest.raises(ValueError, match=match):
            loss(**{**arguments, **changes})


@ranks(2, 4)
@pytest.mark.parametrize("kind", _ALL)
def test_what_one_rank_refuses_raises_on_all(kind):
    """No rank waits for one that gave up."""
    group = _world()
    loss, arguments = _inputs(kind, group)
    last = group.rank == group.size - 1
    wrong = {"targets": torch.arange(_T + 1)} if "targets" in arguments else {"temperature": _NAN}
    if "hidden" in arguments:
        wrong |= {"weight": arguments["weight"].detach()[:, 1:]}
    for name, value in wrong.items():
        for vocab_size in (None, _V):
            changes = {name: value} if last else {}
            with pytest.raises(ValueError) as caught:
                loss(**{**arguments, **changes}, vocab_size=vocab_size, group=group)
            said = str(caught.value)
            assert ("refused its" in said) != last, said
    assert loss(**arguments, group=group).isfinite()


@ranks(2, 4)
@pytest.mark.parametrize("kind", _ALL)
def test_options_and_lengths_that_differ_between_ranks_raise_on_all(kind):
    group = _world()
    loss, arguments = _inputs(kind, group)
    last = group.rank == group.size - 1
    if "targets" in arguments:
        cases = [{"label_smoothing": 0.1}, {"z_loss": 0.1}]
    else:
        cases = [{"direction": "reverse"}]
    if kind != "logits":
        fewer = {"logits", "hidden", "targets"} & set(arguments)
        cases += [{name: arguments[name][:3].detach() for name in fewer} | _shorter(arguments)]
    if "hidden" in arguments:
        cases += [{"soft_cap": 3.0}, {"hidden": arguments["hidden"].detach()}]
        cases += [{"bias": _random(len(arguments["weight"]))}, {"reduction": "none"}]
    for changes in cases:
        with pytest.raises(ValueError, match="(alike|the same) on all ranks"):
            loss(**{**arguments, **(changes if last else {})}, group=group)
    assert loss(**arguments, group=group).isfinite()


def _shorter(arguments):
    """A teacher of three tokens, if there is one."""
    teacher = arguments.get("teacher")
    if teacher is None:
        return {}
    if isinstance(teacher, torch.Tensor):
        return {"teacher": teacher[:3]}
    if isinstance(teacher, StoredTopK):
        return {"teacher": StoredTopK(teacher.log_probs[:3], teacher.indices[:3])}
    return {"teacher": teacher._replace(hidden=teacher.hidden[:3])}


@ranks(2)
@pytest.mark.parametrize("kind", _DIVERGENCES)
def test_masks_that_differ_between_ranks_raise_on_all(kind):
    group = _world()
    loss, arguments = _inputs(kind, group)
    mask = torch.arange(_T) != group.rank
    with pytest.raises(ValueError, match="mask must be equal on all ranks"):
        loss(**arguments, mask=mask, group=group)


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", _ALL)
def test_surroundings_do_not_change_a_loss(kind):
    """Without gradients, in inference mode and under autocast, it is the same number."""
    group = _world()
    loss, arguments = _inputs(kind, group)
    for reduction in ("none", "mean"):
        right = loss(**arguments, reduction=reduction, group=group).detach()
        with torch.no_grad():
            assert torch.equal(loss(**arguments, reduction=reduction, group=group), right)
        with torch.inference_mode():
            assert torch.equal(loss(**arguments, reduction=reduction, group=group), right)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(**arguments, reduction=reduction, group=group), right)


@ranks(1, 2)
@pytest.mark.parametrize("kind", _ALL)
def test_inside_recompute_and_offload_and_twice_through_a_graph(kind):
    group = _world()
    loss, arguments = _inputs(kind, group)
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    for reduction in ("none", "mean"):

        def call(arguments=arguments, reduction=reduction):
            # What backward needs is made inside, and must outlive it.
            scaled = {name: x * 1.5 for name, x in arguments.items() if name in ("hidden",)}
            return loss(**{**arguments, **scaled}, reduction=reduction, group=group).sum()

        right = torch.autograd.grad(call(), leaves)
        total = call()
        for _ in range(2):
            twice = torch.autograd.grad(total, leaves, retain_graph=True)
            assert all(map(torch.equal, twice, right))
        assert all(map(torch.equal, torch.autograd.grad(recompute(call), leaves), right))
        with offload(HostBuffers(), min_bytes=0, from_host=True):
            total = call()
        assert all(map(torch.equal, torch.autograd.grad(total, leaves), right))


@pytest.mark.parametrize("kind", _ALL)
def test_a_second_derivative_raises(kind):
    loss, arguments = _inputs(kind)
    leaf = arguments.get("hidden", arguments.get("logits"))
    for reduction in ("none", "mean"):
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        total = loss(**arguments, reduction=reduction).sum() * factor
        (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@pytest.mark.parametrize("kind", _HEADS)
def test_what_is_changed_in_place_before_backward_is_noticed(kind):
    """Backward computes logits again, and they would be those of something else."""
    loss, arguments = _inputs(kind)
    teacher = arguments.get("teacher")
    changed = arguments["targets"] if teacher is None else teacher[0]
    total = loss(**arguments, reduction="none").sum()
    changed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", _HEADS)
def test_parts_that_are_frozen_have_no_gradient_and_change_no_other(kind):
    group = _world()
    loss, arguments = _inputs(kind, group)
    arguments["bias"] = _own(_random(_V), group)
    names = ("hidden", "weight", "bias")
    right = torch.autograd.grad(loss(**arguments, group=group), [arguments[name] for name in names])
    for alone, expected in zip(names, right, strict=True):
        frozen = {name: arguments[name].detach() for name in names if name != alone}
        leaf = arguments[alone]
        for reduction in ("mean", "none"):
            own = loss(**{**arguments, **frozen}, reduction=reduction, group=group).mean()
            (gradient,) = torch.autograd.grad(own, leaf)
            assert_close(gradient, expected, rtol=0, atol=1e-14)


@ranks(1, 2)
@pytest.mark.parametrize("kind", _ALL)
def test_one_token_and_fewer_columns_than_ranks(kind):
    """A vocabulary of one column: its only choice is sure."""
    group = _world()
    loss, arguments = _inputs(kind, group)
    wholes = {"logits": (_random(1, 1), 1), "weight": (_random(1, _H), 0)}
    one = {name: _own(x, group, dim) for name, (x, dim) in wholes.items() if name in arguments}
    one |= {"hidden": _random(1, _H).requires_grad_()} if "hidden" in arguments else {}
    one |= {"targets": torch.zeros(1).long()} if "targets" in arguments else {}
    if kind == "kl":
        one["teacher"] = one["logits"].detach()
    elif kind == "head kl":
        one["teacher"] = TeacherHead(_random(1, 3), _own(_random(1, 3), group))
    elif "stored" in kind:
        one["teacher"] = StoredTopK(torch.zeros(1, 1), torch.zeros(1, 1).int())
    result = loss(**{**arguments, **one}, vocab_size=1, group=group)
    result.backward()
    assert_close(result, torch.zeros_like(result), rtol=0, atol=1e-6)
    for x in one.values():
        if isinstance(x, torch.Tensor) and x.grad is not None:
            assert_close(x.grad, torch.zeros_like(x), rtol=0, atol=1e-6)


@ranks(1, 2)
def test_a_bias_may_forbid_columns():
    """All of one rank's, and all of a block's: a maximum of -inf says nothing there."""
    group = _world()
    loss, arguments = _inputs("head", group)
    bias = torch.zeros(_V, dtype=torch.float64)
    bias[_V // 2 :] = -math.inf
    whole = [arguments["hidden"], _random(_V, _H, seed=1).requires_grad_()]
    right = cross_entropy(linear(*whole, bias), arguments["targets"])
    gradients = torch.autograd.grad(right, whole)
    arguments["bias"] = _own(bias, group).detach()
    for reduction in ("mean", "none"):
        total = loss(**arguments, reduction=reduction, group=group).mean()
        dhidden, dweight = torch.autograd.grad(total, [arguments["hidden"], arguments["weight"]])
        assert_close(total, right, rtol=0, atol=1e-12)
        assert_close(dhidden, gradients[0], rtol=0, atol=1e-12)
        assert_close(dweight, _own(gradients[1], group).detach(), rtol=0, atol=1e-12)


@ranks(1, 2)
def test_the_student_may_be_forbidden_columns_in_reverse():
    group = _world()
    for kind in ("head kl", "stored head kl"):
        loss, arguments = _inputs(kind, group)
        bias = torch.zeros(_V, dtype=torch.float64)
        bias[_V // 2 :] = -math.inf
        arguments["bias"] = _own(bias, group).detach()
        logits = _own(linear(arguments["hidden"], _random(_V, _H, seed=1), bias), group, dim=-1)
        teacher = arguments["teacher"]
        if kind == "head kl":
            teacher = linear(teacher.hidden, teacher.weight).detach()
        result = loss(**arguments, direction="reverse", group=group)
        twin = vocab_parallel_kl(logits, teacher, direction="reverse", group=group)
        result.backward()
        assert result.isfinite() and arguments["weight"].grad.isfinite().all()
        assert_close(result, twin, rtol=0, atol=1e-12)


def test_a_target_of_one_byte_is_no_ignored_one():
    """The index 156 as a byte equals -100."""
    hidden, weight = _random(3, _H), _random(160, _H)
    targets = torch.tensor([0, 156, 100], dtype=torch.uint8)
    right = cross_entropy(linear(hidden, weight), targets.long())
    assert_close(linear_cross_entropy(hidden, weight, targets), right)


@pytest.mark.parametrize("kind", _HEADS)
def test_hidden_states_wider_than_the_weight(kind):
    loss, arguments = _inputs(kind)
    right = loss(**arguments)
    (expected,) = torch.autograd.grad(right, arguments["weight"])
    narrow = arguments["weight"].detach().float().requires_grad_()
    result = loss(**{**arguments, "weight": narrow})
    result.backward()
    assert result.dtype == torch.float64 and narrow.grad.dtype == torch.float32
    assert_close(result, right, rtol=1e-6, atol=1e-6)
    assert_close(narrow.grad.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_mean_of_many_tokens_stays_in_the_range_of_float16(reduction):
    """Their sum does not: it is divided before it is rounded."""
    hidden = torch.full((4096, 1), 64.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(3, 1, dtype=torch.float16, requires_grad=True)
    bias = torch.zeros(3, dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
    loss.mean().backward()
    right = 64.0 * torch.tensor([[-2 / 3], [1 / 3], [1 / 3]])
    assert weight.grad.dtype == bias.grad.dtype == torch.float16
    assert_close(weight.grad.float(), right, rtol=1e-3, atol=0)
    assert_close(bias.grad.float(), right.squeeze(-1) / 64, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", _ALL)
def test_strided_and_expanded_inputs(kind):
    loss, arguments = _inputs(kind)
    odd = dict(arguments)
    for name in ("hidden", "weight", "logits"):
        if name in arguments:
            odd[name] = arguments[name].detach().t().contiguous().t().requires_grad_()
    if "targets" in arguments:
        odd["targets"] = arguments["targets"].repeat_interleave(2)[::2]
    for reduction in ("mean", "none"):
        results = []
        for inputs in (odd, arguments):
            leaves = [inputs[name] for name in ("hidden", "weight", "logits") if name in inputs]
            total = loss(**inputs, reduction=reduction).sum()
            results.append([total, *torch.autograd.grad(total, leaves)])
        for ours, right in zip(*results, strict=True):
            assert_close(ours, right, rtol=0, atol=1e-12)
    one = {name: x[:1].detach() for name, x in arguments.items() if name in ("hidden", "logits")}
    many = {name: x.expand(_T, -1).requires_grad_() for name, x in one.items()}
    copied = {name: x.detach().clone() for name, x in many.items()}
    assert_close(loss(**{**arguments, **many}), loss(**{**arguments, **copied}))


@ranks(1, 2)
@pytest.mark.parametrize("kind", _ALL)
def test_infinite_logits_of_one_token_leave_the_others_theirs(kind):
    group = _world()
    loss, arguments = _inputs(kind, group)
    name = "hidden" if "hidden" in arguments else "logits"
    right = loss(**arguments, reduction="none", group=group)
    broken = arguments[name].detach().clone()
    broken[2] = math.inf
    losses = loss(**{**arguments, name: broken.requires_grad_()}, reduction="none", group=group)
    others = torch.arange(_T) != 2
    assert torch.equal(losses[others], right[others]) and not losses[2].isfinite()
    losses[others].sum().backward()
