"""What `make demo` shows: a run that is killed, goes on under another layout, and is exported.

    python examples/demo.py
    python examples/demo.py --model hybrid

Two ranks train a mixture of experts, tensor- and expert-parallel, and are killed with SIGKILL; two
data-parallel ranks, each with all experts and half of the optimizer's state, go on from the last
checkpoint; the last one becomes a folder in Hugging Face's format, which is opened again, here and
in transformers where that is installed, and compared; the same model is written in each format of
an inference server; the model writes a few lines; a report tells the rest. Other options are those
of pretrain_MODEL.py, which trains; the results lie in out/demo.
"""

import argparse
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from megablocks_core import ckpt, data, export
from megablocks_core.auto import decoder_from_hf
from megablocks_core.export.differing import diff
from megablocks_core.export.quantising import Fp8, Fp8Blocks, Int4, Int8, Nvfp4
from megablocks_core.layers import Decoder
from megablocks_core.train import add_to_summary, read_run
from megablocks_core.train.report import write_report

COMPARED = 20  # steps
CALIBRATED = 8  # samples


def main() -> None:
    """Run the acts; if stopped by Ctrl-C, a hangup or a plain kill, take the ranks along."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--model", default="gpt", choices=["gpt", "hybrid", "mamba"])
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--experts", type=int, help="in each layer; default 8, in a mamba none")
    parser.add_argument("--dp", type=int, default=2, help="ranks that go on")
    parser.add_argument("--zero", type=int, default=1, choices=range(4), help="what they cut")
    options, others = parser.parse_known_args()
    if (options.out / "metrics.jsonl").exists():
        sys.exit(f"{options.out} holds a run already: name another folder with --out (OUT=)")
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        play(options, others)
    except KeyboardInterrupt:
        sys.exit("\nstopped")


def play(options: argparse.Namespace, others: list[str]) -> None:
    """Train, kill, go on, compare and report; ``others`` are options of the script."""
    train = partial(launch, Path(__file__).with_name(f"pretrain_{options.model}.py"))
    out, steps, dp, zero = options.out, options.steps, str(options.dp), str(options.zero)
    others = ["--steps", str(steps), "--save-every", str(max(1, steps // 6)), *others]
    experts = 8 if options.experts is None and options.model != "mamba" else options.experts
    others += [] if experts is None else ["--experts", str(experts)]
    apart = ["--tp", "2", *(["--ep", "2"] if experts else [])]
    kill_at, compared = steps * 2 // 5, min(COMPARED, steps)
    began = time.monotonic()

    title(f"Two ranks that share every layer ({' '.join(apart)}), killed after step {kill_at}")
    train(2, out, *apart, "--stop-after", str(steps), *others, kill_at=kill_at)
    title(f"Going on from the last checkpoint: data-parallel ranks {dp}, ZeRO stage {zero}")
    train(options.dp, out, "--dp", dp, "--zero", zero, *others)
    title(f"One process, {compared} steps, to compare with two")
    alone = out / "one-process"
    train(1, alone, "--stop-after", str(compared), *others)

    title("The last checkpoint as a Hugging Face folder, opened again")
    distances = reopened(out)

    title("The same model in each format of an inference server")
    for_servers(out)

    title("Report")
    pairs = zip(read_run(out).lines, read_run(alone).lines, strict=False)
    distance = max(abs(line.values["loss"] - other.values["loss"]) for line, other in pairs)
    found = {f"loss, two ranks and one process, first {compared} steps, float32": distance}
    found |= distances
    sample = write_on(decoder_from_hf(out / "exported"), "def ", length=300)
    add_to_summary(out, {"layout_distance": found, "sample": sample})
    for what, value in found.items():
        print(f"largest difference of {what}: {value:.1e}")
    print(f"\n{sample}\n\n{write_report(out)}, {time.monotonic() - began:.0f} s in all")


def launch(
    script: Path, ranks: int, out: Path, *arguments: str, kill_at: int | None = None
) -> None:
    """Run a script on some ranks; kill all of them once the run has come to a step."""
    command = [sys.executable, str(script), "--out", str(out), *arguments]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):  # each in a process group of its own: Ctrl-C comes here alone
            environment = place(rank, ranks, port)
            processes.append(
                subprocess.Popen(command, env=environment, process_group=0, preexec_fn=die_with_us)
            )
        while any(process.poll() is None for process in processes):
            if kill_at is not None and lines_written(out / "metrics.jsonl") > kill_at:
                print("\nkill -9", flush=True)
                return
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        if failed := [process.returncode for process in processes if process.returncode]:
            sys.exit(f"training ended with exit code {failed[0]}")
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def die_with_us() -> None:
    """Where the system can (Linux), have a rank killed if the demo is killed itself."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank, as torchrun sets it; the cores are shared out."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**threads, **os.environ, **master, "RANK": str(rank), "WORLD_SIZE": str(ranks)}


