"""Layers of a decoder-only language model, each usable alone, and the model they make."""

from megablocks_core.layers.attention import Attention as Attention
from megablocks_core.layers.builders import gpt as gpt
from megablocks_core.layers.builders import hybrid as hybrid
from megablocks_core.layers.builders import mamba as mamba
from megablocks_core.layers.decoder import Decoder as Decoder
from megablocks_core.layers.decoder import DecoderOutput as DecoderOutput
from megablocks_core.layers.decoder import HiddenStates as HiddenStates
from megablocks_core.layers.decoder_layer import DecoderLayer as DecoderLayer
from megablocks_core.layers.mixer_layer import MixerLayer as MixerLayer
from megablocks_core.layers.mlp import MLP as MLP
from megablocks_core.layers.mlp import GatedMLP as GatedMLP
from megablocks_core.layers.norm import LayerNorm as LayerNorm
from megablocks_core.layers.norm import RMSNorm as RMSNorm
from megablocks_core.layers.norm import on_part as on_part
from megablocks_core.layers.rotary import RotaryEmbedding as RotaryEmbedding
from megablocks_core.layers.rotary import rotate as rotate
from megablocks_core.layers.spec import DecoderSpec as DecoderSpec
from megablocks_core.layers.spec import DeltaSpec as DeltaSpec
from megablocks_core.layers.spec import Mamba1Spec as Mamba1Spec
from megablocks_core.layers.spec import Mamba2Spec as Mamba2Spec
from megablocks_core.layers.spec import MoESpec as MoESpec
