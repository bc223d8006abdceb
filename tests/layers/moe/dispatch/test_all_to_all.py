"""What an all-to-all sends, reads and keeps; recomputation, compilation, large messages."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megablocks_core.groups import Group, exchange
from megablocks_core.layers.moe.dispatch import AllToAllDispatcher, host_read
from megablocks_core.layers.moe.dispatch.assignment import Order, copy_slots
from megablocks_core.layers.moe.dispatch.regroup import regroup
from megablocks_core.parallel import recompute
from megablocks_core.testing import ranks
from tests.layers.moe.dispatch.reference import Experts, H, choices, loss_of, random, routing_of


def _world():
    return Group.of(dist.group.WORLD)


class _Sent(TorchDispatchMode):
    """Bytes that leave this rank, by dtype of the message."""

    def __init__(self, group):
        super().__init__()
        self.group, self.messages = group, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "_c10d_functional::all_to_all_single":
            rows, _, send, _ = args
            own = send[self.group.rank]
            size = rows[:1].nbytes if len(rows) else 0
            self.messages.append((rows.dtype, size * (sum(send) - own)))
        return func(*args, **(kwargs or {}))

    def of(self, dtype):
        return [size for kind, size in self.messages if kind == dtype]


@ranks(2, 4)
def test_bytes_are_tokens_x_k_x_hidden_x_dtype_x_remote_share():
    """Twice forward and twice backward; weights beside; one message of counts."""
    group = _world()
    tokens, k, num_experts = 8, 2, 4
    dispatcher = AllToAllDispatcher(num_experts=num_experts, ep=group)
    spread = torch.arange(tokens * k).view(tokens, k) % num_experts
    weights = torch.ones(tokens, k, dtype=torch.float64, requires_grad=True)
    x = torch.ones(tokens, 16, dtype=torch.float32, requires_grad=True)
    remote = 1 - 1 / group.size
    rows, weight_bytes = tokens * k * 16 * 4 * remote, tokens * k * 8 * remote
    with _Sent(group) as forward:
        dispatched, handle = dispatcher.dispatch(x, routing_of(spread, weights, num_experts))
        places = dispatched.x[dispatched.rows] * dispatched.weights.unsqueeze(1).float()
        y = dispatcher.combine(places, handle)
    assert forward.of(torch.float32) == [rows, rows]
    assert forward.of(torch.float64) == [weight_bytes]
    counts = 8 * (num_experts // group.size + 1) * (group.size - 1)
    assert forward.of(torch.int64) == [counts]
    with _Sent(group) as backward:
        y.sum().backward()
    assert backward.of(torch.float32) == [rows, rows]
    assert backward.of(torch.float64) == [weight_bytes]
    assert len(backward.messages) == 3


@ranks(2)
def test_f078_a_cold_rank_gets_no_rows():
    """Three tokens with two experts each, all of rank 0: six rows in all, never seven."""
    group = _world()
    dispatcher = AllToAllDispatcher(num_experts=4, ep=group)
    tokens = 3 if group.rank == 0 else 0
    indices = torch.tensor([[0, 1]]).expand(tokens, 2)
    routing = routing_of(indices, torch.ones(tokens, 2), 4)
    dispatched, _ = dispatcher.dispatch(torch.ones(tokens, H), routing)
    assert len(dispatched.x) == len(dispatched.rows) == (6 if group.rank == 0 else 0)
    assert dispatched.tokens_per_expert.tolist() == ([3, 3] if group.rank == 0 else [0, 0])


@ranks(1, 2)
def test_f079_rows_without_tokens_are_zero_and_never_read():
    """New memory is full of NaN here, and so are the experts' results in empty places."""
    group = _world()
    dispatcher = AllToAllDispatcher(num_experts=4, ep=group)
    x, weights = random(5, H, seed=group.rank), torch.ones(5, 2, dtype=torch.float64)
    indices = choices("masked", 5, 4, 2)
    dispatched, handle = dispatcher.dispatch(x, routing_of(indices, weights, 4, capacity=4))
    rows = dispatched.rows
    unread = torch.ones(len(dispatched.x), dtype=torch.bool)
    unread[rows[rows >= 0]] = False
    if group.size > 1:
        assert unread.any() and not dispatched.x[unread].any()
    assert not dispatched.weights[rows < 0].any()
    y = torch.full((len(rows), H), torch.nan, dtype=torch.float64)
    y[rows >= 0] = 1.0
    expected = (indices >= 0).sum(1, keepdim=True).expand(-1, H)
    assert_close(dispatcher.combine(y, handle), expected.double())


