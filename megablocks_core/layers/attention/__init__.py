"""Attention: the grouped-query layer and the product it rests on."""

from megablocks_core.layers.attention.causal import causal_attention as causal_attention
from megablocks_core.layers.attention.grouped_query import Attention as Attention
