"""Attention by the name of what computes it."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from megablocks_core.layers.attention.backends import (
    flash_attn,
    flash_attn_3,
    flex,
    packed,
    transformer_engine,
)
from megablocks_core.layers.attention.backends.capabilities import (
    CAPABILITIES,
    lacking,
    needs_of,
)
from megablocks_core.layers.attention.spec import AttentionSpec, check_tensors
from megablocks_core.parallel.optional import is_installed

_COMPUTE: dict[str, Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]] = {
    "flash_attn_3": flash_attn_3.attention,
    "flash_attn": flash_attn.attention,
    "transformer_engine": transformer_engine.attention,
    "sdpa": partial(packed.attention, by="sdpa"),
    "flex": flex.attention,
    "naive": partial(packed.attention, by="naive"),
}
BACKENDS = ("auto", *_COMPUTE)


def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | None = None, *, backend: str = "auto"
) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` as ``spec`` says: [B T N W].

    ``K`` divides ``N``; neighbouring query heads share a key head. Queries that see no key give
    zero, and so do tokens of no document, which receive no gradient. Sends nothing. What is saved
    for backward, each back end says.

    Args:
        q: Queries [B T N D].
        k: Keys [B S K D].
        v: Values [B S K W].
        spec: The request; default causal, over whole rows.
        backend: One of ``BACKENDS``. "auto" takes the first that is installed and serves the
            request, in the order of ``CAPABILITIES``.

    Raises:
        ValueError: There is no such back end, shapes do not fit, or the back end does not serve
            the request; all that is missing is named.
        ImportError: The back end's package is missing.
    """
    spec = AttentionSpec() if spec is None else spec
    check_tensors(q, k, v, spec)
    check_backend(backend)
    if backend == "auto":
        backend = chosen(q, k, v, spec)
    elif missing := lacking(backend, needs_of(q, k, v, spec), q, v):
        raise ValueError(f"backend={backend!r} does not serve {', '.join(missing)}")
    return _COMPUTE[backend](q, k, v, spec)


def chosen(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str:
    """What "auto" takes for a call."""
    needs = needs_of(q, k, v, spec)
    for name, able in CAPABILITIES.items():
        if not lacking(name, needs, q, v) and (able.module is None or is_installed(able.module)):
            return name
    raise AssertionError("naive serves all")


def check_backend(backend: str) -> None:
    """Raise ``ValueError`` if there is no such back end."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
