"""finetune_lora.py trains one curve at any layout, and what it saves is what it trained."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from examples.finetune_lora import main, parse, train, write
from megablocks_core import export
from megablocks_core.auto import decoder_from_hf
from megablocks_core.groups import LOCAL
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import load_lora
from megablocks_core.testing import ranks
from megablocks_core.train import read_run
from tests.examples.tiny import write_text

GOLDEN = Path(__file__).with_name("finetune_lora.json")
LINE = ["--sequence-length=32", "--batch-size=4", "--micro-batch-size=2", "--learning-rate=0.01"]


def _model(folder):
    """A model in Hugging Face's format with a vocabulary of bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_size": 64, "num_layers": 2, "head_dim": 8}
    spec = DecoderSpec(vocab_size=257, num_heads=4, num_kv_heads=2, tied=True, **sizes)
    export.save_hf(Decoder(spec, dtype=torch.float64), folder / "model")
    return folder / "model"


def _words(folder, *more, steps=20):
    options = ["--data", str(folder / "tables.jsonl"), "--out", str(folder / "run")]
    return [str(folder / "model"), *options, *LINE, f"--steps={steps}", *more]


def _curve(folder):
    lines = read_run(folder / "run").lines
    return {name: [line.values[name] for line in lines] for name in ("loss", "grad_norm")}


def _assert_golden(folder, *, tolerance):
    golden, found = json.loads(GOLDEN.read_text()), _curve(folder)
    for name, values in found.items():
        assert values == pytest.approx(golden[name], rel=0, abs=tolerance)


def test_golden_curve(tmp_path):
    """To the last places on the torch that the curve was stored with."""
    write_text(tmp_path)
    _model(tmp_path)
    train(parse(_words(tmp_path)))
    stored_with = json.loads(GOLDEN.read_text())["torch"]
    exact = torch.__version__.partition("+")[0] == stored_with
    _assert_golden(tmp_path, tolerance=1e-12 if exact else 1e-9)
    losses = _curve(tmp_path)["loss"]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("layout", ["--tp=2", "--tp=1"])
@ranks(2, timeout=240)
def test_two_ranks_train_the_golden_curve(layout, tmp_path):
    if dist.get_rank() == 0:
        write_text(tmp_path)
        _model(tmp_path)
    dist.barrier()
    train(parse(_words(tmp_path, layout)))
    if dist.get_rank() == 0:
        _assert_golden(tmp_path, tolerance=1e-9)


def test_the_merged_model_is_the_base_with_its_adapters(tmp_path):
    write_text(tmp_path)
    base = _model(tmp_path)
    write(train(parse(_words(tmp_path, steps=3))), tmp_path / "run", group=LOCAL)
    adapted = decoder_from_hf(base)
    assert len(load_lora(adapted, tmp_path / "run" / "adapter")) == 14
    tokens = torch.arange(30).view(1, -1)
    want = adapted(tokens).logits
    assert (want - decoder_from_hf(base)(tokens).logits).abs().max() > 1e-3
    assert_close(decoder_from_hf(tmp_path / "run" / "hf")(tokens).logits, want)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert_close(model(input_ids=tokens).logits, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--data=/nowhere/at/all", "/nowhere/at/all"),
        ("--layers=*.nothing", "nothing"),
        ("--rank=1000", "rank=1000"),
        ("--batch-size=0", "num_samples=0"),
    ],
)
def test_wrong_options_end_in_one_line(wrong, said, tmp_path, monkeypatch):
    write_text(tmp_path)
    _model(tmp_path)
    monkeypatch.setattr("sys.argv", ["finetune_lora.py", *_words(tmp_path, wrong)])
    with pytest.raises(SystemExit, match=said) as ended:
        main()
    assert "\n" not in str(ended.value.code)


def test_a_folder_of_a_finished_run_is_refused_before_training(tmp_path, monkeypatch):
    write_text(tmp_path)
    _model(tmp_path)
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["finetune_lora.py", *_words(tmp_path)])
    with pytest.raises(SystemExit, match="run must be a new folder: .*adapter is there already"):
        main()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["adapter"]


def test_it_runs_as_a_script(tmp_path, printed):
    write_text(tmp_path)
    _model(tmp_path)
    first, second = printed("finetune_lora.py", *_words(tmp_path, "--tp=2", steps=2), ranks=2)
    assert [line.split()[:3] for line in first.splitlines()] == [
        ["step", "0", "loss"],
        ["step", "1", "loss"],
    ]
    assert not second
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"adapter", "hf"}


def write_golden(folder):
    """Store the curve anew: when the example trains something else, and only then."""
    write_text(folder)
    _model(folder)
    train(parse(_words(folder)))
    found = {"torch": torch.__version__.partition("+")[0], **_curve(folder)}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
