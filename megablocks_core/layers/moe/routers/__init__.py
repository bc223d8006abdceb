"""Routers: which experts each token goes to."""

from megablocks_core.layers.moe.routers.groups import GroupLimit as GroupLimit
from megablocks_core.layers.moe.routers.selection_bias import (
    update_selection_bias as update_selection_bias,
)
from megablocks_core.layers.moe.routers.top_k import TopKRouter as TopKRouter
from megablocks_core.layers.moe.routers.top_k import route_top_k as route_top_k
