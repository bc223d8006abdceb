"""pretrain_gpt.py trains one curve at any layout, through kills, damage and bad input."""

import json
import random
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from examples import pretrain_gpt
from megablocks_core import ckpt
from megablocks_core.testing import ranks
from megablocks_core.train import read_run
from tests.examples.tiny import EXAMPLES, GOLDEN, assert_golden, curve, run_here, words

SCRIPT = EXAMPLES / "pretrain_gpt.py"
FAULTY = __file__.replace("test_pretrain_gpt", "faulty")
BOUND = 30  # seconds in which a rank must end once a peer is gone


def test_golden_curve(tmp_path):
    """To the last places on the torch that the curve was stored with."""
    stored_with = json.loads(GOLDEN.read_text())["torch"]
    exact = torch.__version__.partition("+")[0] == stored_with
    run = run_here(tmp_path)
    assert_golden(run, tolerance=1e-12 if exact else 1e-9)
    losses = list(curve(run)["loss"].values())
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize(
    "layout",
    [
        ["--dp=2"],
        # The rest also in one run, or on four ranks, below.
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                ["--tp=2", "--sequence-parallel"],
                ["--tp=2"],
                ["--dp=2", "--zero=1"],
                ["--dp=2", "--zero=2"],
                ["--dp=2", "--zero=3"],
            )
        ),
    ],
)
@ranks(2, timeout=240)
def test_two_ranks_train_the_golden_curve(layout, tmp_path):
    _train_on_ranks(layout, tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["--tp=2", "--micro-batch-size=4", "--zero=1"], marks=pytest.mark.slow),
        pytest.param(["--tp=2", "--sequence-parallel"], marks=pytest.mark.slow),
        ["--tp=2", "--sequence-parallel", "--zero=3"],
    ],
)
@ranks(4, timeout=240)
def test_four_ranks_train_the_golden_curve(layout, tmp_path):
    _train_on_ranks(layout, tmp_path)


@ranks(2, timeout=240)
def test_a_run_goes_from_one_layout_to_the_next_on_the_golden_curve(tmp_path):
    modes = ["--zero=2", "--zero=3", "--tp=2", "--zero=1"]
    if dist.get_rank() == 0:
        words(tmp_path)
    dist.barrier()
    for step, mode in zip((5, 10, 15, 20), modes, strict=True):
        run = run_here(tmp_path, mode, f"--stop-after={step}")
    if dist.get_rank() == 0:
        assert_golden(run, tolerance=1e-9)


def _train_on_ranks(layout, folder):
    if dist.get_rank() == 0:
        words(folder)
    dist.barrier()
    run = run_here(folder, *layout)
    if dist.get_rank() == 0:
        assert_golden(run, tolerance=1e-9)


