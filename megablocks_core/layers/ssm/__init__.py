"""State-space layers: their functions, and the mixers of hybrid models."""

from megablocks_core.layers.ssm.functions.convolution import causal_conv1d as causal_conv1d
from megablocks_core.layers.ssm.functions.delta import gated_delta_rule as gated_delta_rule
from megablocks_core.layers.ssm.functions.selective import selective_scan as selective_scan
from megablocks_core.layers.ssm.functions.ssd import ssd_chunk_scan as ssd_chunk_scan
from megablocks_core.layers.ssm.mixers import GatedDeltaNet as GatedDeltaNet
from megablocks_core.layers.ssm.mixers import Mamba1 as Mamba1
from megablocks_core.layers.ssm.mixers import Mamba2 as Mamba2
from megablocks_core.layers.ssm.mixers import MixerState as MixerState
