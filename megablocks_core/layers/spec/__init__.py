"""What a decoder is: sizes and features, and its Hugging Face config."""

from megablocks_core.layers.spec.decoder_spec import DecoderSpec as DecoderSpec
from megablocks_core.layers.spec.mixer_specs import DeltaSpec as DeltaSpec
from megablocks_core.layers.spec.mixer_specs import Mamba1Spec as Mamba1Spec
from megablocks_core.layers.spec.mixer_specs import Mamba2Spec as Mamba2Spec
from megablocks_core.layers.spec.moe_spec import MoESpec as MoESpec