def _resumes_on_the_curve(folder, *, not_before):
    """Go on in this process; a save that was cut short is named and does no harm."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a save that did not finish")
        run = run_here(folder)
    assert_golden(run, tolerance=1e-9)
    assert read_run(run).starts[-1]["step"] >= not_before


def test_a_rank_killed_during_a_save_ends_the_others_and_the_run_goes_on(tmp_path, launch):
    """SIGKILL before the second checkpoint gets its name; then one process goes on."""
    fault = ("kill", "megablocks_core.files.disk:rename", 2, 0)
    killed, other = launch(FAULTY, *fault, SCRIPT, *words(tmp_path), "--tp=2", ranks=2)
    assert killed.wait() == -signal.SIGKILL
    assert other.wait(timeout=BOUND) == 1
    assert (tmp_path / "run" / "checkpoints" / "LATEST").read_text().endswith(" 000004\n")
    _resumes_on_the_curve(tmp_path, not_before=4)


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore:LATEST names")
@pytest.mark.parametrize(
    ("place", "number", "rank"),
    [
        ("megablocks_core.data:IndexedDatasetBuilder.finish", 1, 0),
        ("os:fsync", 6, 0),
        ("os:fsync", 17, 0),
        ("os:fsync", 25, 0),
        ("os:replace", 5, 0),
        ("os:replace", 7, 0),
        ("torch.optim:AdamW.step", 1, 1),
        ("torch.optim:AdamW.step", 13, 0),
        ("megablocks_core.train:RunFolder.write", 10, 1),
        ("megablocks_core.train:RunFolder.write", 10, 0),
    ],
)
def test_a_rank_killed_at_any_call_leaves_a_run_that_goes_on(place, number, rank, tmp_path, launch):
    fault = ("kill", place, number, rank)
    processes = launch(FAULTY, *fault, SCRIPT, *words(tmp_path), "--tp=2", ranks=2)
    assert processes[rank].wait() == -signal.SIGKILL
    assert processes[1 - rank].wait(timeout=BOUND) == 1
    _resumes_on_the_curve(tmp_path, not_before=0)


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_killed_at_a_random_moment_leave_a_run_that_goes_on(seed, tmp_path, launch):
    draw = random.Random(seed)
    layout = draw.choice([["--tp=2"], ["--tp=2", "--sequence-parallel"], ["--tp=1"]])
    processes = launch(SCRIPT, *words(tmp_path, "--save-every=1"), *layout, ranks=2)
    lines = tmp_path / "run" / "metrics.jsonl"
    wanted = draw.randrange(15)
    while not lines.exists() or lines.read_bytes().count(b"\n") < wanted:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.002)
    time.sleep(draw.uniform(0.0, 0.2))
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    _resumes_on_the_curve(tmp_path, not_before=wanted - 1)  # a line comes before its checkpoint


@pytest.mark.filterwarnings("ignore:LATEST names")
@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_a_checkpoint_cut_short_is_passed_over_and_moved_aside(file, tmp_path):
    run = run_here(tmp_path, "--stop-after=8")
    damaged = run / "checkpoints" / "000008" / file
    with open(damaged, "r+b") as opened:
        opened.truncate(damaged.stat().st_size // 2)
    with pytest.warns(UserWarning, match="passing over .*000008"):
        run_here(tmp_path)
    assert_golden(run, tolerance=1e-9)
    ckpt.verify(run / "checkpoints" / "000008")
    (aside,) = (run / "checkpoints").glob(".000008.damaged.*")
    assert (aside / file).exists()
    assert [start["step"] for start in read_run(run).starts] == [0, 4]


def test_without_a_whole_checkpoint_nothing_is_trained_or_overwritten(tmp_path):
    run = run_here(tmp_path, "--stop-after=4")
    (run / "checkpoints" / "000004" / "manifest.json").write_text("{")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ckpt.CheckpointError, match="no whole checkpoint"):
        run_here(tmp_path)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.drill), 1])
def test_one_rank_raising_in_the_middle_ends_the_others(rank, tmp_path, launch):
    fault = ("raise", "torch.optim:AdamW.step", 3, rank)
    processes = launch(FAULTY, *fault, SCRIPT, *words(tmp_path), "--tp=2", ranks=2)
    assert "a fault of this rank alone" in processes[rank].communicate()[1]
    assert "closed by peer" in processes[1 - rank].communicate(timeout=BOUND)[1]
    assert [process.returncode for process in processes] == [1, 1]
    (start,) = read_run(tmp_path / "run").starts
    whose = "rank 1: " if rank else ""
    assert start["error"] == f"{whose}RuntimeError: a fault of this rank alone"


def test_a_rank_that_never_answers_ends_the_others_after_the_timeout(tmp_path, launch):
    fault = ("stop", "torch.optim:AdamW.step", 3, 1)
    line = [*words(tmp_path), "--tp=2", "--timeout=4"]
    waiting, stopped = launch(FAULTY, *fault, SCRIPT, *line, ranks=2)
    assert "Timed out waiting 4000ms" in waiting.communicate(timeout=BOUND)[1]
    assert waiting.returncode == 1
    assert stopped.poll() is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "tables.txt"),
        ("", "--data .*tables.txt.* must hold text"),
        ("a few words", "sequence_length=32"),
        ('{"test": 1}', "tables.txt.*must be"),
    ],
)
def test_text_that_cannot_serve_is_named_and_does_not_stay(content, said, tmp_path):
    text = tmp_path / ("tables.txt.jsonl" if content and "{" in content else "tables.txt")
    if content is not None:
        text.write_text(content)
    with pytest.raises((ValueError, OSError), match=said):
        run_here(tmp_path, f"--data={text}")
    run_here(tmp_path, steps=1)


def test_one_short_text_file_is_enough(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("It was a bright cold day in April. " * 40)
    run = run_here(tmp_path, f"--data={text}", steps=2)
    assert curve(run)["validation_loss"].keys() == {1}


@ranks(2, timeout=240)
def test_sizes_that_do_not_fit_are_named_on_every_rank(tmp_path):
    if dist.get_rank() == 0:
        words(tmp_path)
    dist.barrier()
    for wrong, said in {
        "--tp=3": "tp=3",
        "--zero=2 --optimizer=muon": "--zero 2 must be 0, 1 or 3",
        "--tp=2 --dp=2": "dp=2",
        "--kv-heads=3": "num_kv_heads=3 must divide",
        "--tp=2 --heads=3 --kv-heads=3 --hidden-size=36": "heads",
        "--data=/nowhere/at/all": "/nowhere/at/all",
    }.items():
        with pytest.raises((ValueError, OSError), match=said):
            run_here(tmp_path, *wrong.split())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_more_than_one_tensor_parallel_rank_needs_a_launcher(tmp_path):
    with pytest.raises(ValueError, match="tp=2"):
        run_here(tmp_path, "--tp=2")


@pytest.mark.parametrize(
    "optimizer",
    [
        "muon --zero=1",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("sgd", "muon", "muon --tp=2")),
    ],
)
def test_other_optimizers_train_one_curve_on_any_ranks(optimizer, tmp_path, launch):
    """Two data-parallel ranks, then one process from their checkpoint, against one all along.

    Three sequences do not divide over two ranks: one of them runs a stand-in that counts nothing.
    """
    name, *layout = optimizer.split()
    more = [f"--optimizer={name}", "--learning-rate=0.01", "--evaluate-every=100"]
    more += ["--batch-size=3", "--micro-batch-size=1"]
    (tmp_path / "two").mkdir()
    line = words(tmp_path / "two", *more, *layout, "--stop-after=3", steps=6)
    for process in launch(SCRIPT, *line, ranks=2):
        assert process.wait() == 0
    two = curve(run_here(tmp_path / "two", *more, steps=6))["loss"]
    one = curve(run_here(tmp_path, *more, steps=6))["loss"]
    assert two == pytest.approx(one, rel=0, abs=1e-9)
    assert one[5] < one[0]


def test_a_run_goes_on_only_with_its_own_data_and_sizes(tmp_path):
    run_here(tmp_path, "--stop-after=4")
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    for wrong, said in {
        "--seed=2": "--seed 2 must be 1",
        "--batch-size=4": "--batch-size 4 must be 8",
        "--sequence-length=16": "--sequence-length 16 must be 32",
        "--data=/elsewhere": r"--data .*/elsewhere.* must be .*tables",
        "--hidden-size=64": r"has shape .*; and \d+ more",
        "--steps=3": "--steps 3 must be at least 4",
    }.items():
        with pytest.raises(ValueError, match=said):
            run_here(tmp_path, wrong)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before


def test_a_finished_run_is_left_as_it_is(tmp_path, launch):
    line = [SCRIPT, *words(tmp_path, steps=2)]
    run_here(tmp_path, steps=2)
    for more, code, said in (
        ([], 0, ""),
        (["--steps=4"], 1, "holds a model of fewer steps"),
    ):
        (process,) = launch(*line, *more)
        assert said in process.communicate(timeout=100)[1]
        assert process.returncode == code
    assert len(read_run(tmp_path / "run").starts) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_a_line_and_sigterm_leaves_a_checkpoint(number, tmp_path, launch):
    (process,) = launch(SCRIPT, *words(tmp_path, "--save-every=1000", steps=1000))
    lines = tmp_path / "run" / "metrics.jsonl"
    while not lines.exists() or not lines.read_bytes():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    errors = process.communicate(timeout=BOUND)[1]
    assert "Traceback" not in errors
    saved = list((tmp_path / "run" / "checkpoints").glob("0*"))
    assert (process.returncode, len(saved)) == ((0, 1) if number == signal.SIGTERM else (1, 0))


def test_losses_that_are_not_finite_end_it(tmp_path):
    with pytest.raises(FloatingPointError, match="grad_norm=nan on rank 0"):
        run_here(tmp_path, "--learning-rate=1e200")


@pytest.mark.parametrize(
    "wrong", ["--heads=0", "--save-every=0", "--learning-rate=nan", "--tp=x", "--balance=nan"]
)
def test_values_that_make_no_sense_are_named(wrong, capsys):
    with pytest.raises(SystemExit):
        pretrain_gpt.parse([wrong])
    assert f"argument {wrong.split('=')[0]}" in capsys.readouterr().err
