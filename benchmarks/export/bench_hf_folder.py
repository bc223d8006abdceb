"""Folders of a Llama-like bfloat16 model: saved and loaded, against a copy of their files.

    python -m benchmarks.export.bench_hf_folder [MB]

The peers are a plain copy of the same files on the same disk (synced where ours is, when saving)
and transformers' ``save_pretrained``, which syncs nothing, and ``from_pretrained``. Files are read
from the page cache. Rounds are fewer than elsewhere, because a folder may be large.

A line whose case has ``mib`` is about memory: its ratio is that of peaks beyond the model's own,
each of a process of its own. Against "1 GB" it is the part that is taken of what is promised.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.peaks import peak_of, print_peak, report_peaks
from benchmarks.timing import Times, report
from megablocks_core.export import load_hf, save_hf
from megablocks_core.layers import Decoder, DecoderSpec

_NAME, _ROUNDS = "export/hf_folder", 3
_HIDDEN, _FFN, _VOCAB = 1024, 4096, 32000
_FILE_BYTES = 2**30
# Ours / theirs: at least 0.6 of the speed of a copy.
_LIMIT = 1 / 0.6
# Beyond the model's own, in MiB.
_MOST_MIB = 10**9 // 2**20


def main(megabytes: int = 512) -> None:
    """Print one JSON line a case."""
    spec = _spec(megabytes * 10**6)
    model = Decoder(spec, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
    with tempfile.TemporaryDirectory() as name:
        _compare(model, spec, Path(name))


def _compare(model: Decoder, spec: DecoderSpec, folder: Path) -> None:
    source, scratch = folder / "source", folder / "scratch"
    save_hf(model, source, max_file_bytes=_FILE_BYTES)
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(model.state_dict(), assign=True)
    again = Decoder(spec, device="meta", dtype=torch.bfloat16)
    load_hf(again, source)
    opened = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
        assert torch.equal(tensor, opened.state_dict()[name]), name
    del again, opened

    def load() -> None:
        load_hf(Decoder(spec, device="meta", dtype=torch.bfloat16), source)

    save = {
        "copy, synced": lambda: _copied(source, scratch, synced=True),
        "transformers": lambda: theirs.save_pretrained(scratch, max_shard_size="1GB"),
    }
    read = {
        "copy": lambda: _copied(source, scratch, synced=False),
        "transformers": lambda: transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype="auto"
        ),
    }
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    for what, ours, peers in (
        ("save", lambda: save_hf(model, scratch, max_file_bytes=_FILE_BYTES), save),
        ("load", load, read),
    ):
        for peer, work in peers.items():
            times = _turns(ours, work, scratch)
            limit = _LIMIT if peer.startswith("copy") else None
            case = {"what": what, "mb": size // 10**6}
            threads = torch.get_num_threads()
            report(times, benchmark=_NAME, peer=peer, case=case, limit=limit, threads=threads)
    for what in ("save", "load", "save as float32", "load as float32"):
        _report_memory({"what": what, "mb": size // 10**6}, source, scratch)


def _report_memory(case: dict[str, int | str], source: Path, scratch: Path) -> None:
    """What a step takes of what is promised, and against transformers, which casts none."""
    peaks = {}
    for side in ("ours", "transformers"):
        shutil.rmtree(scratch, ignore_errors=True)
        if side == "ours" or " as " not in str(case["what"]):
            words = side, case["what"], str(source), str(scratch)
            peaks[side] = peak_of("benchmarks.export.bench_hf_folder", *words)
    ours, threads = peaks.pop("ours"), torch.get_num_threads()
    for peer, (mib, milliseconds), limit in (
        ("1 GB", (_MOST_MIB, 0.0), 1.0),
        *((peer, peak, None) for peer, peak in peaks.items()),
    ):
        report_peaks(
            ours,
            (max(mib, 1), milliseconds),
            benchmark=_NAME,
            whom=peer,
            case=case,
            limit=limit,
            threads=threads,
        )


def _print_peak(side: str, what: str, source: Path, scratch: Path) -> None:
    """The peak of one step of one side; each is done before, so that all is set up."""
    verb, _, dtype = what.partition(" as ")
    other: Any = getattr(torch, dtype) if dtype else None
    spec, opened = DecoderSpec.from_hf(source), transformers.AutoModelForCausalLM.from_pretrained

    def load() -> torch.nn.Module:
        if side == "transformers":
            model = opened(source, dtype="auto")
            for parameter in model.parameters():  # they are mapped: every page is read
                parameter.detach().flatten()[::1024].sum()
            return model
        own = torch.bfloat16 if verb == "save" else other or torch.bfloat16
        model = Decoder(spec, device="meta", dtype=own)
        load_hf(model, source)
        return model

    def save(model: Any, folder: Path) -> None:
        if side == "transformers":
            model.save_pretrained(folder, max_shard_size="1GB")
        else:
            save_hf(model, folder, dtype=other, max_file_bytes=_FILE_BYTES)

    if verb == "load":
        print_peak(lambda: [*load().parameters()], warm_up=load)
        return
    model = load()

    def saved() -> list[Tensor]:
        save(model, scratch / "again")
        return []

    print_peak(saved, warm_up=lambda: save(model, scratch / "first"))


def _spec(nbytes: int) -> DecoderSpec:
    layer = 2 * _HIDDEN * (4 * _HIDDEN + 3 * _FFN)
    layers = max(1, (nbytes - 4 * _VOCAB * _HIDDEN) // layer)
    return DecoderSpec(_VOCAB, _HIDDEN, _FFN, layers, 16, 16, 64)


def _turns(ours: Callable[[], object], peer: Callable[[], object], scratch: Path) -> Times:
    times = Times([], [])
    for index in range(_ROUNDS + 1):
        for side in (0, 1) if index % 2 else (1, 0):
            shutil.rmtree(scratch, ignore_errors=True)
            os.sync()
            start = time.perf_counter()
            (ours, peer)[side]()
            if index:
                times[side].append(time.perf_counter() - start)
    return times


def _copied(source: Path, target: Path, *, synced: bool) -> None:
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        if synced:
            with (target / path.name).open("rb+") as file:
                os.fsync(file.fileno())


if __name__ == "__main__":
    if len(sys.argv) == 5:
        _print_peak(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(*(int(word) for word in sys.argv[1:]))
