"""Losses of a routing: returned, never kept."""

from megablocks_core.layers.moe.losses.balance import load_balance_loss as load_balance_loss
from megablocks_core.layers.moe.losses.balance import z_loss as z_loss
