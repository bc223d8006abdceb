"""Functions of state-space layers: chunked ones, single steps, and their plain twins."""

from megablocks_core.layers.ssm.functions.ssd import ssd_chunk_scan as ssd_chunk_scan
