"""The GPU check runs where there is no GPU, says what it skipped, and fails when a check does."""

import json

import pytest
import torch

from benchmarks.gpu import attention, check, checks, kernels, low_precision, sequences
from benchmarks.gpu.checks import Absent, Check, error_of
from megablocks_core.layers.kernels import triton_serves
from megablocks_core.layers.kernels.plain import Plain
from megablocks_core.layers.ssm import causal_conv1d
from megablocks_core.layers.ssm.functions.convolution import taps
from tests.parallel.transformer_engine import fake


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


def test_a_check_of_what_is_not_installed_is_skipped_by_name():
    def absent(device):
        raise Absent("such a package is not installed")

    (outcome,) = check.run([Check("absent", False, absent)])["checks"]
    assert outcome["status"] == "skipped" and outcome["why"] == "such a package is not installed"


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


@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_wrong_attention_is_found(monkeypatch, name):
    monkeypatch.setattr(attention, "REQUESTS", {"rows": attention.REQUESTS["rows"]})
    compute = attention.attention

    def wrong(*tensors, backend):
        return compute(*tensors, backend=backend) * (1 if backend == "naive" else 1.02)

    monkeypatch.setattr(attention, "attention", wrong)
    with pytest.raises(AssertionError, match="rows, torch.float32: .* is above"):
        attention.against_twin(name, torch.device("cpu"))


def test_a_package_that_is_missing_has_no_figures(monkeypatch):
    monkeypatch.setattr(checks, "is_installed", lambda module: False)
    with pytest.raises(Absent, match="flash_attn is not installed"):
        attention.against_twin("flash_attn", torch.device("cpu"))


def test_checks_of_transformer_engine_hold_for_one_in_plain_torch(monkeypatch):
    kept = {name: low_precision.RECIPES[name] for name in ("delayed scaling", "current scaling")}
    monkeypatch.setattr(low_precision, "RECIPES", kept)
    monkeypatch.setattr(low_precision, "_unserved", lambda recipe: "")
    device = torch.device("cpu")
    with fake.installed():
        for work in (low_precision.layers, low_precision.experts, low_precision.recipes):
            assert 0 < max(work(device).values()) < 1e-2
        monkeypatch.setattr(fake.Linear, "forward", lambda layer, x: (x @ layer.weight.t()) * 1.02)
        with pytest.raises(AssertionError, match="is above"):
            low_precision.recipes(device)


def test_plain_turns_the_kernels_off():
    with sequences.plain():
        assert taps.triton_serves() is False
    assert taps.triton_serves is triton_serves


def test_errors_are_relative_norms():
    assert error_of(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
