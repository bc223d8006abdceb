"""From tokens to their experts and back: on one rank, by all-gather, by all-to-all."""

from megablocks_core.layers.moe.dispatch.dispatcher import Dispatched as Dispatched
from megablocks_core.layers.moe.dispatch.dispatcher import Dispatcher as Dispatcher
from megablocks_core.layers.moe.dispatch.local import LocalDispatcher as LocalDispatcher
