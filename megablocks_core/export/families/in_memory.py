"""Experts as transformers 5 holds them: stacked, gate and up in one, where files have one each."""

from __future__ import annotations

from collections.abc import Mapping

from megablocks_core.export.families.weights import Weight, split, unstack

PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def fused_experts(
    block: str = "model.layers.{}.mlp",
    *,
    on_disk: str | None = None,
    kind: str = "E",
    names: Mapping[str, str] = PROJECTIONS,
    width: str = "hidden",
) -> tuple[Weight, ...]:
    """Rows for ``Family.in_memory``.

    Args:
        block: What has the experts, in memory.
        on_disk: What it is called in files; default the same.
        kind: Letter of the blocks that have experts.
        names: On-disk names of gate, up and down. Without a gate, up is a stack of its own.
        width: Size of what an expert takes and gives.
    """
    theirs = {
        part: f"{on_disk or block}.experts.{{}}.{name}.weight" for part, name in names.items()
    }
    if "gate" in theirs:
        first = Weight(
            f"{block}.experts.gate_up_proj",
            f"experts expert_gate_up {width}",
            ours=(theirs["gate"], theirs["up"]),
            kind=kind,
            steps=(split("expert expert", dim=1), unstack()),
        )
    else:
        first = Weight(
            f"{block}.experts.up_proj",
            f"experts expert {width}",
            ours=theirs["up"],
            kind=kind,
            steps=(unstack(),),
        )
    last = Weight(
        f"{block}.experts.down_proj",
        f"experts {width} expert",
        ours=theirs["down"],
        kind=kind,
        steps=(unstack(),),
    )
    return (first, last)
