"""Layers that Transformer Engine computes, built, called, saved and cut as ours are.

Everything is imported when it is built; without the package an error names the extra ``te``.
"""

from megablocks_core.parallel.transformer_engine.grouped_linear import (
    grouped_linear as grouped_linear,
)
from megablocks_core.parallel.transformer_engine.linear import linear as linear
from megablocks_core.parallel.transformer_engine.norm_linear import norm_linear as norm_linear
from megablocks_core.parallel.transformer_engine.norms import layer_norm as layer_norm
from megablocks_core.parallel.transformer_engine.norms import rms_norm as rms_norm
