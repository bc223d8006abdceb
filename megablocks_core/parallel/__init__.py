"""Parallel parts: layers, losses and gradients over the ranks of a group."""

from megablocks_core.parallel.linear import ColumnParallelLinear as ColumnParallelLinear
from megablocks_core.parallel.linear import RowParallelLinear as RowParallelLinear
from megablocks_core.parallel.linear import column_linears as column_linears
