"""From tokens to their experts and back: on one rank, by all-gather, by all-to-all."""

from megablocks_core.layers.moe.dispatch.all_gather import (
    AllGatherDispatcher as AllGatherDispatcher,
)
from megablocks_core.layers.moe.dispatch.all_to_all import (
    AllToAllDispatcher as AllToAllDispatcher,
)
from megablocks_core.layers.moe.dispatch.deep_ep import DeepEPDispatcher as DeepEPDispatcher
from megablocks_core.layers.moe.dispatch.dispatcher import Dispatched as Dispatched
from megablocks_core.layers.moe.dispatch.dispatcher import Dispatcher as Dispatcher
from megablocks_core.layers.moe.dispatch.local import LocalDispatcher as LocalDispatcher
