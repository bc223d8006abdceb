"""The selective scan of Mamba, in chunks."""

from megablocks_core.layers.ssm.functions.selective.selective_scan import (
    selective_scan as selective_scan,
)
