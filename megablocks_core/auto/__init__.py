"""The one place that joins packages for convenience."""

from megablocks_core.auto.adapters import save_adapted_hf as save_adapted_hf
from megablocks_core.auto.checkpoints import checkpoint_to_hf as checkpoint_to_hf
from megablocks_core.auto.decoders import decoder_from_hf as decoder_from_hf
from megablocks_core.auto.quantizing import quantize_to_hf as quantize_to_hf
