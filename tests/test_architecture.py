"""The shape of the package: who may load whom, what a file may contain, what an import costs."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import (
    LOCAL,
    Mesh,
    all_gather_to,
    all_to_all,
    copy_to,
    gather_from,
    gather_whole,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
    reduce_gradients,
    vocab_parallel_cross_entropy,
)

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megablocks_core"
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAY_LOAD = {
    "groups": set(),
    "numbers": set(),
    "files": {"groups"},
    "parallel": {"groups", "numbers"},
    "layers": {"groups", "numbers", "parallel"},
    "data": {"groups", "files"},
    "ckpt": {"groups", "files"},
    "export": {"groups", "files", "numbers"},
    "train": {"groups", "files"},
    "testing": {"groups", "numbers", "parallel"},
}
MAY_LOAD["auto"] = set().union(*MAY_LOAD.values()) | MAY_LOAD.keys()
OPTIONAL = {
    "flash_attn",
    "fsspec",
    "gigatoken",
    "matplotlib",
    "pyarrow",
    "pytest",
    "sentencepiece",
    "tensorboard",
    "tiktoken",
    "tokenizers",
    "torchao",
    "transformer_engine",
    "transformers",
    "triton",
    "wandb",
    "zstandard",
    "zmq",
}


def fresh_interpreter(code, *arguments):
    """What ``code`` prints as JSON in a Python that has imported nothing of ours."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded_by(package, *, every_name):
    code = """
import importlib, json, sys
package = importlib.import_module("megablocks_core." + sys.argv[1])
if sys.argv[2] == "True":
    for name in dir(package):
        getattr(package, name)
print(json.dumps(sorted(sys.modules)))
"""
    return set(fresh_interpreter(code, package, str(every_name)))


def test_the_table_names_every_package():
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    found |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert found == set(MAY_LOAD)


