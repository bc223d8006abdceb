"""Hooks hear what modules multiply and cache, change nothing, and are gone afterwards."""

import pytest
import torch
from torch import nn

from megablocks_core.export.quantising.watching import watched


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        self.second.weight.requires_grad_(False)

    def forward(self, tokens):
        return self.second(self.first(self.embedding(tokens)).relu())


class _Heard(dict):
    def __call__(self, kind, name, amax):
        self.setdefault((kind, name), []).append(float(amax))


TOKENS = torch.tensor([[0, 3], [4, 1]])


def test_inputs_of_wanted_weights_are_heard_in_each_call_and_outputs_are_the_same():
    model, heard = _Model(), _Heard()
    before = model(TOKENS)
    with watched(model, {"second.weight", "embedding.weight"}, heard, cache=True):
        first, second = model(TOKENS), model(TOKENS[:1])
        assert not model.training and not first.requires_grad
    assert torch.equal(first, before) and torch.equal(second, before[:1])
    hidden = model.first(model.embedding(TOKENS)).relu()
    expected = [hidden.max().item(), hidden[:1].max().item()]
    assert heard == {("inputs", "second.weight"): pytest.approx(expected)}
    assert model.training and torch.is_grad_enabled()
    model(TOKENS)
    assert len(heard["inputs", "second.weight"]) == 2


def test_hooks_go_and_modes_return_also_after_an_error():
    model = _Model()
    model.first.eval()
    with (
        pytest.raises(RuntimeError, match="inside"),
        watched(model, {"first.weight"}, _Heard(), cache=False),
    ):
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert not any(module._forward_pre_hooks for module in model.modules())


class _Attention(nn.Module):
    """Takes a cache by the name that transformers has for it, or the one that it had."""

    def __init__(self, argument):
        super().__init__()
        torch.manual_seed(0)
        self.k_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.forward = {"cache": self._cache, "past_key_values": self._past, "": self._none}[
            argument
        ]

    def _cache(self, x, cache=None):
        return self._none(x) if cache is None else cache.update(*self._none(x), 0)

    def _past(self, x, past_key_values=None):
        return self._cache(x, past_key_values)

    def _none(self, x):
        return 2 * self.k_proj(x), self.v_proj(x)


class _Cache:
    def __init__(self):
        self.layers = 1

    def update(self, keys, values, layer):
        return keys + 100, values + layer + self.layers


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_a_cache_is_heard_whether_there_is_one_or_not_and_does_what_it_did(argument):
    model, heard, x = nn.ModuleDict({"attn": _Attention(argument)}), _Heard(), torch.randn(2, 4)
    attention = model["attn"]
    keys, values = (one.detach() for one in attention(x))
    with watched(model, set(), heard, cache=True):
        assert torch.equal(attention(x)[0], keys)
        found = attention(x, **{argument: _Cache()})
    assert torch.equal(found[0], keys + 100) and torch.equal(found[1], values + 1)
    largest = [float(keys.abs().max())] * 2
    assert heard["keys", "attn.k_proj.weight"] == pytest.approx(largest)
    assert heard["values", "attn.v_proj.weight"] == pytest.approx([float(values.abs().max())] * 2)
    heard.clear()
    with watched(model, set(), heard, cache=False):
        attention(x)
    assert not heard


def test_attention_without_a_place_for_a_cache_is_not_heard():
    model, heard = nn.ModuleDict({"attn": _Attention("")}), _Heard()
    with watched(model, set(), heard, cache=True):
        model["attn"](torch.randn(2, 4))
    assert not heard
