"""pretrain_mamba.py trains one curve at any layout, on documents that do not see each other."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import pretrain_mamba
from megablocks_core.auto import decoder_from_hf
from megablocks_core.testing import ranks
from tests.examples.tiny import (
    SIZES_OF,
    assert_golden,
    curve,
    journey,
    run_model,
    words,
)

GOLDEN = Path(__file__).with_name("pretrain_mamba.json")
LAYOUTS = ("--tp=2", "--dp=2 --zero=1", "--tp=2 --sequence-parallel", "--dp=2 --zero=3")


def test_golden_curve(tmp_path):
    exact = torch.__version__.partition("+")[0] == json.loads(GOLDEN.read_text())["torch"]
    run = run_model(pretrain_mamba, tmp_path)
    assert_golden(run, tolerance=1e-12 if exact else 1e-9, stored=GOLDEN)
    losses = list(curve(run)["loss"].values())
    assert losses[-1] < 0.75 * losses[0]


@ranks(2, timeout=240)
def test_two_ranks_go_from_one_layout_to_the_next_on_the_golden_curve(tmp_path):
    journey(pretrain_mamba, tmp_path, *LAYOUTS[2:], stored=GOLDEN)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, "--dp=2"])
@ranks(2, timeout=240)
def test_two_ranks_train_the_golden_curve(layout, tmp_path):
    journey(pretrain_mamba, tmp_path, layout, stored=GOLDEN)


def test_micro_batches_do_not_change_the_curve(tmp_path):
    """Other rows are packed together; with a state that ran on, losses would be others."""
    run = run_model(pretrain_mamba, tmp_path, "--micro-batch-size=8")
    assert_golden(run, tolerance=1e-9, stored=GOLDEN)


def test_it_runs_as_a_script_and_transformers_opens_what_it_leaves(tmp_path, printed):
    sizes = SIZES_OF["pretrain_mamba"]
    line = words(tmp_path, "--tp=2", "--dtype=float32", steps=2, sizes=sizes)
    printed("pretrain_mamba.py", *line, ranks=2)
    folder, tokens = tmp_path / "run" / "hf", torch.arange(40)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens).logits
    torch.testing.assert_close(decoder_from_hf(folder)(tokens).logits, theirs, rtol=0, atol=1e-5)


def test_a_head_that_does_not_divide_the_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="--mamba-head-dim 24 must divide 64"):
        run_model(pretrain_mamba, tmp_path, "--mamba-head-dim=24")
