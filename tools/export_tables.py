"""The tables of docs/export.md, from the code: formats and their tensors, and who is served.

python tools/export_tables.py          # print them
python tools/export_tables.py --write  # put them into the page
"""

import sys
from pathlib import Path

from megablocks_core.export.families import FAMILIES
from megablocks_core.export.quantising.config import Settings, quantization_file
from megablocks_core.export.quantising.recipe import RECIPES, Recipe
from megablocks_core.export.quantising.weights import cache_scales, schema_of
from megablocks_core.export.trtllm.config import ARCHITECTURES
from megablocks_core.export.trtllm.model import SERVED
from megablocks_core.files.safetensors import DTYPE_CODES

PAGE = Path(__file__).parents[1] / "docs" / "export.md"
MARK = "<!-- {}: tools/export_tables.py -->\n"
END = "<!-- end of {} -->\n"
# A weight of these sizes has every tensor in a shape of its own.
ROWS, COLUMNS = 512, 1536
_MODULE = "X.k_proj"


def formats() -> str:
    """What stands for a weight [512 1536] in each format."""
    rows = [
        "| recipe | `--recipe` | `quant_algo` | needs data | what stands for `k_proj.weight` "
        f"[{ROWS} {COLUMNS}] |",
        "|---|---|---|---|---|",
    ]
    for name, kind in RECIPES.items():
        recipe = kind()
        algorithm = f"`{recipe.algorithm}`" if quantization_file(Settings(recipe, ())) else "none"
        needs = "yes" if recipe.is_calibrated else "no"
        rows.append(
            f"| `{kind.__name__}()` | `{name}` | {algorithm} | {needs} | {_tensors(recipe)} |"
        )
    return "\n".join(rows) + "\n"


def _tensors(recipe: Recipe) -> str:
    schema = schema_of(recipe, f"{_MODULE}.weight", (ROWS, COLUMNS))
    if recipe.cache_algorithm is not None:
        schema |= dict.fromkeys(cache_scales([f"{_MODULE}.weight"]), ((), None))
    return ", ".join(
        f"`{name.removeprefix('X.')}` {_kind(name, dtype)}{list(shape)}".replace(", ", " ")
        for name, (shape, dtype) in schema.items()
    ).replace("] `", "], `")


def _kind(name: str, dtype: object) -> str:
    if dtype is None:
        return "F32 " if name.endswith(("k_scale", "v_scale")) else "the model's dtype "
    return f"{DTYPE_CODES[dtype]} "  # pyright: ignore[reportArgumentType]


def families() -> str:
    """Which families have a TensorRT-LLM checkpoint, and what it calls them."""
    names = {family: name for name, family in ARCHITECTURES.items()}
    rows = ["| `model_type` | `architecture` | Hugging Face's class |", "|---|---|---|"]
    rows += [
        f"| `{family}` | `{names[family]}` | `{FAMILIES[family].architecture}` |"
        for family in SERVED
    ]
    return "\n".join(rows) + "\n"


TABLES = {"formats": formats, "families": families}


def with_tables(page: str) -> str:
    """The page with the tables of now."""
    for name, table in TABLES.items():
        begin, end = MARK.format(name), END.format(name)
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(
                f"the page must have a line {begin.strip()!r} and a line {end.strip()!r}"
            )
        page = before + begin + table() + end + after
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_tables(PAGE.read_text()))
    else:
        print("\n".join(table() for table in TABLES.values()), end="")
