"""docs/moe.md says of every field of other libraries what it is called here."""

import ast
import importlib.util
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "moe.md"
SOURCES = Path(sys.prefix) / "sources"

pytestmark = pytest.mark.skipif(not SOURCES.exists(), reason="oracle megatron")


def fields_on_page(title):
    """First cells of the table under ``title``, by row."""
    section = re.split(r"^### ", PAGE.read_text(), flags=re.M)
    (table,) = [part for part in section if part.startswith(title + "\n")]
    return re.findall(r"^\| `(\w+)` \|", table, flags=re.M)


def fields_of(text, name):
    """Names that the classes called ``name`` annotate, also inside other classes."""
    return [
        field.target.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name == name
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def check(title, fields):
    named = fields_on_page(title)
    assert len(named) == len(set(named)), "a field stands twice"
    assert set(named) == set(fields)


def test_megablocks():
    (archive,) = SOURCES.glob("megablocks-*.tar.gz")
    with tarfile.open(archive) as files:
        (name,) = [n for n in files.getnames() if n.endswith("megablocks/layers/arguments.py")]
        text = files.extractfile(name).read().decode()
    fields = fields_of(text, "Arguments")
    assert len(fields) > 30
    check("MegaBlocks", fields)


def test_megatron():
    spec = importlib.util.find_spec("megatron.core")
    core = Path(spec.submodule_search_locations[0])
    fields = [
        *fields_of((core / "transformer/transformer_config.py").read_text(), "TransformerConfig"),
        *fields_of((core / "model_parallel_config.py").read_text(), "ModelParallelConfig"),
    ]
    chosen = [name for name in fields if re.search("moe|expert|grouped_gemm", name)]
    assert len(chosen) > 60
    check("Megatron-LM", chosen)


def test_torchtitan():
    (archive,) = SOURCES.glob("torchtitan-*.whl")
    fields = []
    with zipfile.ZipFile(archive) as files:
        for name in ("moe", "token_dispatcher"):
            text = files.read(f"torchtitan/models/common/{name}.py").decode()
            fields += fields_of(text, "Config")
    assert len(fields) > 20
    check("torchtitan", fields)
