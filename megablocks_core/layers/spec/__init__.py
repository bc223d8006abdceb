"""What a decoder is: sizes and features, and its Hugging Face config."""

from megablocks_core.layers.spec.decoder_spec import DecoderSpec as DecoderSpec
from megablocks_core.layers.spec.moe_spec import MoESpec as MoESpec
