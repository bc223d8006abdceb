"""Functions of state-space layers: chunked ones, single steps, and their plain twins."""

from megablocks_core.layers.ssm.functions.delta import gated_delta_rule as gated_delta_rule
from megablocks_core.layers.ssm.functions.selective import selective_scan as selective_scan
from megablocks_core.layers.ssm.functions.ssd import ssd_chunk_scan as ssd_chunk_scan
