"""Kernels for layers: each has a plain twin that says the same."""

from megablocks_core.layers.kernels.choice import Kernels as Kernels
from megablocks_core.layers.kernels.choice import kernels_for as kernels_for
from megablocks_core.layers.kernels.choice import triton_serves as triton_serves
from megablocks_core.layers.kernels.products import grouped_product as grouped_product
from megablocks_core.layers.kernels.rows import permute as permute
from megablocks_core.layers.kernels.rows import unpermute as unpermute
from megablocks_core.layers.kernels.spans import Spans as Spans
from megablocks_core.layers.kernels.spans import spans_of as spans_of
