"""Causal depthwise convolution along a sequence."""

from megablocks_core.layers.ssm.functions.convolution.causal_conv1d import (
    causal_conv1d as causal_conv1d,
)
