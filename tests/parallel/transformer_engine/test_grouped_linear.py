"""Grouped linear layers are as many linear layers, cut over experts and features."""

import copy
import pickle

import pytest
import torch

from megablocks_core.groups import LOCAL, Mesh, gather_whole, marks
from megablocks_core.parallel.recipes import MXFP8, NVFP4, CurrentScaling
from megablocks_core.parallel.transformer_engine import grouped_linear
from megablocks_core.parallel.transformer_engine.grouped_linear import Alignment, multiple_of
from megablocks_core.testing import ranks
from tests.parallel.transformer_engine import fake
from tests.parallel.transformer_engine.fake import fixture as fixture

DOUBLE = {"dtype": torch.float64}


def built(**options):
    torch.manual_seed(2)
    return grouped_linear(4, 8, 6, **DOUBLE, **options)


def twin(layer, x, counts):
    pieces = zip(x.split(counts), layer.weight, strict=True)
    y = torch.cat([piece @ weight.T for piece, weight in pieces])
    if layer.bias is None:
        return y
    return y + layer.bias.repeat_interleave(torch.tensor(counts), 0)


@pytest.mark.parametrize("counts", [[2, 0, 3, 1], [0, 0, 0, 6], [0, 0, 0, 0]])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients(te, counts, bias):
    layer = built(bias=bias)
    start, results = torch.randn(sum(counts), 8, **DOUBLE), []
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    for call, owner in ((layer, layer), (copied, copied), (lambda *a: twin(layer, *a), layer)):
        x = start.clone().requires_grad_()
        owner.zero_grad()
        y = call(x, counts)
        y.backward(torch.linspace(-1, 1, y.numel(), **DOUBLE).view_as(y))
        grads = {name: each.grad for name, each in owner.named_parameters()}
        results.append({"y": y.detach(), "x": x.grad, **grads})
    for result in results[:2]:
        torch.testing.assert_close(result, results[2], rtol=1e-10, atol=1e-12)


@ranks(2)
def test_values_are_slices_of_the_whole():
    ep, etp = Mesh(ep=2).expert.group("ep"), Mesh(etp=2, tp=2).expert.group("etp")
    with fake.installed():
        for mode in ("column", "row"):
            whole = built(parallel_mode=mode, bias=False)
            for cut in ({"ep": ep}, {"etp": etp}):
                layer = built(parallel_mode=mode, bias=False, **cut)
                values = torch.stack(list(gather_whole(layer).values()))
                assert torch.equal(values, whole.weight)
                x = torch.randn(3, layer.weight.shape[2], **DOUBLE)
                counts = [3] + [0] * (len(layer.weight) - 1)
                torch.testing.assert_close(layer(x, counts), twin(layer, x, counts))


def test_marks_name_one_tensor_an_expert(te):
    layer = built(each="experts.{}.up")
    found = {name: (specs.each, specs.expert) for name, _, specs in marks(layer)}
    assert found == {
        "weight": ("experts.{}.up.weight", True),
        "bias": ("experts.{}.up.bias", True),
    }


@pytest.mark.parametrize(("recipe", "multiple"), [(CurrentScaling(), 16), (MXFP8(), 32)])
def test_rows_are_aligned_under_a_recipe(te, recipe, multiple):
    torch.manual_seed(0)
    layer = grouped_linear(3, 16, 16)
    layer.recipe = recipe
    seen, forward = [], type(layer.engine.module()).forward

    def watch(module, inp, m_splits):
        seen.append(list(m_splits))
        return forward(module, inp, m_splits)

    module = layer.engine.module()
    module.forward = watch.__get__(module)
    x = torch.randn(20, 16, requires_grad=True)
    y = layer(x, [1, 19, 0])
    y.sum().backward()
    assert seen == [[multiple, 32, 0]]
    error = (y - twin(layer, x, [1, 19, 0])).norm() / y.norm()
    assert 0 < error < 0.1
    assert x.grad is not None and x.grad.isfinite().all()


def test_multiples():
    found = [multiple_of(recipe) for recipe in (None, CurrentScaling(), MXFP8(), NVFP4())]
    assert found == [1, 16, 32, 128]


def test_alignment_keeps_rows_in_order():
    x = torch.arange(1.0, 7.0).view(6, 1)
    alignment = Alignment([2, 0, 4], 3, x.device)
    padded = alignment.padded(x)
    assert padded.flatten().tolist() == [1, 2, 0, 3, 4, 5, 6, 0, 0]
    assert alignment.counts == [3, 0, 6]
    assert torch.equal(alignment.taken(padded), x)


@ranks(2)
def test_what_cannot_be_says_so():
    etp = Mesh(tp=2, etp=2).expert.group("etp")
    with fake.installed():
        with pytest.raises(ValueError, match="bias=True of parts of a sum over etp of 2 ranks"):
            grouped_linear(4, 8, 8, parallel_mode="row", etp=etp)
        with pytest.raises(ValueError, match="counts=.* must be 4 numbers with sum 3"):
            built()(torch.randn(3, 8, **DOUBLE), [1, 1, 1])
        with pytest.raises(ValueError, match="num_experts=3 must divide evenly"):
            grouped_linear(3, 8, 8, ep=Mesh(ep=2).expert.group("ep"))
        assert LOCAL.size == 1
