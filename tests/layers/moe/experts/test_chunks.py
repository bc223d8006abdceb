"""Padding of an expert's rows writes over nothing that another expert or a caller owns."""

import pytest
import torch

from megablocks_core.layers.moe.experts.chunks import Chunks
from tests.layers.moe.experts.cases import HIDDEN, NUM_EXPERTS, built, everything, routing


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_spans_lie_one_after_another_padded_where_onednn_multiplies(dtype):
    spans = Chunks([3, 0, 70])._spans(dtype)
    assert [span.places for span in spans] == [slice(0, 3), slice(3, 3), slice(3, 73)]
    step = 64 if dtype == torch.bfloat16 else 1
    assert all((span.end - span.start) % step == 0 for span in spans)
    assert all(0 <= span.end - span.stop < step for span in spans)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (63, 64, 65, 0), (0, 0, 0, 130), (200, 1, 0, 1)])
def test_padded_products_are_those_of_experts_alone(counts):
    """In bfloat16, where an expert's padding is the next one's rows."""
    indices = torch.cat([torch.full((n, 1), e) for e, n in enumerate(counts)])
    x = torch.randn(len(indices), HIDDEN, dtype=torch.bfloat16)
    experts = built("grouped", dtype=torch.bfloat16, bias=True)
    routed = routing(indices, dtype=torch.float32)
    together = everything(experts, x, routed)
    assert all(value.isfinite().all() for value in together.values())
    for expert in range(NUM_EXPERTS):
        own = indices[:, 0] == expert
        alone = routed._replace(
            indices=indices[own],
            weights=routed.weights[own],
            scores=routed.scores[own],
            logits=routed.logits[own],
        )
        found = everything(experts, x[own], alone)
        # Rows are computed with other numbers of rows beside them: to a rounding.
        torch.testing.assert_close(together["y"][own], found["y"], atol=2e-2, rtol=2e-2)
