"""Requests to ``attention`` that tests share: tensors, and specs of every kind."""

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from megablocks_core.layers.attention import AttentionSpec, attention

F64 = torch.float64


def tensors(*, rows=1, tokens=8, keys=None, heads=4, kv_heads=2, width=8, value_width=None, seed=0):
    """Queries, keys and values of float64 that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    keys, value_width = keys or tokens, value_width or width
    shapes = (tokens, heads, width), (keys, kv_heads, width), (keys, kv_heads, value_width)
    return [
        torch.randn(rows, *shape, generator=generator, dtype=F64).requires_grad_()
        for shape in shapes
    ]


def sums(lengths):
    """Boundaries of documents with these lengths."""
    return F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).int()


def results(compute, given, spec):
    """Output and gradients of q, k, v and sinks, by a function of these and a spec."""
    leaves = [x.detach().requires_grad_() for x in given]
    sinks = None if spec.sinks is None else spec.sinks.detach().requires_grad_()
    y = compute(*leaves, with_sinks(spec, sinks))
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)
    wanted = [*leaves, *([] if sinks is None else [sinks])]
    gradients = torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True)
    return [
        y,
        *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, wanted, strict=True)),
    ]


def with_sinks(spec, sinks):
    """The spec, with other sinks."""
    return AttentionSpec(**{**vars(spec), "sinks": sinks})


def by(backend):
    """``attention`` by a back end, to be handed to ``results``."""
    return lambda q, k, v, spec: attention(q, k, v, spec, backend=backend)


WINDOWS = st.tuples(st.none() | st.integers(0, 4), st.none() | st.integers(0, 3))


@st.composite
def requests(draw, *, soft_cap=True, sinks=True, packed=None):
    """Tensors and a spec that fit each other."""
    mask = draw(st.sampled_from(["causal", "full"]))
    left, right = draw(WINDOWS)
    spec = {"mask": mask, "window": (left, right if mask == "full" else None)}
    spec["scale"] = draw(st.sampled_from([None, 0.3]))
    if soft_cap:
        spec["soft_cap"] = draw(st.sampled_from([None, 0.7]))
    if sinks and draw(st.booleans()):
        spec["sinks"] = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=F64)
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    value_width = draw(st.sampled_from([8, 3]))
    if draw(st.booleans()) if packed is None else packed:
        rooms = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        lengths = [draw(st.integers(0, room)) for room in rooms]
        spec["cu_seqlens"] = sums(lengths)
        if lengths != rooms:
            spec["cu_seqlens_padded"] = sums(rooms)
        spec["max_seqlen"] = draw(st.sampled_from([None, max(lengths)]))
        tokens = max(sum(rooms) + draw(st.integers(0, 2)), 1)
        given = tensors(tokens=tokens, kv_heads=kv_heads, value_width=value_width)
    else:
        given = tensors(
            rows=draw(st.integers(1, 2)),
            tokens=draw(st.integers(1, 7)),
            keys=draw(st.integers(1, 7)),
            kv_heads=kv_heads,
            value_width=value_width,
        )
    return given, AttentionSpec(**spec)


# One of each kind, where every one costs seconds.
KINDS = {
    "causal": {},
    "full": {"mask": "full"},
    "window": {"window": (2, None)},
    "full window": {"mask": "full", "window": (1, 2)},
    "soft cap": {"soft_cap": 0.7},
    "scale": {"scale": 0.3},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=F64)},
    "documents": {"cu_seqlens": sums([3, 0, 4])},
    "documents with pads": {
        "cu_seqlens": sums([3, 2]),
        "cu_seqlens_padded": sums([4, 4]),
        "max_seqlen": 3,
    },
    "full documents": {"mask": "full", "cu_seqlens": sums([5, 3]), "max_seqlen": 5},
    "windows in documents": {"window": (1, 0), "cu_seqlens": sums([5, 3])},
}


def kind(name, dtype=F64):
    """A spec of ``KINDS``."""
    options = dict(KINDS[name])
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(dtype)
    return AttentionSpec(**options)


def causal_attention(q, k, v, *, dropped=None, **documents):
    """Causal attention, as layers ask for it."""
    return attention(q, k, v, AttentionSpec(dropout=dropped, **documents))
