"""Which parts of a mixer have initial values of their own, whatever a model draws for matrices."""

from torch import nn

from megablocks_core.layers.ssm.mixers.depthwise import DepthwiseConv1d
from megablocks_core.layers.ssm.mixers.float32 import Float32Parameters


def draws_itself(part: nn.Module) -> bool:
    """Whether ``part`` makes rates, step sizes or a convolution, not a projection."""
    return isinstance(part, Float32Parameters | DepthwiseConv1d)
