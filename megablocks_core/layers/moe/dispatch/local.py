"""All experts on this rank: nothing is sent."""

from torch import Tensor

from megablocks_core.layers.moe.dispatch.assignment import Order, by_expert, sum_slots
from megablocks_core.layers.moe.dispatch.dispatcher import Dispatched, Dispatcher
from megablocks_core.layers.moe.routing import Routing


class LocalDispatcher(Dispatcher):
    """Hands each expert the rows of its tokens. Nothing is copied or sent."""

    def dispatch(self, x_TH: Tensor, routing: Routing) -> tuple[Dispatched, Order]:
        """Tokens of the experts, and the handle that ``combine`` takes."""
        order = by_expert(routing.indices, routing.num_experts, capacity=routing.capacity)
        dispatched = Dispatched(
            x_TH,
            order.rows,
            order.take(routing.weights),
            order.counts,
            capacity=routing.capacity,
            places=order.places,
        )
        return dispatched, order

    def combine(self, y_NH: Tensor, handle: Order) -> Tensor:
        """Sum of what its experts made of each token, in the order of its slots [T H]."""
        return sum_slots(y_NH, handle)
