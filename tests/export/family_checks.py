"""What holds for the files of any family, seen from tiny models that transformers saves."""

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.export.families import FAMILIES
from megablocks_core.export.verifying import layout_of
from megablocks_core.files import read_json
from megablocks_core.layers import DecoderSpec
from tests.export.logical_model import assert_round_trip, written
from tests.export.references import InFloat64

TOKENS = torch.arange(14).view(2, 7) * 5 % 11


def saved_by_transformers(family: str, options: dict[str, Any], folder: Path) -> Any:
    """A tiny model, in evaluation, that transformers has written to ``folder``."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert (config.model_type, type(model).__name__) == (family, FAMILIES[family].architecture)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


def num_parameters(family: str, **sizes: Any) -> int:
    """How many values the files of a model hold."""
    schema = FAMILIES[family].layout(sizes).schema
    return sum(math.prod(shape) for shape in schema.values())


def check_files(model: Any, folder: Path) -> None:
    """Names, shapes, and files into our tensors and back, for a model saved to ``folder``."""
    layout = layout_of(read_json(folder / "config.json", dict))
    shapes = {name: tuple(tensor.shape) for name, tensor in written(folder).items()}
    assert layout.schema == shapes
    verify(folder)
    assert_round_trip(folder, folder / "ours")


def check_decoder(family: str, options: dict[str, Any], folder: Path) -> None:
    """Logits of a ``Decoder``, in float64, and what it and transformers read of its folder.

    For models without rotary tables, which transformers makes in float32.
    """
    model = saved_by_transformers(family, options, folder).double()
    model.set_experts_implementation("eager")  # The other one has no float64.
    with InFloat64():
        expected = model(TOKENS, use_cache=False).logits
    decoder = decoder_from_hf(folder, dtype=torch.float64)
    assert (decoder(TOKENS).logits - expected).norm() < 1e-12 * expected.norm()
    save_hf(decoder, folder / "decoder", dtype=torch.float32)
    check_folders_equal(folder, folder / "decoder")
    assert DecoderSpec.from_hf(folder / "decoder") == decoder.spec
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "decoder")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor.double(), model.state_dict()[name]), name


def check_folders_equal(one: Path, other: Path) -> None:
    """The same tensors by the same names."""
    expected, saved = written(one), written(other)
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, expected[name]), name


def check_whole_model(model: Any, folder: Path) -> None:
    """Files into the transformers model on ``meta`` and back, for a model saved to ``folder``."""
    with torch.device("meta"):
        again: Any = type(model)(model.config).eval()
    load_hf(again, folder, device="cpu")
    with torch.no_grad():
        assert torch.equal(
            again(TOKENS, use_cache=False).logits, model(TOKENS, use_cache=False).logits
        )
    save_hf(again, folder / "theirs")
    check_folders_equal(folder, folder / "theirs")
