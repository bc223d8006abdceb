"""The recurrences, called as the chunked functions are."""

from typing import Any

from torch import Tensor

from megablocks_core.layers.ssm.functions import recurrences


def _called(recurrence: Any) -> Any:
    def call(
        *args: Any,
        chunk_size: int = 64,
        cut: object = None,
        return_final_state: bool = True,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert cut is None
        y, state = recurrence(*args, **options)
        return y, state if return_final_state else None

    return call


causal_conv1d = _called(recurrences.causal_conv1d_recurrence)
ssd_chunk_scan = _called(recurrences.ssd_recurrence)
