"""Routers: which experts each token goes to."""

from megablocks_core.layers.moe.routers.capacity import Capacity as Capacity
from megablocks_core.layers.moe.routers.capacity import capacity_of as capacity_of
from megablocks_core.layers.moe.routers.capacity import limit as limit
from megablocks_core.layers.moe.routers.expert_choice import (
    ExpertChoiceRouter as ExpertChoiceRouter,
)
from megablocks_core.layers.moe.routers.expert_choice import (
    route_expert_choice as route_expert_choice,
)
from megablocks_core.layers.moe.routers.fixed import BalancedRouter as BalancedRouter
from megablocks_core.layers.moe.routers.fixed import HashRouter as HashRouter
from megablocks_core.layers.moe.routers.fixed import balanced_choices as balanced_choices
from megablocks_core.layers.moe.routers.fixed import random_choices as random_choices
from megablocks_core.layers.moe.routers.groups import GroupLimit as GroupLimit
from megablocks_core.layers.moe.routers.jitter import Jitter as Jitter
from megablocks_core.layers.moe.routers.quantile import QuantileRouter as QuantileRouter
from megablocks_core.layers.moe.routers.quantile import route_quantile as route_quantile
from megablocks_core.layers.moe.routers.quantile import (
    update_quantile_bias as update_quantile_bias,
)
from megablocks_core.layers.moe.routers.selection_bias import (
    update_selection_bias as update_selection_bias,
)
from megablocks_core.layers.moe.routers.sinkhorn import SinkhornRouter as SinkhornRouter
from megablocks_core.layers.moe.routers.sinkhorn import route_sinkhorn as route_sinkhorn
from megablocks_core.layers.moe.routers.sinkhorn import sinkhorn as sinkhorn
from megablocks_core.layers.moe.routers.top_k import TopKRouter as TopKRouter
from megablocks_core.layers.moe.routers.top_k import route_top_k as route_top_k