@pytest.fixture(scope="module")
def loaded():
    """What every public name of a package loads beside torch, and what went wrong there.

    Each in a fork of one Python that has loaded torch, which takes the longest.
    """
    code = """
import importlib, json, os, sys, traceback
import torch
for name in sys.argv[1:]:
    if not os.fork():
        try:
            package = importlib.import_module("megablocks_core." + name)
            for public in dir(package):
                getattr(package, public)
            found = sorted(sys.modules), ""
        except BaseException:
            found = [], traceback.format_exc()
        print(json.dumps([name, *found]), flush=True)
        os._exit(0)
    os.wait()
"""
    command = [sys.executable, "-c", code, *MAY_LOAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    lines = (json.loads(line) for line in done.stdout.splitlines())
    return {name: (set(modules), wrong) for name, modules, wrong in lines}


@pytest.mark.parametrize("package", MAY_LOAD)
def test_every_public_name_loads_only_what_its_package_may(package, loaded):
    modules, wrong = loaded[package]
    assert not wrong
    ours = {name.split(".")[1] for name in modules if name.startswith("megablocks_core.")}
    assert package in ours and ours - {package, "_native"} <= MAY_LOAD[package]
    assert not {name.split(".")[0] for name in modules} & OPTIONAL
    assert "torch._dynamo" not in modules, "the compiler doubles the time of an import"


def test_importing_groups_loads_no_torch():
    assert not {"torch", "numpy"} & loaded_by("groups", every_name=False)


def test_files_loads_neither_torch_nor_groups_even_when_every_name_is_resolved():
    modules = loaded_by("files", every_name=True)
    assert not {"torch", "numpy", "megablocks_core.groups"} & modules


def test_data_loads_no_torch_even_when_every_name_is_resolved():
    assert "torch" not in loaded_by("data", every_name=True)


def test_groups_with_every_name_adds_under_a_tenth_of_a_second_to_torch():
    code = """
import time
import torch
start = time.process_time()
from megablocks_core.groups import *
print(time.process_time() - start)
"""
    assert any(fresh_interpreter(code) < 0.1 for _ in range(3))


def test_f_211_every_module_imports_without_touching_cuda():
    code = """
import importlib, inspect, json, pkgutil, sys
import torch

def guarded(name, function):
    def call(*arguments, **options):
        caller = sys._getframe(1).f_globals["__name__"]
        assert not caller.startswith("megablocks_core"), f"{caller} calls torch.cuda.{name}"
        return function(*arguments, **options)
    return call

for name, function in inspect.getmembers(torch.cuda, inspect.isfunction):
    setattr(torch.cuda, name, guarded(name, function))
import megablocks_core
names = [m.name for m in pkgutil.walk_packages(megablocks_core.__path__, "megablocks_core.")]
for name in names:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
print(json.dumps(names))
"""
    assert len(fresh_interpreter(code)) >= len(SOURCES) - 1


def test_f_215_collectives_over_one_process_are_identities():
    """Confirmed: every collective over ``LOCAL`` and over a mesh of one returns its input."""
    x = torch.randn(4, 3)
    assert not dist.is_initialized()
    for group in (LOCAL, Mesh(world_size=1, rank=0).group("tp")):
        assert (group.size, group.rank) == (1, 0)
        along = {"dim": 0, "group": group}
        results = [
            copy_to(x, group=group),
            reduce_from(x, group=group),
            gather_from(x, **along),
            all_gather_to(x, **along),
            scatter_to(x, **along),
            reduce_scatter_to(x, **along),
            all_to_all(x, send=[4], receive=[4], group=group),
            group.all_reduce(x),
            group.broadcast(x),
            *group.all_gather(x),
        ]
        assert all(torch.equal(result, x) for result in results)


def test_f_215_layers_loss_and_optimizer_train_without_a_process_group():
    """Confirmed: a step over ``LOCAL`` needs no launcher and lowers the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(
        VocabParallelEmbedding(17, 8),
        ColumnParallelLinear(8, 16),
        nn.GELU(),
        RowParallelLinear(16, 17),
    )
    tokens, labels = torch.randint(0, 17, (2, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = vocab_parallel_cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(model, group=LOCAL)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert gather_whole(model).keys() == model.state_dict().keys()
    assert not dist.is_initialized()


def test_f_215_a_whole_decoder_runs_without_a_process_group():
    """Confirmed: the same for a decoder."""
    config = {
        "model_type": "llama",
        "vocab_size": 17,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    decoder = Decoder(DecoderSpec.from_hf(config))
    logits = decoder(torch.randint(0, 17, (2, 6))).logits
    logits.sum().backward()
    assert logits.shape == (2, 6, 17)
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    assert not dist.is_initialized()


def _id(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "__init__.py"], ids=_id)
def test_every_module_has_its_test(path):
    mirrored = ROOT / "tests" / path.relative_to(PACKAGE).with_name(f"test_{path.name}")
    assert mirrored.exists(), f"{mirrored.relative_to(ROOT)} is missing"


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_files_keep_to_the_house_rules(path):
    assert not list(broken_rules(path.read_text(), prints=_is_command(path)))


def broken_rules(source, *, prints=False):
    """Yield what the house rules forbid in ``source``."""
    tree = ast.parse(source)
    if not ast.get_docstring(tree):
        yield "no module docstring"
    for node in ast.walk(tree):
        match node:
            case ast.Global():
                yield f"line {node.lineno}: global"
            case ast.Attribute(attr="environ" | "environb" | "getenv" | "putenv"):
                yield f"line {node.lineno}: reads the environment"
            case ast.ImportFrom(module="os", names=names):
                if {"environ", "getenv"} & {alias.name for alias in names}:
                    yield f"line {node.lineno}: reads the environment"
            case ast.Call(func=ast.Name(id="print")) if not prints:
                yield f"line {node.lineno}: print outside a command"


def _is_command(path):
    """Whether ``path`` is a console script of pyproject.toml."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return module in {target.split(":")[0] for target in scripts.values()}


@pytest.mark.parametrize(
    ("line", "prints"),
    [
        ("def f():\n    global x", False),
        ("import os\nos.environ['A']", False),
        ("import os\nos.getenv('A')", False),
        ("from os import environ", False),
        ("print(1)", False),
    ],
)
def test_the_house_rules_see_what_they_forbid(line, prints):
    assert list(broken_rules(f'"""A module."""\n{line}', prints=prints))
    assert list(broken_rules("x = 1")) == ["no module docstring"]
