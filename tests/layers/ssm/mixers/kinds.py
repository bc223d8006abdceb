"""Small mixers of every kind, over chunked functions or over the recurrences, for tests."""

import torch

from megablocks_core.layers.ssm import GatedDeltaNet, Mamba1, Mamba2
from megablocks_core.layers.ssm.functions import recurrences

HIDDEN = 8


def called_as_chunked(recurrence):
    """A recurrence that takes what chunked functions take."""

    def call(*args, chunk_size=64, cut=None, return_final_state=True, **options):
        assert cut is None or cut.group.size == 1
        y, state = recurrence(*args, **options)
        return y, state if return_final_state else None

    return call


def plain(scan):
    """Options of a mixer over the recurrences."""
    return {
        "convolution": called_as_chunked(recurrences.causal_conv1d_recurrence),
        "scan": called_as_chunked(scan),
    }


_SIZES = {
    Mamba1: {"inner_size": 16, "state_size": 3, "dt_rank": 2, "projection_norms": "weights"},
    Mamba2: {"num_heads": 4, "head_dim": 2, "state_size": 3, "num_groups": 2},
    GatedDeltaNet: {"num_key_heads": 4, "num_value_heads": 8, "key_dim": 3, "value_dim": 2},
}
_RECURRENCES = {
    Mamba1: recurrences.selective_recurrence,
    Mamba2: recurrences.ssd_recurrence,
    GatedDeltaNet: recurrences.gated_delta_recurrence,
}
KINDS = {kind.__name__: kind for kind in _SIZES}


def build(kind, *, recurrent=False, **options):
    """A mixer of this kind; chunks are shorter than the sequences of tests."""
    made = KINDS[kind]
    functions = plain(_RECURRENCES[made]) if recurrent else {"chunk_size": 4}
    return made(HIDDEN, **{**_SIZES[made], **functions, **options})


def over(kind, **options):
    """``build`` for ``assert_parallel_equivalence``: the twin of one process is the recurrence."""
    return lambda tp: build(
        kind, recurrent=tp.size == 1, **({"tp": tp, **options} if tp.size > 1 else options)
    )


def tokens(*shape, dtype=torch.float64):
    """Inputs that are no multiples of each other."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).mul(1.7).sin().view(shape).to(dtype)


def loss(y):
    """Sees every output differently."""
    return (y.sin() * torch.arange(y.shape[-1])).sum()
