"""What keeps every rank in every message of backward, on one rank alone."""

import torch

from megablocks_core.layers.moe.dispatch.joining import link_to, tied, with_graph


class _Visited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, visits):
        ctx.visits = visits
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.visits.append(dy)
        return dy, None


def test_tensors_without_gradients_get_a_graph_where_gradients_are_on():
    plain, trained = torch.ones(2), torch.ones(2, requires_grad=True).exp()
    assert all(each.requires_grad for each in with_graph(plain, trained))
    with torch.no_grad():
        assert not with_graph(plain)[0].requires_grad


def test_backward_visits_what_a_result_is_tied_to_though_it_came_from_elsewhere():
    visits, source = [], torch.ones(3, requires_grad=True)
    sent = _Visited.apply(source, visits)
    other = torch.ones(2, requires_grad=True)
    y = tied(2 * other, link_to(sent))
    y.sum().backward()
    assert other.grad.tolist() == [2, 2]
    assert len(visits) == 1
