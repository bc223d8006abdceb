"""The wheel, with the extension and without a compiler (case F-213)."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megablocks_core

ROOT = Path(__file__).parents[1]


def build(folder, **environment):
    """Build a wheel from a copy of the sources, offline, as pip does for a user."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("megablocks_core", "cpp"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    return subprocess.run(
        [*command, "--disable-pip-version-check", "-w", str(folder), str(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}


@pytest.fixture(scope="module")
def native_wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    done = build(folder, MEGABLOCKS_REQUIRE_NATIVE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pure")
    done = build(folder, **NO_COMPILER, MEGABLOCKS_REQUIRE_NATIVE="")
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(params=["pure", pytest.param("native", marks=pytest.mark.slow)])
def wheel(request):
    """Either; what is Python in them is packed alike, and one builds in a tenth of the time."""
    return request.getfixturevalue(f"{request.param}_wheel")


@pytest.mark.slow
def test_the_native_wheel_holds_the_extension_and_its_types(native_wheel):
    names = zipfile.ZipFile(native_wheel).namelist()
    assert sum(name.startswith("megablocks_core/_native.") for name in names) == 2


def test_the_wheel_holds_the_types_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "megablocks_core/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"megablocks_core"}
    assert not [name for name in names if "test_" in name or name.endswith((".cpp", ".hpp"))]


def test_the_wheel_requires_only_what_every_user_needs(wheel):
    with zipfile.ZipFile(wheel) as opened:
        path = next(name for name in opened.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(opened.read(path).decode())
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    required = {each.name for each in requirements if each.marker is None}
    assert required == {"torch", "numpy", "safetensors", "xxhash"}
    assert metadata["Version"] == megablocks_core.__version__
    assert metadata["License-Expression"] == "Apache-2.0"


def test_f_213_without_a_compiler_the_wheel_is_pure(pure_wheel):
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(pure_wheel).namelist() if name.endswith(".so")]


def test_f_213_two_ranks_start_together_from_read_only_files_without_a_compiler(
    pure_wheel, tmp_path
):
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(pure_wheel).extractall(site)
    empty.mkdir()
    for path in [site, *site.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(site.rglob("*"))
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
import json
import numpy as np
from megablocks_core.data import gather
assert gather.__file__.startswith({str(site)!r}) and gather._native is None
out = np.zeros(5, dtype=np.int64)
starts, lengths = np.array([7, 2]), np.array([2, 3])
gather.gather_tokens(np.arange(9, dtype=np.uint16), starts, lengths, out=out, threads=2)
print(json.dumps(out.tolist()))
"""
    environment = {"PATH": str(empty), "PYTHONDONTWRITEBYTECODE": "1", **NO_COMPILER}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, cwd=empty, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    assert [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks] == [[7, 8, 2, 3, 4]] * 2
    assert sorted(site.rglob("*")) == before
    for path in [site, *site.rglob("*")]:
        path.chmod(0o755)


def test_f_213_a_required_extension_that_does_not_build_is_an_error(tmp_path):
    done = build(tmp_path, **NO_COMPILER, MEGABLOCKS_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert not list(tmp_path.glob("*.whl"))
