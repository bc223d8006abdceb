"""What `make demo` shows: a run that is killed, goes on under another layout, and is exported.

    python examples/demo.py

Two ranks train tensor-parallel and are killed with SIGKILL; two data-parallel ranks go on from
the last checkpoint; the model is exported to Hugging Face's format, compared with transformers
where that is installed, and writes a few lines; a report tells the rest. Options are those of
pretrain_gpt.py; the results lie in out/demo.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from megablocks_core.auto import decoder_from_hf
from megablocks_core.train import add_to_summary, read_run
from megablocks_core.train.report import write_report

TRAIN = Path(__file__).with_name("pretrain_gpt.py")
COMPARED = 20  # steps


def main() -> None:
    """Run the acts one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--steps", type=int, default=300)
    options, others = parser.parse_known_args()
    if (options.out / "metrics.jsonl").exists():
        sys.exit(f"{options.out} holds a run already: name another folder with --out (OUT=)")
    others += ["--steps", str(options.steps)]
    began = time.monotonic()

    kill_at = options.steps * 2 // 5
    title(f"Two ranks, tensor parallel, killed after step {kill_at}")
    launch(2, "--out", options.out, "--tp", 2, *others, kill_at=kill_at)
    title("Two ranks, data parallel, going on from the last checkpoint")
    launch(2, "--out", options.out, "--tp", 1, *others)
    title(f"One process, {COMPARED} steps, to compare with two")
    alone = options.out / "one-process"
    launch(1, "--out", alone, "--stop-after", COMPARED, *others)

    title("Report")
    run = read_run(options.out)
    pairs = zip(run.lines, read_run(alone).lines, strict=False)
    distance = max(abs(line.values["loss"] - other.values["loss"]) for line, other in pairs)
    found = {f"loss, tp=2 and one process, first {COMPARED} steps, float32": distance}
    found |= distance_to_transformers(options.out / "hf")
    sample = (options.out / "sample.txt").read_text()
    add_to_summary(options.out, {"layout_distance": found, "sample": sample})
    for what, value in found.items():
        print(f"largest difference of {what}: {value:.1e}")
    print(f"\n{sample}\n\n{write_report(options.out)}, {time.monotonic() - began:.0f} s in all")


def launch(ranks: int, *arguments: object, kill_at: int | None = None) -> None:
    """Run pretrain_gpt.py on some ranks; kill all of them once the run has come to a step."""
    words = [str(word) for word in (TRAIN, *arguments)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    process = subprocess.Popen(
        [sys.executable, *(torchrun if ranks > 1 else []), *words],
        start_new_session=True,
        env=environment,
    )
    try:
        while kill_at is not None and process.poll() is None:
            if lines_written(Path(str(arguments[1])) / "metrics.jsonl") > kill_at:
                print("\nkill -9")
                break
            time.sleep(0.2)
        else:
            if process.wait():
                sys.exit(f"training ended with exit code {process.returncode}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lines_written(path: Path) -> int:
    """How many steps a run has written down."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


@torch.no_grad()
def distance_to_transformers(folder: Path) -> dict[str, float]:
    """Largest difference of the exported model's logits in transformers and here."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(64).view(1, -1) + 32
    theirs = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens).logits
    ours = decoder_from_hf(folder)(tokens).logits
    return {"exported logits here and in transformers": float((ours - theirs).abs().max())}


def title(text: str) -> None:
    """A line that says what comes."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


if __name__ == "__main__":
    main()
