"""What flash-linear-attention is handed means the same there."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.backends import fla
from megablocks_core.layers.ssm.functions.recurrences import gated_delta_recurrence
from tests.layers.ssm.backends.published import record_of, signature, stand_in

RULE = "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
needs_oracle = pytest.mark.skipif(find_spec("fla") is None, reason="oracle mamba")


def drawn(rows, length=9, states=0):
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, rows, length, 2, 4), dim=-1).unbind()
    v, g, beta = torch.randn(rows, length, 2, 3), -torch.rand(rows, length, 2), None
    beta = torch.rand(rows, length, 2)
    return (q, k, v, g, beta), torch.randn(states, 2, 4, 3) if states else None


def theirs(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens=None):
    """Their function by our twin; documents must cover the row."""
    if cu_seqlens is not None:
        assert cu_seqlens.dtype == torch.int64 and cu_seqlens[-1] == q.shape[1]
        assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
    options = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    o, final = gated_delta_recurrence(q, k, v, g, beta, **options)
    return o, final if output_final_state else None


def reference(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens=None):
    """Their plain function, document by document."""
    naive = import_module("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    options = {"scale": scale, "output_final_state": output_final_state}
    if cu_seqlens is None:
        return naive(q, k, v, beta, g, initial_state=initial_state, **options)
    results = []
    for index, (start, stop) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        part = [each[:, start:stop] for each in (q, k, v, beta, g)]
        state = None if initial_state is None else initial_state[index : index + 1]
        results.append(naive(*part, initial_state=state, **options))
    return torch.cat([o for o, _ in results], 1), torch.cat([final for _, final in results])


@pytest.fixture(params=["stand-in", pytest.param("reference", marks=needs_oracle)])
def published(request, monkeypatch):
    if request.param == "stand-in":
        stand_in(monkeypatch, RULE, theirs)
    else:
        module = import_module("fla.ops.gated_delta_rule")
        monkeypatch.setattr(module, "chunk_gated_delta_rule", reference)


def test_rows_with_states(published):
    tensors, state = drawn(2, states=2)
    given = fla.gated_delta_rule(*tensors, initial_state=state, scale=0.7)
    assert_close(given, gated_delta_recurrence(*tensors, initial_state=state, scale=0.7))
    o, _ = fla.gated_delta_rule(*tensors)
    assert_close(o, gated_delta_recurrence(*tensors)[0])


def test_documents_and_what_stands_behind_them(published):
    tensors, state = drawn(1, states=3)
    sums = torch.tensor([0, 2, 5, 7], dtype=torch.int32)
    given = fla.gated_delta_rule(*tensors, initial_state=state, cu_seqlens=sums)
    right = gated_delta_recurrence(*tensors, initial_state=state, cu_seqlens=sums)
    assert_close(given, right)


def test_no_final_state(monkeypatch):
    stand_in(monkeypatch, RULE, theirs)
    tensors, _ = drawn(1)
    sums = torch.tensor([0, 9])
    o, none = fla.gated_delta_rule(*tensors, cu_seqlens=sums, return_final_state=False)
    assert none is None and o.shape == tensors[2].shape


def test_several_householders_are_refused():
    tensors, _ = drawn(1)
    with pytest.raises(ValueError, match="does not serve householders=2"):
        fla.gated_delta_rule(*tensors, householders=2)


@needs_oracle
def test_arguments_are_those_of_the_package():
    function = import_module("fla.ops.gated_delta_rule.chunk").chunk_gated_delta_rule
    recorded = signature(RULE).parameters.values()
    assert record_of(function) == [(each.name, each.kind, each.default) for each in recorded]