def lines_written(path: Path) -> int:
    """How many steps a run has written down."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def reopened(out: Path) -> dict[str, float]:
    """Export the last checkpoint; largest differences of logits between it and the folder.

    The folder must hold what the run wrote itself of the model that it had in memory.
    """
    checkpoint, folder = ckpt.latest(out / "checkpoints"), out / "exported"
    assert checkpoint is not None  # the run came to its end
    for arguments in (["hf", checkpoint, folder], ["verify", "--values", folder]):
        command = [sys.executable, "-m", "megablocks_core.auto.command", *map(str, arguments)]
        subprocess.run(command, check=True)
    if lines := list(diff(out / "hf", folder)):
        sys.exit("\n".join([f"{folder} differs from {out / 'hf'}:", *lines]))
    print("holds what the run wrote of the model in its memory")
    model = decoder_from_hf(folder)
    saved = Decoder(model.spec, dtype=model.lm_head.weight.dtype)
    ckpt.load(checkpoint, {"model": saved}, strict=False)  # its optimizer is of no use here
    return distances_of_logits(model, saved, folder)


@torch.no_grad()
def distances_of_logits(model: Decoder, saved: Decoder, folder: Path) -> dict[str, float]:
    """Largest differences of an exported model's logits from those before, and elsewhere."""
    tokens = torch.arange(64).view(1, -1) + 32
    logits = model(tokens).logits
    others = {"of the checkpoint and of the exported folder": saved(tokens).logits}
    if importlib.util.find_spec("transformers") is not None:
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens).logits
        others["of the exported folder here and in transformers"] = theirs
    return {
        f"logits, those {which}": float((logits - other).abs().max())
        for which, other in others.items()
    }


@torch.no_grad()
def for_servers(out: Path) -> None:
    """Write what was exported quantised, and for TensorRT-LLM, and verify each folder."""
    exported, folder = out / "exported", out / "servers"
    model = decoder_from_hf(exported)
    tokens = data.IndexedDataset(out / "tokens")
    length = min(128, model.spec.extra["max_position_embeddings"])
    samples = data.GPTDataset(tokens, length, seed=0, num_samples=CALIBRATED)
    batches = [torch.as_tensor(sample["tokens"]).view(1, -1) for sample in samples]
    found = export.calibrate(model, batches, recipe=Fp8())
    found.save(out / "calibration.json")
    cache = bool(found.keys)  # a Mamba has none
    recipes = {
        "fp8": Fp8(kv_cache=cache),
        "fp8-blocks": Fp8Blocks(),
        "nvfp4": Nvfp4(kv_cache=cache),
        "int8": Int8(),
        "int4": Int4(group_size=16),
    }
    logits = model(batches[0]).logits
    for name, recipe in recipes.items():
        export.save_quantized_hf(
            model,
            folder / name,
            recipe=recipe,
            calibration=found,
            like=exported,
            dtype=torch.bfloat16,
        )
        export.verify(folder / name, values=True)
        others = decoder_from_hf(folder / name, dtype=logits.dtype)(batches[0]).logits
        error = float((others - logits).norm() / logits.norm())
        print(f"{folder / name}: whole; its weights move logits by {error:.1%}")
    name = folder / "trtllm"
    try:
        recipe, tp = (Fp8(), 2) if cache else (None, 1)
        export.save_trtllm(
            model, name, tp=tp, recipe=recipe, calibration=found, dtype=torch.bfloat16
        )
    except ValueError as error:  # TensorRT-LLM has no engines for some families
        print(f"{name}: not written: {error}")
    else:
        export.verify(name, values=True)
        print(f"{name}: whole, tp {tp}")


@torch.no_grad()
def write_on(model: Decoder, prompt: str, *, length: int) -> str:
    """Go on from ``prompt`` for some bytes, at temperature 0.7."""
    generator = torch.Generator().manual_seed(0)
    context = model.spec.extra["max_position_embeddings"]
    tokens = [data.END_OF_DOCUMENT, *prompt.encode()]
    for _ in range(length):
        logits = model(torch.tensor([tokens[-context:]])).logits[0, -1]
        choice = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
        tokens.append(int(choice))
    return data.decode_bytes(tokens)


def title(text: str) -> None:
    """A line that says what comes."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


if __name__ == "__main__":
    main()
