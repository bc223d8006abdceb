"""The files of a Hugging Face folder: which tensors they hold, and what lies beside these."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megablocks_core.export.drafting import Written
from megablocks_core.export.dtypes import Dtypes, check_floating, dtype_of
from megablocks_core.export.layout import Layout, Shapes
from megablocks_core.export.lazies import Lazy
from megablocks_core.export.ours import Ours
from megablocks_core.export.source import INDEX, SINGLE
from megablocks_core.export.verifying import check_schema
from megablocks_core.groups import Whole

Files = dict[str, list[Written]]

# What belongs to a model beside its weights, copied by ``like=``.
_COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def planned(wholes: list[Whole], layout: Layout, dtypes: Dtypes) -> list[Whole]:
    """The tensors of the files, in the order in which the last of ours for each come.

    Raises:
        ValueError: Ours are not those that the layout describes, or not floating-point.
    """
    owners = {name: rule for rule in layout.rules for name in rule.ours}
    shapes: Shapes = {}
    for whole in wholes:
        rule = owners.get(whole.name)
        if rule is None:
            shapes[whole.name] = whole.shape
        elif whole.shape != rule.shapes[whole.name]:
            shapes |= dict.fromkeys(rule.theirs, whole.shape)
    here = {whole.name for whole in wholes}
    complete = [rule for rule in layout.rules if here.issuperset(rule.ours)]
    whole_shapes = {name: shape for rule in complete for name, shape in rule.theirs.items()}
    check_schema(whole_shapes | shapes, layout.schema)
    check_floating(wholes)
    last = {id(owners[whole.name]): whole for whole in wholes}
    return [
        Whole(name, shape, dtype_of(name, whole.dtype, dtypes))
        for whole in wholes
        if last[id(rule := owners[whole.name])] is whole
        for name, shape in rule.theirs.items()
    ]


def made_of(ours: Ours, layout: Layout) -> dict[str, Lazy]:
    """The tensors of the files by on-disk name, as what the rules make of ours."""
    return {
        name: made
        for rule in layout.rules
        for name, made in rule.to_theirs([ours[part] for part in rule.ours]).items()
    }


def name_dtype(config: dict[str, Any], wholes: Iterable[Whole]) -> None:
    """Say in the config what most values are written as; transformers 4 reads the old key."""
    sizes: dict[str, int] = {}
    for whole in wholes:
        name = str(whole.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + whole.nbytes
    config["dtype"] = config["torch_dtype"] = max(sizes, key=lambda name: sizes[name])


def split(tensors: Sequence[Written], max_file_bytes: int) -> Files:
    """File names and what goes into each, in order; a file ends before it is too long."""
    files: list[list[Written]] = []
    size = 0
    for written in tensors:
        if not files or size + written.whole.nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(written)
        size += written.whole.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    count = len(files)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": members
        for number, members in enumerate(files, 1)
    }


def beside(files: Files, config: Mapping[str, Any], like: Path | None) -> dict[str, bytes]:
    """The files beside the tensors: index, ``config.json`` and the companions in ``like``."""
    found = {INDEX: as_json(_index(files))} if len(files) > 1 else {}
    found["config.json"] = as_json(config)
    for name in _COMPANIONS:
        if like is not None and (like / name).is_file():
            found[name] = (like / name).read_bytes()
    return found


def as_json(value: Mapping[str, Any]) -> bytes:
    """A JSON file's bytes, indented."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _index(files: Files) -> dict[str, Any]:
    sizes = [written.whole.nbytes for members in files.values() for written in members]
    places = {written.whole.name: file for file, members in files.items() for written in members}
    return {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(places.items()))}
