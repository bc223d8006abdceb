"""A mixture of experts: a router, a dispatcher and experts joined.

Dimensions: T tokens of this rank, H features.
"""

from torch import Tensor, nn

from megablocks_core.layers.moe.dispatch import Dispatcher
from megablocks_core.layers.moe.routing import Routing


class MoE(nn.Module):
    """Each token's sum over its experts, weighted by the router.

    Maps ``x`` [... T H] to ``y`` [... T H] and the ``Routing`` of its tokens.

    Args:
        router: From tokens to a ``Routing``.
        dispatcher: Brings tokens to experts and back.
        experts: From ``Dispatched`` to weighted results.
    """

    def __init__(self, *, router: nn.Module, dispatcher: Dispatcher, experts: nn.Module) -> None:
        super().__init__()
        self.gate = router
        self.dispatcher = dispatcher
        self.experts = experts

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Apply the layer; ``mask`` [... T] is true for tokens that count."""
        x_TH = x.reshape(-1, x.shape[-1])
        routing = self.gate(x_TH, mask=None if mask is None else mask.reshape(-1))
        dispatched, handle = self.dispatcher.dispatch(x_TH, routing)
        y_TH = self.dispatcher.combine(self.experts(dispatched), handle)
        return y_TH.view_as(x), routing
