"""A run of pretrain_gpt.py that takes two seconds, and its curve."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from examples.pretrain_gpt import parse, train
from megablocks_core.train import read_run

EXAMPLES = Path(__file__).parents[2] / "examples"
GOLDEN = Path(__file__).with_name("pretrain_gpt.json")
GOLDEN_EXPERTS = Path(__file__).with_name("pretrain_gpt_experts.json")
EXPERTS = ["--experts=4", "--balance=0.1"]
COLUMNS = ("loss", "grad_norm", "validation_loss")
LOOP = [
    "--dtype=float64",
    "--hidden-size=32",
    "--sequence-length=32",
    "--batch-size=8",
    "--micro-batch-size=2",
    "--evaluate-every=5",
    "--evaluate-steps=2",
    "--save-every=4",
]
SIZES = [*LOOP, "--layers=2", "--heads=4", "--kv-heads=2"]
MAMBA = ["--state-size=8", "--mamba-head-dim=8"]
SIZES_OF = {
    "pretrain_mamba": [*LOOP, *MAMBA, "--layers=2"],
    "pretrain_hybrid": [*LOOP, *MAMBA, "--pattern=M*-E", "--heads=4", "--kv-heads=2"],
}


def write_text(folder):
    """Text that is the same everywhere: multiplication tables, a document a line."""
    path = Path(folder) / "tables.jsonl"
    tables = ("\n".join(f"{k} times {n} is {k * n}" for k in range(20)) for n in range(40))
    path.write_text("".join(json.dumps({"text": table}) + "\n" for table in tables))
    return path


def words(folder, *more, steps=20, sizes=SIZES):
    """The command line of a run in ``folder``, on the text there; the last word wins."""
    folder = Path(folder)
    text = folder / "tables.jsonl"
    if not text.exists():
        write_text(folder)
    return ["--out", str(folder / "run"), "--data", str(text), *sizes, f"--steps={steps}", *more]


def run_here(folder, *more, **options):
    """Train in this process, or on this test's ranks; the folder of the run."""
    train(parse(words(folder, *more, **options)))
    return Path(folder) / "run"


def run_model(module, folder, *more, **options):
    """The same with another example's model; ``module`` is that example."""
    sizes = SIZES_OF[module.__name__.rpartition(".")[2]]
    parsed = module.parse(words(folder, *more, sizes=sizes, **options))
    train(parsed, make_spec=module.make_spec, make_work=module.make_work)
    return Path(folder) / "run"


def journey(module, folder, *layouts, stored):
    """20 steps on this test's ranks, under one layout after another, on a stored curve."""
    if dist.get_rank() == 0:
        words(folder)
    dist.barrier()
    for number, layout in enumerate(layouts, 1):
        done = 20 * number // len(layouts)
        run = run_model(module, folder, *layout.split(), f"--stop-after={done}")
    if dist.get_rank() == 0:
        assert_golden(run, tolerance=1e-9, stored=stored)


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


def write_golden(run, *, stored):
    """Store a run's curve anew: when the example trains something else, and only then."""
    found = {"torch": torch.__version__.partition("+")[0], **curve(run)}
    stored.write_text(json.dumps(found, indent=1) + "\n")
