"""Experts: what is computed with each token, in several forms."""

from megablocks_core.layers.moe.experts.experts import GroupedExperts as GroupedExperts
