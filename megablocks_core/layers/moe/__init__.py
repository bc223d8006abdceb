"""Mixture of experts: routers, dispatch, experts and losses, in any layout."""

from megablocks_core.layers.moe.dispatch import Dispatched as Dispatched
from megablocks_core.layers.moe.dispatch import Dispatcher as Dispatcher
from megablocks_core.layers.moe.dispatch import LocalDispatcher as LocalDispatcher
from megablocks_core.layers.moe.experts import GroupedExperts as GroupedExperts
from megablocks_core.layers.moe.losses import load_balance_loss as load_balance_loss
from megablocks_core.layers.moe.losses import z_loss as z_loss
from megablocks_core.layers.moe.moe import MoE as MoE
from megablocks_core.layers.moe.routers import GroupLimit as GroupLimit
from megablocks_core.layers.moe.routers import TopKRouter as TopKRouter
from megablocks_core.layers.moe.routers import route_top_k as route_top_k
from megablocks_core.layers.moe.routers import update_selection_bias as update_selection_bias
from megablocks_core.layers.moe.routing import Routing as Routing
from megablocks_core.layers.moe.upcycling import upcycle as upcycle
from megablocks_core.layers.moe.zero_computation import (
    ZeroComputationExperts as ZeroComputationExperts,
)
