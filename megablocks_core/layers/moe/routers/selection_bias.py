"""Balance without a loss: a bias on the choice that follows the load.

Wang et al., https://arxiv.org/abs/2408.15664, algorithm 1; DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.1.2.

Dimensions: E experts.
"""

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group


@torch.no_grad()
def update_selection_bias(
    bias_E: Tensor,
    tokens_per_expert: Tensor,
    *,
    rate: float,
    centred: bool = False,
    group: Group = LOCAL,
) -> None:
    """Add ``rate * sign(mean - count)`` to each expert's bias, in place; call it once a step.

    A token's weights do not see the bias: it moves choices alone. Without centring the mean of
    the bias drifts, which changes no choice.

    Sent: one all-reduce of the counts, 8 bytes an expert, which are left as they are.

    Args:
        bias_E: A router's ``e_score_correction_bias`` [E].
        tokens_per_expert: Choices of all micro-batches of the step [E]: ``(a + b +
            ...).tokens_per_expert`` of routings.
        rate: How far a bias moves.
        centred: Take the mean of the step away, so that the bias keeps its mean.
        group: The ranks that hold different tokens.

    Raises:
        ValueError: The two have not one shape [E], or ``rate`` is negative.
    """
    check_group(group)
    if bias_E.dim() != 1 or bias_E.shape != tokens_per_expert.shape:
        raise ValueError(
            f"tokens_per_expert of shape {list(tokens_per_expert.shape)} must be of the bias's, "
            f"{list(bias_E.shape)}"
        )
    if not rate >= 0:
        raise ValueError(f"rate={rate} must be 0 or more")
    counts = group.all_reduce(tokens_per_expert.double())
    step = (counts.mean() - counts).sign() * rate
    bias_E.add_(step - step.mean() if centred else step)
