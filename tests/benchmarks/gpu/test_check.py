"""The GPU check runs where there is no GPU, says what it skipped, and fails when a check does."""

import json

import pytest
import torch

from benchmarks.gpu import check, kernels, sequences
from benchmarks.gpu.checks import Check, error_of
from megablocks_core.layers.kernels import triton_serves
from megablocks_core.layers.kernels.plain import Plain
from megablocks_core.layers.ssm import causal_conv1d
from megablocks_core.layers.ssm.functions.convolution import taps


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without CUDA")
def test_on_a_cpu_the_rest_runs_and_what_needs_cuda_is_named(tmp_path):
    assert check.main(["--out", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    statuses = {each["name"]: each["status"] for each in report["checks"]}
    expected = {each.name: "skipped" if each.needs_cuda else "passed" for each in check.CHECKS}
    assert statuses == expected
    assert set(expected.values()) == {"skipped", "passed"}
    assert report["machine"]["device"] == "cpu" and report["seconds"] < 240


def test_a_failed_check_is_an_outcome_and_the_others_run(monkeypatch, capsys):
    def fail(device):
        raise AssertionError("seven is above six")

    monkeypatch.setattr(
        check, "CHECKS", [Check("one", False, fail), Check("two", False, lambda device: {"a": 1})]
    )
    assert check.main([]) == 1
    first, second = json.loads(capsys.readouterr().out)["checks"]
    assert first["status"] == "failed" and "seven is above six" in first["error"]
    assert second["status"] == "passed" and second["figures"] == {"a": 1}
    assert check.main(["two"]) == 0


def test_checks_that_come_too_late_are_skipped():
    (outcome,) = check.run([Check("late", False, lambda device: {})], seconds=-1)["checks"]
    assert outcome == {"name": "late", "status": "skipped", "why": "the time was up"}


@pytest.mark.parametrize(
    "method", ["take", "total", "product", "input_gradient", "weight_gradient"]
)
def test_a_wrong_kernel_is_found(monkeypatch, method):
    class Wrong(Plain):
        pass

    def wrong(self, *arguments, **named):
        result = getattr(Plain(), method)(*arguments, **named)
        result.view(-1)[-7:] *= 1.5
        return result

    setattr(Wrong, method, wrong)
    from megablocks_core.layers.kernels import products, rows

    for module in (products, rows):
        monkeypatch.setattr(module, "kernels_for", lambda x: Wrong())
    work = kernels.moved if method in ("take", "total") else kernels.multiplied
    with pytest.raises(AssertionError, match="is above"):
        kernels.against_twins(work, torch.device("cpu"))


@pytest.mark.parametrize("name", sequences.PARTS)
def test_checks_of_sequences_hold_for_plain_torch(monkeypatch, name):
    monkeypatch.setattr(sequences, "SHAPES", [sequences.Shape(1, 20, 2, 1, 4, 3, (0, 5, 5, 13))])
    figures = sequences.against_float64(sequences.PARTS[name], torch.device("cpu"))
    assert len(figures) == len(sequences.LIMITS) and max(figures.values()) > 0


def test_a_wrong_kernel_of_sequences_is_found(monkeypatch):
    def wrong(x, *others, **options):
        y, final = causal_conv1d(x, *others, **options)
        return (y if x.dtype == torch.float64 else y * 1.02), final

    monkeypatch.setattr(sequences, "causal_conv1d", wrong)
    with pytest.raises(AssertionError, match="is above"):
        sequences.against_float64(sequences.PARTS["the convolution"], torch.device("cpu"))


def test_plain_turns_the_kernels_off():
    with sequences.plain():
        assert taps.triton_serves() is False
    assert taps.triton_serves is triton_serves


def test_errors_are_relative_norms():
    assert error_of(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
