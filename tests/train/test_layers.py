"""Maps of layers hold what was watched, a row a layer."""

import math
from io import BytesIO
from pathlib import Path

import pytest

from megablocks_core.train import Mean
from megablocks_core.train.folder import Run
from megablocks_core.train.layers import layer_rows, plot_layers
from megablocks_core.train.lines import Line


def run_of(*values):
    return Run(Path("run"), [Line(10 * n, 0.0, v) for n, v in enumerate(values)], [], {})


def test_norms_of_a_layer_are_combined_and_outputs_are_its_own():
    run = run_of(
        {
            "gradient.norm/model.layers.0.up.weight": Mean(3.0),
            "gradient.norm/model.layers.0.up.bias": Mean(4.0),
            "gradient.norm/model.norm.weight": Mean(2.0),
            "gradient.mean/model.norm.weight": Mean(9.0),
            "activation.rms/model.layers.0": Mean(1.5),
            "activation.rms/model.layers.0.up": Mean(7.0),
            "activation.rms/lm_head": Mean(2.5),
            "loss": Mean(1.0),
        },
        {"activation.rms/lm_head": Mean(3.5)},
    )
    assert layer_rows(run, "gradient.norm") == {"model.layers.0": {0: 5.0}, "model.norm": {0: 2.0}}
    assert layer_rows(run, "activation.rms") == {
        "model.layers.0": {0: 1.5},
        "lm_head": {0: 2.5, 10: 3.5},
    }


@pytest.mark.parametrize("value", [1.0, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("count", [1, 3])
def test_any_value_is_drawn(value, count):
    target = BytesIO()
    run = run_of(
        *[{"gradient.norm/a.0.weight": Mean(value), "activation.rms/a.0": Mean(2.0)}] * count
    )
    assert plot_layers(run, target) and target.getvalue().startswith(b"\x89PNG")


def test_without_a_watch_there_is_no_map():
    target = BytesIO()
    assert not plot_layers(run_of({"loss": Mean(1.0)}), target) and target.getvalue() == b""
