"""Has the functions of state-space layers run their Triton kernels, and measures what they give."""

import importlib
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

HOOKS = (
    "functions.ssd.operation",
    "functions.convolution.taps",
    "mixers.gated_norm_function",
)

# Errors by norm against float64: float32, and where the interpreter cuts float32 to 16 bits.
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@contextmanager
def in_triton():
    """Functions take the kernels for what they could take on CUDA; counts how often they do."""
    taken = []

    def serves(*tensors):
        given = [tensor for tensor in tensors if tensor is not None]
        fits = all(each.numel() and each.dtype != torch.float64 for each in given)
        taken.extend([None] * fits)
        return fits

    with ExitStack() as stack:
        for hook in HOOKS:
            module = importlib.import_module(f"megablocks_core.layers.ssm.{hook}")
            stack.enter_context(patch.object(module, "triton_serves", serves))
        yield taken


def narrowed(leaves, dtype, *, of=None):
    """The same leaves in a dtype, but those whose places ``of`` does not name in float32."""
    kinds = [dtype if of is None or place in of else torch.float32 for place in range(len(leaves))]
    return [
        leaf if leaf is None else leaf.detach().to(kind).requires_grad_()
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]


def widened(leaves):
    """The same values in float64."""
    return [leaf if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]


def assert_near(results, right, limit):
    """Each by norm."""
    assert len(results) == len(right)
    for place, (ours, theirs) in enumerate(zip(results, right, strict=True)):
        assert ours.shape == theirs.shape and ours.isfinite().all()
        error = (ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-30)
        assert error < limit or theirs.norm() == ours.norm() == 0, (place, error.item())
