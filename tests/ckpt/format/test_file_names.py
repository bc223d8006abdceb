"""Files are named as Hugging Face's libraries expect, or by rank."""

import json

import pytest
import torch

from megablocks_core.ckpt.format.file_names import FileNames
from megablocks_core.ckpt.plans.outlines import Outline, holdings, pack
from megablocks_core.ckpt.plans.save_plan import plan_save

ROWS = [(slice(0, 2),), (slice(2, 4),)]


def _plans(num_ranks):
    held = [
        [
            Outline("m/a", torch.float32, (4,), [(slice(0, 4),)]),
            Outline("m/b", torch.float32, (4,), [(slice(0, 4),)]),
            Outline("o/m/a/x", torch.float32, (4,), ROWS if rank == 0 else [], False),
        ]
        for rank in range(num_ranks)
    ]
    tensors = holdings([pack(one) for one in held])
    return tensors, [plan_save(tensors, rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def test_one_writer_has_one_file():
    tensors, (plan,) = _plans(1)
    names = FileNames(plan.homes)
    files = {file.file: [item.key for item in file.items] for file in names.files(plan, 0)}
    assert files == {"m.safetensors": ["a", "b"], "o.00000.safetensors": ["m/a/x#0", "m/a/x#1"]}
    assert names.beside({}, tensors) == {}


def test_several_writers_have_numbered_files_and_an_index():
    tensors, plans = _plans(3)
    names = FileNames(plans[0].homes)
    written = [
        {file.file: [item.key for item in file.items] for file in names.files(plan, rank)}
        for rank, plan in enumerate(plans)
    ]
    assert written == [
        {"o.00000.safetensors": ["m/a/x#0", "m/a/x#1"]},
        {"m-00001-of-00002.safetensors": ["a"]},
        {"m-00002-of-00002.safetensors": ["b"]},
    ]
    (index,) = names.beside({}, tensors).values()
    assert json.loads(index) == {
        "metadata": {"total_size": 32},
        "weight_map": {
            "a": "m-00001-of-00002.safetensors",
            "b": "m-00002-of-00002.safetensors",
        },
    }


@pytest.mark.parametrize("name", ["../a", "manifest.json", "x.safetensors", "", "a/b", ".a"])
def test_other_files_have_plain_names_of_their_own(name):
    tensors, (plan,) = _plans(1)
    names = FileNames(plan.homes)
    assert names.beside({"config.json": {"a": 1}}, tensors) == {"config.json": b'{\n "a": 1\n}'}
    with pytest.raises(ValueError, match="must be a plain file name"):
        names.beside({name: {}}, tensors)
    with pytest.raises(ValueError, match=r"files\['a.json'\] of type tuple"):
        names.beside({"a.json": ()}, tensors)
