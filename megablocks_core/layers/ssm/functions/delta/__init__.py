"""The gated delta rule, in chunks."""

from megablocks_core.layers.ssm.functions.delta.gated_delta_rule import (
    gated_delta_rule as gated_delta_rule,
)
