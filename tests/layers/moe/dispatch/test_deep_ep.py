"""The adapter's logic over gloo: a stand-in has the published signatures of DeepEP's buffer."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.messages import start_all_to_all, wait
from megablocks_core.layers.moe.dispatch import DeepEPDispatcher, LocalDispatcher
from megablocks_core.testing import ranks
from tests.layers.moe.dispatch.reference import H, choices, routing_of


class Buffer:
    """``deep_ep.Buffer``: a token goes once to each rank, -1 stands for experts elsewhere."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        self.group = Group.of(group)
        assert (num_nvl_bytes, num_rdma_bytes) == (2 * H * self.group.size, 0)

    @staticmethod
    def get_dispatch_config(num_ranks):
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row, size: row * size,
            get_rdma_buffer_size_hint=lambda row, size: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        here = num_experts // self.group.size
        owner = torch.where(topk_idx < 0, -1, topk_idx // here)
        in_rank = (owner.unsqueeze(-1) == torch.arange(self.group.size)).any(1)
        per_expert = (topk_idx.reshape(-1, 1) == torch.arange(num_experts)).sum(0)
        return in_rank.sum(0), None, per_expert, in_rank, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
    ):
        if handle is not None:
            tokens, send, receive = handle[:3]
            return self._move(x[tokens], send, receive), None, None, None, None, None
        assert topk_weights.dtype == torch.float32
        send = num_tokens_per_rank.tolist()
        ones = [1] * self.group.size
        receive = self._move(num_tokens_per_rank.unsqueeze(1), ones, ones).reshape(-1).tolist()
        tokens = is_token_in_rank.t().nonzero()[:, 1]
        here = len(num_tokens_per_expert) // self.group.size
        first = here * self.group.rank
        idx = self._move(topk_idx[tokens], send, receive) - first
        idx = torch.where((idx >= 0) & (idx < here), idx, -1)
        weights = torch.where(idx < 0, 0, self._move(topk_weights[tokens], send, receive))
        counts = [int((idx == expert).sum()) for expert in range(here)]
        layout = (tokens, send, receive, len(x))
        return self._move(x[tokens], send, receive), idx, weights, counts, layout, None

    def combine(self, x, handle, topk_weights=None):
        tokens, send, receive, length = handle
        sums = []
        for rows in (x, topk_weights):
            if rows is not None:
                back = self._move(rows, receive, send)
                total = rows.new_zeros(length, rows.shape[1]).index_add(0, tokens, back)
                rows = total
            sums.append(rows)
        return *sums, None

    def _move(self, rows, send, receive):
        return wait(start_all_to_all(rows, receive=receive, send=send, group=self.group))


@ranks(2)
@pytest.mark.parametrize("capacity", [None, 2])
def test_it_is_one_process(capacity):
    """Small whole numbers, which bfloat16 holds; expert e multiplies by e + 1."""
    sys.modules["deep_ep"] = SimpleNamespace(Buffer=Buffer)
    group = Group.of(dist.group.WORLD)
    try:
        dispatcher = DeepEPDispatcher(H, num_experts=4, ep=group)
        tokens = 5 if group.rank == 0 else 2
        indices = choices("masked", tokens, 4, 2).roll(group.rank, 1)
        x = (torch.arange(tokens * H).view(tokens, H) % 4).bfloat16()
        results = []
        for each, first in ((dispatcher, dispatcher.experts.start), (LocalDispatcher(), 0)):
            ours = x.clone().requires_grad_()
            weights = torch.full(indices.shape, 0.5).requires_grad_()
            routing = routing_of(indices, weights, 4, capacity)
            dispatched, handle = each.dispatch(ours, routing)
            scale = torch.repeat_interleave(
                torch.arange(len(dispatched.tokens_per_expert)) + first + 1,
                dispatched.tokens_per_expert if dispatched.capacity is None else capacity,
            )
            scale = torch.cat([scale, scale.new_zeros(len(dispatched.rows) - len(scale))])
            rows = dispatched.x[dispatched.rows.clamp(min=0)]
            y = rows * (dispatched.weights * scale).unsqueeze(1).bfloat16()
            y = each.combine(y, handle)
            y.backward(torch.ones_like(y))
            results.append((y.detach(), ours.grad, weights.grad))
        for mine, right in zip(*results, strict=True):
            assert_close(mine, right, rtol=0, atol=0)
        with pytest.raises(ValueError, match="x of torch.float32 must be bfloat16"):
            dispatcher.dispatch(torch.ones(tokens, H), routing_of(indices, weights, 4))
    finally:
        del sys.modules["deep_ep"]


def test_without_the_package_an_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ImportError, match="needs the package deep_ep"):
        DeepEPDispatcher(H, num_experts=4, ep=Group((0, 1)))
    DeepEPDispatcher(H, num_experts=4, ep=LOCAL)