@ranks(2)
def test_one_host_read_a_call_and_none_with_a_capacity(chunks=3):
    dispatcher = AllToAllDispatcher(num_experts=4, ep=_world())
    x, weights = random(6, H), torch.ones(6, 2, dtype=torch.float64)
    for capacity, expected in ((None, 1), (4, 0)):
        routing = routing_of(choices("random", 6, 4, 2), weights, 4, capacity)
        with _Reads() as reads:
            pieces = dispatcher.start_dispatch(x, routing, chunks=chunks)
            for piece in pieces:
                dispatched, handle = piece.wait()
                dispatcher.start_combine(random(len(dispatched.rows), H), handle).wait()
        assert (len(pieces), reads.order.count("read")) == (2 if capacity else chunks, expected)
        if expected:  # it was on its way before the sort
            assert reads.order.index("started") < reads.order.index("sorted")
            assert reads.order.index("sorted") < reads.order.index("read")


class _Reads(TorchDispatchMode):
    """When reads were started and done, and slots sorted."""

    def __init__(self):
        super().__init__()
        self.order = []

    def __enter__(self):
        read, order = host_read.HostRead, self.order
        self._right = read.__init__, read.values
        start, values = self._right

        def started(self, counts):
            order.append("started")
            start(self, counts)

        def done(self):
            if self._values is None:
                order.append("read")
            return values(self)

        read.__init__, read.values = started, done
        return super().__enter__()

    def __exit__(self, *error):
        host_read.HostRead.__init__, host_read.HostRead.values = self._right
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::sort":
            self.order.append("sorted")
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_recomputation_takes_counts_and_splits_over():
    """The second run sees no counts and reads none; the gradients are those without it."""
    group = _world()
    dispatcher = AllToAllDispatcher(num_experts=4, ep=group)
    experts = Experts(4, experts=dispatcher.experts)
    x, weights = random(6, H, seed=group.rank).requires_grad_(), random(6, 2).requires_grad_()
    chosen = choices("random", 6, 4, 2)

    def layer(x, weights):
        dispatched, handle = dispatcher.dispatch(x, routing_of(chosen, weights, 4))
        return dispatcher.combine(experts(dispatched), handle).tanh()

    right = torch.autograd.grad(loss_of(layer(x, weights)), (x, weights, experts.up))
    with _Reads() as reads, _Sent(group) as sent:
        y = recompute(layer, x, weights)
        ours = torch.autograd.grad(loss_of(y), (x, weights, experts.up))
    assert reads.order.count("started") == reads.order.count("read") == 1
    assert len(sent.of(torch.int64)) == 1
    for mine, other in zip(ours, right, strict=True):
        assert torch.equal(mine, other)


@ranks(2)
def test_capacity_runs_on_fake_tensors_and_dropless_stops_at_the_host_read():
    group = _world()
    dispatcher = AllToAllDispatcher(num_experts=4, ep=group)

    def layer(capacity):
        x = torch.ones(6, H, requires_grad=True)
        weights = torch.ones(6, 2, requires_grad=True)
        indices = torch.zeros(6, 2, dtype=torch.int64)
        dispatched, handle = dispatcher.dispatch(x, routing_of(indices, weights, 4, capacity))
        assert dispatched.x.shape == (2 * 2 * (capacity or 0), H)
        y = dispatcher.combine(dispatched.x * dispatched.weights.unsqueeze(1), handle)
        y.sum().backward()
        return x.grad.shape, weights.grad.shape

    with FakeTensorMode():
        assert layer(3) == ((6, H), (6, 2))
        with pytest.raises(DataDependentOutputException) as stop:
            layer(None)
    assert any("host_read.py" in str(entry.path) for entry in stop.traceback)


@ranks(2)
def test_capacities_that_differ_raise_on_all_ranks():
    group = _world()
    dispatcher = AllToAllDispatcher(num_experts=4, ep=group)
    x, weights = random(6, H), torch.ones(6, 2, dtype=torch.float64)
    for mine in (3 + group.rank, (None, 3)[group.rank]):
        routing = routing_of(choices("random", 6, 4, 2), weights, 4, mine)
        with pytest.raises(ValueError, match="capacity must be"):
            dispatcher.dispatch(x, routing)


