"""Attention: the grouped-query layer and the product it rests on."""

from megablocks_core.layers.attention.choice import BACKENDS as BACKENDS
from megablocks_core.layers.attention.choice import attention as attention
from megablocks_core.layers.attention.grouped_query import Attention as Attention
from megablocks_core.layers.attention.spec import AttentionSpec as AttentionSpec
