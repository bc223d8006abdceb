"""The table says what back ends serve: those that a processor runs serve just that."""

import dataclasses

import pytest
import torch

from megablocks_core.layers.attention import AttentionSpec, attention
from megablocks_core.layers.attention.backends import CAPABILITIES
from megablocks_core.layers.attention.backends.capabilities import lacking, needs_of
from megablocks_core.layers.attention.dropping import Dropped
from tests.layers.attention.requests import sums, tensors

DROPPED = Dropped(0.5, "a", torch.zeros(1, 8, 4, dtype=torch.int64))
SPECS = {
    "documents": {"cu_seqlens": sums([3, 5])},
    "pads": {"cu_seqlens": sums([3, 2]), "cu_seqlens_padded": sums([4, 4])},
    "window": {"window": (2, None)},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.zeros(4)},
    "document_sinks": {"sinks": torch.zeros(4), "cu_seqlens": sums([3, 5])},
    "dropout": {"dropout": DROPPED},
}
SHAPES = {"lengths": {"keys": 5}, "value_width": {"value_width": 3}}


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_request_lacks_just_the_field_that_is_not_served(name):
    able = CAPABILITIES[name]
    everywhere = {"float32", "cpu"}  # of tensors of this test
    elsewhere = [field for field in everywhere if not getattr(able, field)]
    for field in (*SPECS, *SHAPES):
        q, k, v = (x.detach().float() for x in tensors(**SHAPES.get(field, {})))
        spec = AttentionSpec(**SPECS.get(field, {}))
        missing = lacking(name, needs_of(q, k, v, spec), q, v)
        assert len(missing) == len(elsewhere) + (not getattr(able, field)), (field, missing)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["sdpa", "flex", "naive"])
def test_what_is_served_runs_and_the_rest_raises(name):
    able = CAPABILITIES[name]
    for field in (*SPECS, *SHAPES):
        q, k, v = (x.detach().float() for x in tensors(**SHAPES.get(field, {})))
        spec = AttentionSpec(**SPECS.get(field, {}))
        if getattr(able, field):
            assert attention(q, k, v, spec, backend=name).shape == (*q.shape[:3], v.shape[3])
        else:
            with pytest.raises(ValueError, match=f"backend='{name}' does not serve"):
                attention(q, k, v, spec, backend=name)


def test_every_field_of_a_spec_is_a_need_or_served_by_all():
    """A field that comes must be told to back ends that do not know it."""
    served_by_all = {"mask", "scale", "max_seqlen"}
    needed = {"cu_seqlens", "cu_seqlens_padded", "window", "soft_cap", "sinks", "dropout"}
    assert {field.name for field in dataclasses.fields(AttentionSpec)} == served_by_all | needed
