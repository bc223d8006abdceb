"""pretrain_hybrid.py trains one curve at any layout, on documents that do not see each other."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import pretrain_hybrid
from megablocks_core.auto import decoder_from_hf
from megablocks_core.layers import Decoder
from megablocks_core.testing import ranks
from megablocks_core.train import read_run
from megablocks_core.train.expert_load import expert_loads
from tests.examples.tiny import (
    SIZES_OF,
    assert_golden,
    curve,
    journey,
    run_model,
    words,
)

GOLDEN = Path(__file__).with_name("pretrain_hybrid.json")
LAYOUTS = (
    "--tp=2 --ep=2",
    "--dp=2 --zero=1 --ep=2",
    "--tp=2 --sequence-parallel --ep=2",
    "--zero=3",
)


def test_golden_curve(tmp_path):
    exact = torch.__version__.partition("+")[0] == json.loads(GOLDEN.read_text())["torch"]
    run = run_model(pretrain_hybrid, tmp_path)
    assert_golden(run, tolerance=1e-12 if exact else 1e-9, stored=GOLDEN)
    losses = list(curve(run)["loss"].values())
    assert losses[-1] < 0.75 * losses[0]


@ranks(2, timeout=240)
def test_two_ranks_go_from_one_layout_to_the_next_on_the_golden_curve(tmp_path):
    journey(pretrain_hybrid, tmp_path, *LAYOUTS[2:], stored=GOLDEN)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, "--tp=2 --etp=2", "--tp=2", "--dp=2"])
@ranks(2, timeout=240)
def test_two_ranks_train_the_golden_curve(layout, tmp_path):
    journey(pretrain_hybrid, tmp_path, layout, stored=GOLDEN)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp=2 --ep=4", "--tp=2 --sequence-parallel --ep=2 --etp=2"])
@ranks(4, timeout=240)
def test_four_ranks_train_the_golden_curve(layout, tmp_path):
    journey(pretrain_hybrid, tmp_path, layout, stored=GOLDEN)


def test_micro_batches_do_not_change_the_curve(tmp_path):
    """Other rows are packed together; what ran on from one to the next would change losses."""
    run = run_model(pretrain_hybrid, tmp_path, "--micro-batch-size=8")
    assert_golden(run, tolerance=1e-9, stored=GOLDEN)


def test_the_bias_evens_loads_out(tmp_path):
    heaviest = {}
    for rate in (0, 0.001):
        (tmp_path / str(rate)).mkdir()
        run = run_model(pretrain_hybrid, tmp_path / str(rate), f"--bias-rate={rate}")
        (layer,) = expert_loads(read_run(run)).values()
        heaviest[rate] = max(row[19] for row in layer.values())
    assert heaviest[0.001] < heaviest[0]


def test_without_experts_their_blocks_are_dense(tmp_path):
    options = pretrain_hybrid.parse([f"--out={tmp_path}", "--experts=0", "--pattern=ME*"])
    spec = pretrain_hybrid.make_spec(options)
    assert (spec.pattern, spec.moe, spec.ffn_size) == ("M-*", None, 4 * spec.hidden_size)


def test_work_is_that_of_weights_states_and_pairs():
    """Two for each weight of a token; with as many experts as choices all of them are active."""
    spec = pretrain_hybrid.make_spec(pretrain_hybrid.parse(["--experts=2", "--top-k=2"]))
    own = Decoder(spec)
    matrices = [part.numel() for part in own.parameters() if part.dim() > 1]
    states = spec.pattern.count("M") * spec.mamba.state_size * 2 * spec.hidden_size
    pairs = spec.pattern.count("*") * spec.hidden_size
    found = sum(part.flops([1]) for part in pretrain_hybrid.make_work(spec))
    embedded = own.model.embed_tokens.weight.numel()
    assert found == 2 * (sum(matrices) - embedded) + 4 * states + 4 * pairs


def test_it_runs_as_a_script_and_transformers_opens_what_it_leaves(tmp_path, printed):
    sizes = SIZES_OF["pretrain_hybrid"]
    line = words(tmp_path, "--tp=2", "--ep=2", "--dtype=float32", steps=2, sizes=sizes)
    printed("pretrain_hybrid.py", *line, ranks=2)
    folder, tokens = tmp_path / "run" / "hf", torch.arange(40)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens).logits
    torch.testing.assert_close(decoder_from_hf(folder)(tokens).logits, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--pattern=MX", "pattern='MX' has .'X'."),
        ("--pattern=MG", "delta=None must be there"),
        ("--mamba-head-dim=24", "--mamba-head-dim 24 must divide 64"),
    ],
)
def test_models_that_cannot_be_are_named(wrong, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        run_model(pretrain_hybrid, tmp_path, wrong)
