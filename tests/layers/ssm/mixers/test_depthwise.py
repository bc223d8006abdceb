"""Weights of a convolution are cut as its channels, and start as those of nn.Conv1d."""

import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import Mesh, Segment, gather_whole
from megablocks_core.layers.ssm.mixers.depthwise import DepthwiseConv1d
from megablocks_core.testing import ranks

SEGMENTS = (Segment(8), Segment(3, parts=1))


def test_names_shapes_and_range_are_those_of_conv1d():
    ours = DepthwiseConv1d(600, 4)
    theirs = nn.Conv1d(600, 600, 4, groups=600)
    for (name, mine), (other, published) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert (name, mine.shape) == (other, published.shape)
        assert 0.49 < mine.abs().max() <= 0.5
    theirs.load_state_dict(ours.state_dict())
    assert [x if x is None else x.shape for x in DepthwiseConv1d(6, 4, bias=False).weights()] == [
        (6, 4),
        None,
    ]


@ranks(1, 2)
def test_shared_channels_sum_their_gradients():
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    torch.manual_seed(0)
    conv = DepthwiseConv1d(11, 2, segments=SEGMENTS, group=tp)
    torch.manual_seed(0)
    whole = gather_whole(conv)
    expected = DepthwiseConv1d(11, 2)
    assert all(torch.equal(whole[name], x) for name, x in expected.named_parameters())
    weight, bias = conv.weights()
    own = 8 // tp.size
    assert weight.shape == (own + 3, 2)
    (weight.sum() + bias.sum()).backward()
    for gradient in (conv.weight.grad, conv.bias.grad):
        assert (gradient[:own] == 1).all() and (gradient[own:] == tp.size).all()
