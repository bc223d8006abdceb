"""Mixers: state-space layers as the blocks of a model call them."""

from megablocks_core.layers.ssm.mixers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from megablocks_core.layers.ssm.mixers.gated_norm import GatedRMSNorm as GatedRMSNorm
from megablocks_core.layers.ssm.mixers.mamba1 import Mamba1 as Mamba1
from megablocks_core.layers.ssm.mixers.mamba2 import Mamba2 as Mamba2
from megablocks_core.layers.ssm.mixers.state import MixerState as MixerState
