"""A folder's model is calibrated on a dataset, by the command as by hand."""

import pytest
import torch

from megablocks_core.auto import decoder_from_hf
from megablocks_core.auto.calibrating import calibrate_folder
from megablocks_core.auto.command import main
from megablocks_core.data import GPTDataset, IndexedDataset, IndexedDatasetBuilder
from megablocks_core.export import Calibration, calibrate
from megablocks_core.export.quantising import Fp8, Int8
from tests.export.tiny_models import pretrained


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, and a dataset of its tokens."""
    folder = tmp_path_factory.mktemp("calibrating")
    pretrained(folder / "model", "qwen3")
    _write(folder / "data", torch.arange(50) % 10)
    return folder


def _write(prefix, tokens):
    builder = IndexedDatasetBuilder(prefix, dtype="uint16")
    builder.add_document(tokens.numpy().astype("uint16"), [len(tokens)])
    builder.finish()


def test_the_command_writes_what_calibrate_finds(place, tmp_path, capsys):
    out = tmp_path / "calibration.json"
    options = ["--data", str(place / "data"), "--out", str(out), "--length", "6"]
    assert main(["calibrate", str(place / "model"), *options, "--sequences", "3"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    samples = GPTDataset(IndexedDataset(place / "data"), 6, seed=0)
    batches = [torch.as_tensor(samples[number]["tokens"])[None] for number in range(3)]
    expected = calibrate(decoder_from_hf(place / "model"), batches, recipe=Fp8())
    found = Calibration.load(out)
    assert found == expected
    assert found.inputs and found.keys and found.values
    more = ["--recipe", "int8", "--sequences", "1000"]
    assert main(["calibrate", str(place / "model"), *options, *more]) == 0
    batches = [torch.as_tensor(sample["tokens"])[None] for sample in samples]
    expected = calibrate(decoder_from_hf(place / "model"), batches, recipe=Int8())
    assert Calibration.load(out) == expected and not expected.keys


def test_samples_are_as_long_as_the_model_takes(place):
    found, longest = (
        calibrate_folder(place / "model", place / "data", recipe=Fp8(), **words)
        for words in ({}, {"sequence_length": 32})
    )
    assert found == longest


def test_what_cannot_be_is_refused_by_name(place, tmp_path, capsys):
    for words, rule in (
        ({"num_sequences": 0}, "num_sequences=0 must be a whole number above 0"),
        ({"sequence_length": -1}, "sequence_length=-1 must be a whole number above 0"),
        ({"sequence_length": 33}, "must be at most max_position_embeddings=32"),
    ):
        with pytest.raises(ValueError, match=rule):
            calibrate_folder(place / "model", place / "data", recipe=Fp8(), **words)
    _write(tmp_path / "other", torch.arange(20))
    out = tmp_path / "out.json"
    options = ["--data", str(tmp_path / "other"), "--length", "8", "--out", str(out)]
    assert main(["calibrate", str(place / "model"), *options]) == 2
    assert "must be below the model's vocab_size=10" in capsys.readouterr().err
    assert not out.exists()
