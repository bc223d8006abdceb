"""A run of pretrain_gpt.py that takes two seconds, and its curve."""

import json
from pathlib import Path

import torch

from examples.pretrain_gpt import parse, train
from megablocks_core.train import read_run

EXAMPLES = Path(__file__).parents[2] / "examples"
GOLDEN = Path(__file__).with_name("pretrain_gpt.json")
GOLDEN_EXPERTS = Path(__file__).with_name("pretrain_gpt_experts.json")
EXPERTS = ["--experts=4", "--balance=0.1"]
COLUMNS = ("loss", "grad_norm", "validation_loss")
SIZES = [
    "--dtype=float64",
    "--hidden-size=32",
    "--layers=2",
    "--heads=4",
    "--kv-heads=2",
    "--sequence-length=32",
    "--batch-size=8",
    "--micro-batch-size=2",
    "--evaluate-every=5",
    "--evaluate-steps=2",
    "--save-every=4",
]


def write_text(folder):
    """Text that is the same everywhere: multiplication tables, a document a line."""
    path = Path(folder) / "tables.jsonl"
    tables = ("\n".join(f"{k} times {n} is {k * n}" for k in range(20)) for n in range(40))
    path.write_text("".join(json.dumps({"text": table}) + "\n" for table in tables))
    return path


def words(folder, *more, steps=20):
    """The command line of a run in ``folder``, on the text there; the last word wins."""
    folder = Path(folder)
    text = folder / "tables.jsonl"
    if not text.exists():
        write_text(folder)
    return ["--out", str(folder / "run"), "--data", str(text), *SIZES, f"--steps={steps}", *more]


def run_here(folder, *more, **options):
    """Train in this process, or on this test's ranks; the folder of the run."""
    train(parse(words(folder, *more, **options)))
    return Path(folder) / "run"


def curve(run):
    """The columns of a run by name, each by step."""
    lines = read_run(run).lines
    return {
        name: {line.step: float(line.values[name]) for line in lines if name in line.values}
        for name in COLUMNS
    }


def assert_golden(run, *, tolerance, stored=GOLDEN):
    """The run, whatever it went through, has every step of the stored curve."""
    golden, found = json.loads(stored.read_text()), curve(run)
    for name in COLUMNS:
        want = {int(step): value for step, value in golden[name].items()}
        assert found[name].keys() == want.keys()
        worst = max(abs(found[name][step] - value) for step, value in want.items())
        assert worst <= tolerance, f"{name} differs by {worst}"


def write_golden(folder, *more, stored=GOLDEN):
    """Store the curve anew: when the example trains something else, and only then."""
    found = {"torch": torch.__version__.partition("+")[0], **curve(run_here(folder, *more))}
    stored.write_text(json.dumps(found, indent=1) + "\n")