@ranks(1, 2)
@pytest.mark.parametrize("capacity", [None, 3])
def test_it_compiles_as_one_graph(capacity):
    """The host read is in the graph: other routings do not compile again."""
    group = _world()
    dispatcher = AllToAllDispatcher(num_experts=4, ep=group)

    def layer(x, weights, indices):
        dispatched, handle = dispatcher.dispatch(x, routing_of(indices, weights, 4, capacity))
        order = Order(dispatched.rows, dispatched.rows, dispatched.places, dispatched.rows)
        (rows,) = copy_slots(dispatched.x, order)
        return dispatcher.combine(rows.tanh() * dispatched.weights.unsqueeze(1), handle)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for seed in range(4):
        x, weights = random(6, H, seed=seed).requires_grad_(), random(6, 2).requires_grad_()
        indices = (choices("masked", 6, 4, 2) + seed) % 4
        ours, theirs = (
            torch.autograd.grad(loss_of(call(x, weights, indices)), (x, weights))
            for call in (compiled, layer)
        )
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@ranks(2)
def test_strided_tokens_change_nothing():
    group = _world()
    dispatcher = AllToAllDispatcher(num_experts=4, ep=group)
    experts, whole = Experts(4, experts=dispatcher.experts), Experts(4)
    base = random(H, 6, seed=group.rank)
    indices, weights = choices("random", 6, 4, 2), random(6, 2)
    results = []
    for apart in (True, False):
        x = base.t().requires_grad_() if apart else base.t().contiguous().requires_grad_()
        pieces = dispatcher.start_dispatch(x, routing_of(indices, weights, 4), chunks=2)
        returning = []
        for piece in pieces:
            dispatched, handle = piece.wait()
            returning.append(dispatcher.start_combine(experts(dispatched), handle))
        y = dispatcher.finish_combine(returning)
        results.append((y, torch.autograd.grad(loss_of(y), x)[0]))
    hidden = torch.einsum("th,tshf->tsf", base.t(), whole.up[indices]).tanh()
    y = torch.einsum("tsf,tsfh,ts->th", hidden, whole.down[indices], weights)
    for ours, gradient in results:
        assert_close(ours.detach(), y.detach())
        assert torch.equal(gradient, results[0][1])


@ranks(2)
def test_the_next_piece_travels_while_experts_work():
    """Messages of all pieces start before the first experts, both ways; later ones wait after."""
    group = _world()
    dispatcher = AllToAllDispatcher(num_experts=4, ep=group)
    trace = []
    x, weights = random(6, H).requires_grad_(), random(6, 2)
    with _Trace(trace):
        pieces = dispatcher.start_dispatch(
            x, routing_of(choices("random", 6, 4, 2), weights, 4), chunks=2
        )
        returning = []
        for piece in pieces:
            dispatched, handle = piece.wait()
            rows = _Work.apply(dispatched.x, trace) * dispatched.weights.unsqueeze(1)
            returning.append(dispatcher.start_combine(rows, handle))
        y = dispatcher.finish_combine(returning)
        forward = " ".join(trace)
        trace.clear()
        loss_of(y).backward()
    assert forward == (
        "start start start start wait wait work start wait wait work start wait wait"
    )
    # Results of both go back at once; the second piece's work hides the first's message.
    assert " ".join(trace) == (
        "start start wait work start start wait work start start wait wait wait wait"
    )


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trace):
        ctx.trace = trace
        trace.append("work")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.trace.append("work")
        return dx, None


class _Trace:
    """Notes what an exchange starts and waits for."""

    def __init__(self, trace):
        self.trace = trace

    def __enter__(self):
        self.right = exchange.start_all_to_all, exchange.wait
        exchange.start_all_to_all = self._noted("start", self.right[0])
        exchange.wait = self._noted("wait", self.right[1])

    def __exit__(self, *error):
        exchange.start_all_to_all, exchange.wait = self.right

    def _noted(self, name, call):
        def noted(*args, **options):
            self.trace.append(name)
            return call(*args, **options)

        return noted


def test_splits_above_two_to_the_31_are_whole_numbers_of_64_bits():
    """Arithmetic alone: runs of 2^31 rows and more keep their places."""
    counts = torch.tensor([[[2**31, 3], [5, 2**31]]])  # one q, two p, two e
    order = regroup(counts, 8)
    assert order.places.dtype == torch.int64
    assert order.places[:, 0].tolist() == list(range(8))
    big = regroup(counts.flip(1), 2**3)
    assert big.places[5:, 0].tolist() == [2**31 + 5, 2**31 + 6, 2**31 + 7]


@pytest.mark.slow
@ranks(2, timeout=300)
def test_more_than_two_to_the_31_elements_travel():
    """Rank 0 sends 2^31 + 2^20 bytes to rank 1, in rows of one MiB."""
    group = _world()
    rows = 2**11 + 1 if group.rank == 0 else 0
    x = torch.full((rows, 2**20), 7, dtype=torch.uint8)
    x[-1:] = 9
    flying = exchange.start_exchange(
        x,
        send=[0, rows],
        receive=[(2**11 + 1) * group.rank, 0],
        group=group,
    )
    (y,) = flying.wait()
    if group.rank == 1:
        assert y.numel() > 2**31 and y[-1].unique().item() == 9 and y[-2].unique().item() == 7
