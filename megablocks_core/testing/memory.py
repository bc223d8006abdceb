"""Memory that nobody wrote shows up: new tensors start as NaN (integers as their maximum)."""

import torch


def fill_empty_with_nan() -> None:
    """Make ``torch.empty`` and all it serves, inside torch too, return NaN from now on.

    This is torch's own deterministic mode, which does so unless
    ``torch.utils.deterministic.fill_uninitialized_memory`` was turned off; operations without
    a deterministic form only warn.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
