"""Mixture of experts: routers, dispatch, experts and losses, in any layout."""

from megablocks_core.layers.moe.moe import MoE as MoE
from megablocks_core.layers.moe.routing import Routing as Routing
from megablocks_core.layers.moe.upcycling import upcycle as upcycle
from megablocks_core.layers.moe.zero_computation import (
    ZeroComputationExperts as ZeroComputationExperts,
)
