"""A plain module that holds the logical tensors of a layout, and round trips through it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from megablocks_core.export import load_hf, save_hf
from megablocks_core.export.layout import Layout
from megablocks_core.export.verifying import layout_of
from megablocks_core.files import read_json


def logical_model(
    layout: Layout,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A module with our tensors of every rule; values are NaN until they are loaded.

    Args:
        layout: Says names and shapes.
        dtypes: By on-disk name; default float32.
        device: Where the tensors lie.
    """
    model = nn.Module()
    for rule in layout.all_rules:
        dtype = (dtypes or {}).get(next(iter(rule.theirs)), torch.float32)
        for name, shape in rule.shapes.items():
            path, _, last = name.rpartition(".")
            values = torch.full(shape, torch.nan, dtype=dtype, device=device)
            _submodule(model, path).register_parameter(last, nn.Parameter(values))
    return model


def loaded(folder: Path) -> nn.Module:
    """Our tensors of a folder that transformers wrote, each in the dtype of its file."""
    layout = layout_of(read_json(folder / "config.json", dict))
    dtypes = {name: tensor.dtype for name, tensor in written(folder).items()}
    model = logical_model(layout, dtypes=dtypes)
    load_hf(model, folder)
    return model


def assert_round_trip(folder: Path, out: Path) -> nn.Module:
    """Files into our tensors and back are the same bits; returns what holds our tensors."""
    model = loaded(folder)
    save_hf(model, out, like=folder)
    expected, saved = written(folder), written(out)
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.shape == expected[name].shape, name
        same = tensor.flatten().view(torch.uint8) == expected[name].flatten().view(torch.uint8)
        assert same.all(), name
    return model


def written(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _submodule(model: nn.Module, path: str) -> nn.Module:
    for part in path.split("."):
        if part and not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part) if part else model
    return model
