"""Mixture of experts: routers, dispatch, experts and losses, in any layout."""

from megablocks_core.layers.moe.dispatch import AllGatherDispatcher as AllGatherDispatcher
from megablocks_core.layers.moe.dispatch import AllToAllDispatcher as AllToAllDispatcher
from megablocks_core.layers.moe.dispatch import DeepEPDispatcher as DeepEPDispatcher
from megablocks_core.layers.moe.dispatch import Dispatched as Dispatched
from megablocks_core.layers.moe.dispatch import Dispatcher as Dispatcher
from megablocks_core.layers.moe.dispatch import LocalDispatcher as LocalDispatcher
from megablocks_core.layers.moe.experts import GroupedExperts as GroupedExperts
from megablocks_core.layers.moe.losses import attach_loss as attach_loss
from megablocks_core.layers.moe.losses import convert_coefficient as convert_coefficient
from megablocks_core.layers.moe.losses import load_balance_loss as load_balance_loss
from megablocks_core.layers.moe.losses import total_loss as total_loss
from megablocks_core.layers.moe.losses import z_loss as z_loss
from megablocks_core.layers.moe.moe import MoE as MoE
from megablocks_core.layers.moe.routers import BalancedRouter as BalancedRouter
from megablocks_core.layers.moe.routers import Capacity as Capacity
from megablocks_core.layers.moe.routers import ExpertChoiceRouter as ExpertChoiceRouter
from megablocks_core.layers.moe.routers import GroupLimit as GroupLimit
from megablocks_core.layers.moe.routers import HashRouter as HashRouter
from megablocks_core.layers.moe.routers import Jitter as Jitter
from megablocks_core.layers.moe.routers import QuantileRouter as QuantileRouter
from megablocks_core.layers.moe.routers import SinkhornRouter as SinkhornRouter
from megablocks_core.layers.moe.routers import TopKRouter as TopKRouter
from megablocks_core.layers.moe.routers import balanced_choices as balanced_choices
from megablocks_core.layers.moe.routers import capacity_of as capacity_of
from megablocks_core.layers.moe.routers import limit as limit
from megablocks_core.layers.moe.routers import random_choices as random_choices
from megablocks_core.layers.moe.routers import route_expert_choice as route_expert_choice
from megablocks_core.layers.moe.routers import route_quantile as route_quantile
from megablocks_core.layers.moe.routers import route_sinkhorn as route_sinkhorn
from megablocks_core.layers.moe.routers import route_top_k as route_top_k
from megablocks_core.layers.moe.routers import sinkhorn as sinkhorn
from megablocks_core.layers.moe.routers import update_quantile_bias as update_quantile_bias
from megablocks_core.layers.moe.routers import update_selection_bias as update_selection_bias
from megablocks_core.layers.moe.routing import Routing as Routing
from megablocks_core.layers.moe.upcycling import upcycle as upcycle
from megablocks_core.layers.moe.zero_computation import (
    ZeroComputationExperts as ZeroComputationExperts,
)
