"""Losses of a routing: returned, never kept."""

from megablocks_core.layers.moe.losses.attach import attach_loss as attach_loss
from megablocks_core.layers.moe.losses.balance import load_balance_loss as load_balance_loss
from megablocks_core.layers.moe.losses.balance import z_loss as z_loss
from megablocks_core.layers.moe.losses.conventions import convert_coefficient as convert_coefficient
from megablocks_core.layers.moe.losses.total import total_loss as total_loss
