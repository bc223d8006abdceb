"""What a mixer keeps of the tokens that it has seen."""

from typing import NamedTuple

from torch import Tensor


class MixerState(NamedTuple):
    """State of every row or document; nothing changes it in place.

    Under tensor parallelism it is this rank's share. Its size does not depend on how many tokens
    there were.

    Attributes:
        conv: Last inputs of the convolution, oldest first [B W-1 C], in their own dtype.
        ssm: State of the scan [B ...], float32 at least.
    """

    conv: Tensor
    ssm: Tensor
