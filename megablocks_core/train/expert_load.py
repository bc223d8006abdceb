"""How evenly experts are loaded: shares of each layer's choices, and their picture over steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.train.drawing import column_edges, panels
from megablocks_core.train.folder import Run
from megablocks_core.train.metrics import Mean

_METRIC = "expert_load"

# Of one layer: expert to step to its share, times the number of experts.
Loads = Mapping[int, Mapping[int, float]]


def expert_load(tokens_per_expert: Sequence[Tensor], *, group: Group = LOCAL) -> dict[str, Mean]:
    """Each expert's share of its layer's choices, as metrics ``expert_load/LAYER/EXPERT``.

    A sum is the choices of one expert, a count those of all experts of the layer, so that
    shares of several steps are pooled exactly.

    Sent: one all-reduce, 8 bytes an expert and layer.

    Args:
        tokens_per_expert: How many tokens chose each expert [E], for each layer; ``E`` may differ.
        group: The ranks that hold different tokens.

    Raises:
        ValueError: No layer, or a tensor that has not one dimension.
    """
    check_group(group)
    if not tokens_per_expert or any(counts.dim() != 1 for counts in tokens_per_expert):
        shapes = [tuple(counts.shape) for counts in tokens_per_expert]
        raise ValueError(f"tokens_per_expert of shapes {shapes} must be one [E] for each layer")
    own = torch.cat([counts.detach().double() for counts in tokens_per_expert])
    layers = group.all_reduce(own).split([counts.numel() for counts in tokens_per_expert])
    return {
        f"{_METRIC}/{layer}/{expert}": Mean(chosen, sum(choices))
        for layer, choices in enumerate(each.tolist() for each in layers)
        for expert, chosen in enumerate(choices)
    }


def plot_expert_load(run: Run, target: str | Path | BytesIO) -> bool:
    """Write a map of each layer's experts as a picture; ``False`` if ``run`` tells of none.

    White is an expert with its fair share, red one with more, blue one with less.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    layers = expert_loads(run)
    if not layers:
        return False
    heights = [0.5 + 0.08 * min(len(loads), 32) for loads in layers.values()]
    with panels(target, *heights) as axes:
        for each, (layer, loads) in zip(axes, layers.items(), strict=True):
            steps = sorted({step for row in loads.values() for step in row})
            colors = [[row.get(step, float("nan")) for step in steps] for row in loads.values()]
            image = each.pcolormesh(
                column_edges(steps),
                range(len(loads) + 1),
                colors,
                cmap="RdBu_r",
                vmin=0,
                vmax=2,
                rasterized=True,
            )
            each.set_ylabel(f"layer {layer}")
            each.set_yticks([])
            each.grid(False)
            bar = each.figure.colorbar(image, ax=each, pad=0.01, aspect=12, extend="max")
            bar.outline.set_visible(False)  # type: ignore[operator]
            bar.set_ticks([0, 1, 2])
        axes[0].set_title("choices of each expert, over a fair share", loc="left", fontsize=9)
    return True


def expert_loads(run: Run) -> dict[int, Loads]:
    """Layer to expert to step to the expert's load: 1 is a fair share."""
    shares: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in run.lines:
        for metric, share in line.values.items():
            kind, _, place = metric.partition("/")
            if kind == _METRIC and share.count:
                layer, expert = map(int, place.split("/"))
                shares[layer][expert][line.step] = float(share)
    return {
        layer: {
            expert: {step: share * len(experts) for step, share in row.items()}
            for expert, row in sorted(experts.items())
        }
        for layer, experts in sorted(shares.items())
    }
