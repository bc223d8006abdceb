"""What a coefficient of other libraries is here.

Here a term is ``coefficient * loss`` of one layer, a mean over tokens, and terms of layers are
added up. Others divide by the number of layers, leave out a division, or count each rank's part.
Their definitions were read in megatron-core 0.19.2, megablocks (main), transformers 5.24,
ai2-olmo-core 3.0.0, torchtitan (main), and in the papers of DeepSeek-V3
(https://arxiv.org/abs/2412.19437, section 2.1.2), Switch Transformers
(https://arxiv.org/abs/2101.03961, section 2.2), ST-MoE (https://arxiv.org/abs/2202.08906, section
3.2) and GShard (https://arxiv.org/abs/2006.16668, algorithm 1).
"""

# What a loss there is of one here: the product of these numbers, each to its power.
BALANCE: dict[str, dict[str, int]] = {
    "load_balance_loss": {},
    "megatron.aux_loss": {},
    "megatron.seq_aux_loss": {},
    "megatron.global_aux_loss": {"data_parallel": -1},
    "megablocks.load_balancing_loss": {"num_layers": -1},
    "transformers.load_balancing_loss": {"top_k": 1, "num_layers": -1},
    "torchtitan.load_balance_loss": {},
    "olmo_core.local_batch": {},
    "olmo_core.instance": {},
    "deepseek_v3": {},
    "switch": {},
    "gshard": {"num_experts": -2},
}
Z: dict[str, dict[str, int]] = {
    "z_loss": {},
    "megatron.z_loss": {},
    "megablocks.router_zloss": {},
    "olmo_core.z_loss": {},
    "st_moe.z_loss": {},
}


def convert_coefficient(
    value: float,
    *,
    source: str,
    to: str | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    num_layers: int | None = None,
    data_parallel: int | None = None,
) -> float:
    """The coefficient under ``to`` that pulls on a router as ``value`` does under ``source``.

    ``docs/moe_losses.md`` says of each convention what its loss is taken over, which is a choice
    of its own, and where the factor is exact.

    Args:
        value: Under ``source``.
        source: A key of ``BALANCE`` or ``Z``, such as "transformers.load_balancing_loss".
        to: Another of the same table; default that of this library.
        num_experts: E.
        top_k: k.
        num_layers: Layers with experts, in the whole model.
        data_parallel: Ranks over which gradients are averaged there.

    Raises:
        ValueError: A name is unknown, the two name different losses, or a number that they need
            is missing or below 1.
    """
    tables = [table for table in (BALANCE, Z) if source in table]
    if not tables:
        raise ValueError(f"source={source!r} must be one of {', '.join([*BALANCE, *Z])}")
    (table,) = tables
    if to is not None and to not in table:
        raise ValueError(f"to={to!r} must be one of {', '.join(table)}, as source={source!r} is")
    numbers = {
        "num_experts": num_experts,
        "top_k": top_k,
        "num_layers": num_layers,
        "data_parallel": data_parallel,
    }
    for name, number in numbers.items():
        power = table[source].get(name, 0) - (0 if to is None else table[to].get(name, 0))
        if power and (number is None or number < 1):
            raise ValueError(
                f"{name}={number} must be at least 1 to convert {source!r} to {to or 'ours'!r}"
            )
        value *= 1 if number is None else float(number) ** power
    return value
