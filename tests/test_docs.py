"""The pages are true: their code runs, and every public name stands in one of them."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LOOP = ROOT / "docs" / "training_loop.md"  # runs on its own and on two ranks, in one test
PACKAGES = [
    "ckpt",
    "data",
    "data.convert",
    "data.instructions",
    "data.tokenize",
    "data.tools",
    "export",
    "groups",
    "layers",
    "layers.kernels",
    "layers.moe",
    "layers.ssm",
    "parallel",
    "parallel.recipes",
    "testing",
    "train",
]


def code_of(page):
    """The Python blocks of a page, one after another, without those that say ``norun``."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if code_of(page) and page != LOOP], ids=lambda p: p.stem
)
def test_the_code_of_a_page_runs(page, tmp_path, launch):
    (process,) = launch("-c", code_of(page), cwd=tmp_path)
    told = process.communicate()
    assert process.returncode == 0, told


def test_the_loop_is_short_and_two_ranks_train_as_one_does(tmp_path, launch):
    loop = code_of(LOOP)
    assert loop.count("\n") <= 100
    script = tmp_path / "loop.py"
    script.write_text(loop)
    alone, *others = (
        _printed(launch, script, *layout, ranks=ranks, cwd=tmp_path / name)
        for name, ranks, layout in (("alone", 1, []), ("dp", 2, ["1"]), ("tp", 2, ["2"]))
    )
    for printed in others:
        assert printed == pytest.approx(alone, rel=0, abs=1e-5)
    assert max(alone) < 3.0  # from log(257) = 5.5


def _printed(launch, *words, ranks, cwd):
    """The numbers that the first of the ranks prints."""
    cwd.mkdir()
    processes = launch(*words, ranks=ranks, cwd=cwd)
    told = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, told
    return [float(word) for word in told[0][0].split()[1::2]]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_stands_in_a_page(package):
    module = importlib.import_module(f"megablocks_core.{package}")
    names = {
        name
        for name in dir(module)
        if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
    }
    words = set(re.findall(r"\w+", "\n".join(page.read_text() for page in PAGES)))
    assert names <= words


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
