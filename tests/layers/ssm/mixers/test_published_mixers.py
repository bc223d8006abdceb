"""Mixers have the weights, outputs and gradients of published ones."""

import pytest
import torch
from torch.testing import assert_close

from tests.layers.ssm.mixers.published import HIDDEN, PUBLISHED, KeepFloat64, same_weights

pytest.importorskip("transformers")


@pytest.mark.parametrize("pair", PUBLISHED)
def test_outputs_and_gradients_are_the_published_ones(pair):
    _, theirs, ours = same_weights(pair)
    results = []
    for mixer, mode in ((theirs, KeepFloat64()), (ours, torch.enable_grad())):
        x_BTH = torch.arange(2 * 9 * HIDDEN).double().sin().view(2, 9, HIDDEN).requires_grad_()
        with mode:
            y_BTH = mixer(x_BTH)
            (y_BTH.sin() * torch.arange(HIDDEN)).sum().backward()
        gradients = {name: parameter.grad for name, parameter in mixer.named_parameters()}
        results.append({"y": y_BTH, "x": x_BTH.grad, **gradients})
    published, found = results
    assert_close(found, {name: published[name] for name in found}, rtol=1e-9, atol=1e-10)


# Its single steps do not clamp step sizes.
@pytest.mark.parametrize("pair", [pair for pair in PUBLISHED if pair != "mamba2"])
def test_decoding_is_the_published_one(pair):
    from transformers import DynamicCache

    config, theirs, ours = same_weights(pair)
    x_BTH = torch.arange(2 * 9 * HIDDEN).double().sin().view(2, 9, HIDDEN)
    with KeepFloat64(), torch.no_grad():
        cache = DynamicCache(config=config)
        expected = [theirs(x_BTH[:, :6], cache=cache)]
        expected += [theirs(x_BTH[:, at : at + 1], cache=cache) for at in range(6, 9)]
    y_BTH, state = ours.prefill(x_BTH[:, :6])
    found = [y_BTH]
    for at in range(6, 9):
        y_BH, state = ours.step(x_BTH[:, at], state)
        found.append(y_BH[:, None])
    assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("pair", PUBLISHED)
def test_names_and_shapes_are_the_published_ones(pair):
    theirs, ours = (
        {name: tuple(x.shape) for name, x in mixer.named_parameters()}
        for mixer in PUBLISHED[pair]()[1:]
    )
    assert ours == theirs
