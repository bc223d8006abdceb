"""The scan of Mamba-2's state-space duality, chunk by chunk."""

from megablocks_core.layers.ssm.functions.ssd.chunk_scan import ssd_chunk_scan as ssd_chunk_scan
