"""Which tensors the files of a folder hold, what lies beside them, and what is refused."""

import json

import pytest
import torch

from megablocks_core.export.drafting import Written
from megablocks_core.export.hf_files import beside, made_of, name_dtype, planned, split
from megablocks_core.export.layout import Layout, Rule
from megablocks_core.export.lazies import lazy
from megablocks_core.export.operations import Split
from megablocks_core.export.ours import Ours
from megablocks_core.groups import Whole

LAYOUT = Layout(
    (
        Rule({"first": (2,)}, ("one",)),
        Rule({"gate_up": (4, 3)}, ("gate", "up"), (Split((2, 2)),)),
        Rule({"ids": (2,)}, ("ids",)),
    )
)
WHOLES = [
    Whole("one", (2,), torch.float32),
    Whole("gate", (2, 3), torch.float32),
    Whole("up", (2, 3), torch.float32),
    Whole("ids", (2,), torch.float32),
]


def test_tensors_come_when_all_that_they_are_made_of_has():
    assert planned(WHOLES, LAYOUT, None) == [
        Whole("first", (2,), torch.float32),
        Whole("gate_up", (4, 3), torch.float32),
        Whole("ids", (2,), torch.float32),
    ]
    dtypes = {whole.dtype for whole in planned(WHOLES, LAYOUT, torch.float64)}
    assert dtypes == {torch.float64}
    moved = planned([WHOLES[1], WHOLES[0], WHOLES[2], WHOLES[3]], LAYOUT, None)
    assert [whole.name for whole in moved] == ["first", "gate_up", "ids"]


def test_what_the_layout_does_not_say_is_refused():
    strange = [*WHOLES[:2], Whole("ids", (3,), torch.float32), Whole("more", (1,), torch.float32)]
    with pytest.raises(ValueError) as caught:
        planned(strange, LAYOUT, None)
    for part in ("missing ['gate_up']", "not described ['more']", "ids has shape (3,), described"):
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_that_are_no_plain_floats_are_named(dtype):
    """No other reader of the folder, and ``verify`` neither, would take them."""
    strange = [*WHOLES[:3], Whole("ids", (2,), dtype)]
    for wanted in (None, torch.float32):
        with pytest.raises(ValueError, match=f"model must have tensors of .*, but ids is {dtype}"):
            planned(strange, LAYOUT, wanted)


def test_tensors_are_made_as_the_rules_say():
    made = made_of(Ours(WHOLES), LAYOUT)
    shapes = {name: tuple(one.get_shape()) for name, one in made.items()}
    assert shapes == {"first": (2,), "gate_up": (4, 3), "ids": (2,)}


def test_the_config_names_the_dtype_of_most_bytes():
    config = {}
    name_dtype(config, WHOLES)
    assert config == {"dtype": "float32", "torch_dtype": "float32"}
    name_dtype(config, [Whole("a", (3,), torch.float32), Whole("b", (7,), torch.bfloat16)])
    assert config["dtype"] == "bfloat16"


def test_files_end_before_they_grow_too_long(tmp_path):
    written = [
        Written(whole, lazy(torch.empty(whole.shape))) for whole in planned(WHOLES, LAYOUT, None)
    ]
    assert list(split(written, 100)) == ["model.safetensors"]
    files = split(written, 55)
    assert {name: [one.whole.name for one in held] for name, held in files.items()} == {
        "model-00001-of-00003.safetensors": ["first"],
        "model-00002-of-00003.safetensors": ["gate_up"],
        "model-00003-of-00003.safetensors": ["ids"],
    }
    (tmp_path / "tokenizer.json").write_bytes(b"tokens")
    (tmp_path / "weights.bin").write_bytes(b"not copied")
    found = beside(files, {"model_type": "llama"}, tmp_path)
    assert set(found) == {"model.safetensors.index.json", "config.json", "tokenizer.json"}
    index = json.loads(found["model.safetensors.index.json"])
    assert index["metadata"] == {"total_size": 8 + 48 + 8}
    assert index["weight_map"]["gate_up"] == "model-00002-of-00003.safetensors"
    assert set(beside(split(written, 100), {}, None)) == {"config.json"}
