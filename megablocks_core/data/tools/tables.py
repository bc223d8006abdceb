"""What the tools found, as lines for people and as values for JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megablocks_core.data.tools.checking import Check, Pair
from megablocks_core.data.tools.inspecting import Inspection, Lengths
from megablocks_core.data.tools.mixing import RecipeUse
from megablocks_core.data.tools.showing import Part, Sample
from megablocks_core.files.progress import size_text

_BAR = 30


def as_json(found: Any) -> Any:
    """What a tool found, a dataclass of ours or a list of them, as plain values."""
    if isinstance(found, list):
        return [as_json(one) for one in found]
    return _plain(asdict(found))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns one beside the other; the first is text, the others are numbers."""
    whole = [list(head), *map(list, rows)]
    widths = [max(len(row[place]) for row in whole) for place in range(len(head))]
    for row in whole:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([f"  {first}", *others]).rstrip()


def inspection_lines(found: Inspection) -> Iterator[str]:
    """What is in a dataset."""
    yield found.prefix
    facts = {
        "documents": f"{found.documents:,}",
        "sequences": f"{found.sequences:,}",
        "tokens": f"{found.tokens:,} of {found.dtype}",
        "bytes": size_text(found.bytes),
        **_ids(found),
        **_recorded(found),
        **(_lengths(found.lengths) if found.lengths else {}),
    }
    for name, value in facts.items():
        yield f"  {name:<10} {value}"
    if found.lengths:
        yield from _histogram(found.lengths)


def recipe_lines(found: RecipeUse) -> Iterator[str]:
    """What the sources of a recipe give."""
    yield (
        f"{found.path}: {found.steps:,} steps, {found.samples:,} samples, {found.tokens:,} tokens"
    )
    head = ("source", "weight", "share", "documents", "samples", "tokens", "epochs", "repeated")
    rows = [
        (
            one.name,
            f"{one.weight:.4f}",
            f"{one.share:.4f}",
            f"{one.documents:,}",
            f"{one.samples:,}",
            f"{one.tokens:,}",
            f"{one.epochs:.3f}",
            f"{one.repetitions:,}",
        )
        for one in found.sources
    ]
    yield from table(head, rows)


def check_lines(found: Check) -> Iterator[str]:
    """Which documents are there twice."""
    head = ["dataset", "documents", "empty", "repeated", "its tokens"]
    head += ["overlap", "its tokens"] if found.against else []
    rows = []
    for one in found.datasets:
        row = [one.prefix, f"{one.documents:,}", f"{one.empty:,}", f"{one.duplicates:,}"]
        row.append(_of(one.duplicate_tokens, one.tokens))
        if found.against:
            row += [f"{one.overlap:,}", _of(one.overlap_tokens, one.tokens)]
        rows.append(row)
    yield from table(head, rows)
    for title, pairs in (("repeated", found.duplicates), ("overlap", found.overlaps)):
        if pairs:
            yield f"{title}, the first {len(pairs)}"
            yield from map(_pair, pairs)


def part_lines(part: Part) -> Iterator[str]:
    """A document or a part of one: where it is from, and its text or ids."""
    end = part.start + part.length
    cut = f", the first {len(part.ids)} shown" if len(part.ids) < part.length else ""
    yield (
        f"{part.source}  document {part.document}  tokens {part.start} to {end} "
        f"({part.length}{cut})"
    )
    text = " ".join(map(str, part.ids.tolist())) if part.text is None else part.text
    # Ends of lines alone stay what they are: anything else that a terminal obeys is escaped.
    yield from (f"  | {line}" for line in text.split("\n"))


def sample_lines(samples: Sequence[Sample]) -> Iterator[str]:
    """The samples of a step."""
    for sample in samples:
        yield f"sample {sample.number}"
        for part in sample.parts:
            yield from (f"  {line}" for line in part_lines(part))


def _ids(found: Inspection) -> dict[str, str]:
    if found.ids is None or found.ids.least is None:
        return {}
    said = f"{found.ids.least} to {found.ids.most}"
    if found.ids.vocab_size is not None:
        said += f"; {found.ids.outside:,} outside a vocabulary of {found.ids.vocab_size:,}"
    return {"ids": said}


def _recorded(found: Inspection) -> dict[str, str]:
    if found.manifest is None:
        return {"manifest": "none: another tool wrote the files"}
    lines = {"tokenizer": found.manifest.tokenizer or "not recorded"}
    for ending, record in found.manifest.files.items():
        lines[ending] = f"{record.size:,} bytes, xxh3-128 {record.xxh3_128}"
    words = (found.source or {}).get("command_line")
    if isinstance(words, list) and words:
        lines["made by"] = shlex.join(map(str, words))
    return lines


def _lengths(lengths: Lengths) -> dict[str, str]:
    return {
        "lengths": f"{lengths.least:,} to {lengths.most:,}, mean {lengths.mean:,.1f}, median "
        f"{lengths.median:,}, p90 {lengths.p90:,}, p99 {lengths.p99:,}; {lengths.empty:,} empty"
    }


def _histogram(lengths: Lengths) -> Iterator[str]:
    most = max(one.documents for one in lengths.histogram)
    rows = [
        (
            f"{one.least:,}" if one.least == one.most else f"{one.least:,} to {one.most:,}",
            f"{one.documents:,}",
            f"{one.tokens:,}",
            ("#" * -(-_BAR * one.documents // most)).ljust(_BAR),
        )
        for one in lengths.histogram
    ]
    yield from table(("length", "documents", "tokens", " " * _BAR), rows)


def _pair(pair: Pair) -> str:
    return (
        f"  {pair.prefix} document {pair.document}  is  {pair.same_as} document "
        f"{pair.same_document}  ({pair.tokens:,} tokens)"
    )


def _of(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / max(whole, 1):.2f}%)"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
