"""Sum gradients over ranks that ran the same weights on different tokens.

The plainest form of data parallelism: call it once between backward and the optimizer.
"""

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, check_group, marks
from megablocks_core.groups.gradient_shards import ShardedGradient
from megablocks_core.parallel.checks import REDUCTIONS, check_choice, check_module
from megablocks_core.parallel.wrapping.refusals import check_experts


@torch.no_grad()
def reduce_gradients(
    module: nn.Module, *, group: Group, expert_group: Group = LOCAL, reduction: str = "mean"
) -> None:
    """Sum or average the gradients of ``module`` over the ranks, in place.

    Sends one all-reduce for each dtype of the parameters, over ``group``, and one for each
    over ``expert_group`` for parameters that are marked as experts. 16-bit gradients are
    summed and divided in float32. Temporary memory is twice the gradients of one dtype.

    A parameter with a gradient on any rank has one on every rank afterwards; one with none
    anywhere keeps ``None``. Frozen parameters are left out.

    Args:
        module: The same on every rank of ``group``, apart from experts.
        group: The ranks that saw different tokens: data and context parallel.
        expert_group: The ranks that hold the same experts.
        reduction: "sum", or "mean": the sum divided by ``group.size``, experts too, because
            an expert's gradient already comes from all ranks' tokens.

    Raises:
        ValueError: An argument is none of these, a gradient is sparse, or copies of an expert lie
            outside of ``expert_group``.
    """
    check_group(group)
    check_group(expert_group, "expert_group")
    check_choice("reduction", reduction, REDUCTIONS)
    check_module(module)
    check_experts(marks(module), group=group, expert_group=expert_group)
    divisor = group.size if reduction == "mean" else 1
    buckets: dict[tuple[bool, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for name, parameter, specs in marks(module):
        reduced = isinstance(parameter.grad, ShardedGradient)  # by a sharded optimizer
        if parameter.requires_grad and not reduced:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(f"the gradient of {name!r} must not be sparse")
            alike = (specs.expert, parameter.dtype, parameter.device)
            buckets.setdefault(alike, []).append(parameter)
    for (expert, *_), parameters in buckets.items():
        _reduce(parameters, expert_group if expert else group, divisor)


def _reduce(parameters: list[nn.Parameter], group: Group, divisor: int) -> None:
    """Reduce gradients of one dtype; the message ends with a flag for each: is there any?"""
    if group.size == 1 and divisor == 1:
        return
    sizes = [parameter.numel() for parameter in parameters] + [len(parameters)]
    total = group.all_reduce(_flat(parameters, sum(sizes))).div_(divisor)
    *sums, flags = total.split(sizes)
    for parameter, gradient, flag in zip(parameters, sums, flags.tolist(), strict=True):
        if not flag:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradient.view(parameter.shape))


def _flat(parameters: list[nn.Parameter], length: int) -> Tensor:
    """The gradients in one buffer, zeros where there is none, then the flags."""
    first = parameters[0]
    wide = torch.float32 if first.dtype.itemsize < 4 else first.dtype
    flat = torch.empty(length, dtype=wide, device=first.device)
    start = 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()].view(parameter.shape)
        if parameter.grad is None:
            part.zero_()
        else:
            part.copy_(parameter.grad)
        start += parameter.numel()
    flags = [float(parameter.grad is not None) for parameter in parameters]
    flat[start:] = torch.tensor(flags)
    return flat
