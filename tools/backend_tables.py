"""The tables of docs/backends.md, from the code: what back ends of attention serve, which recipes.

python tools/backend_tables.py          # print them
python tools/backend_tables.py --write  # put them into the page
"""

import sys
from dataclasses import fields
from pathlib import Path

from megablocks_core.layers.attention.backends import CAPABILITIES, Capabilities
from megablocks_core.parallel.recipes.recipe import RECIPES

PAGE = Path(__file__).parents[1] / "docs" / "backends.md"
# Fields that say yes or no, and what a column calls them.
SERVES = {
    "documents": "`cu_seqlens`",
    "pads": "`cu_seqlens_padded`",
    "window": "`window`",
    "soft_cap": "`soft_cap`",
    "sinks": "`sinks`",
    "document_sinks": "`sinks` with `cu_seqlens`",
    "dropout": "`dropout`",
    "lengths": "other numbers of keys",
    "value_width": "other widths of values",
    "float32": "float32",
    "float64": "float64",
    "cpu": "CPU",
    "cpu_gradients": "CPU gradients",
}
EXTRAS = {
    "flash_attn": "`flash`",
    "transformer_engine": "`te`",
    "flash_attn_interface": "none, built from source",
}
THEIRS = {
    "DelayedScaling": "DelayedScaling",
    "CurrentScaling": "Float8CurrentScaling",
    "BlockScaling": "Float8BlockScaling",
    "MXFP8": "MXFP8BlockScaling",
    "NVFP4": "NVFP4BlockScaling",
}


def attention_table() -> str:
    """A row for each back end, in the order in which "auto" tries them."""
    names = list(CAPABILITIES)
    columns = ["served", *(f"`{name}`" for name in names)]
    rows = [
        [words, *("yes" if getattr(able, field) else "no" for able in CAPABILITIES.values())]
        for field, words in SERVES.items()
    ]
    rows.append(["largest width of heads", *map(_width, CAPABILITIES.values())])
    rows.append(["compute capability", *map(_devices, CAPABILITIES.values())])
    rows.append(["extra", *map(_extra, CAPABILITIES.values())])
    return _table(columns, rows)


def recipe_table() -> str:
    """A row for each recipe: what it is, its options, and Transformer Engine's class."""
    rows = []
    for kind in RECIPES:
        options = ", ".join(f"`{field.name}={field.default!r}`" for field in fields(kind))
        what = (kind.__doc__ or "").split("\n")[0].rstrip(".")
        rows.append([f"`{kind.__name__}`", what, options, f"`{THEIRS[kind.__name__]}`"])
    return _table(
        ["recipe", "what it is", "options and their defaults", "Transformer Engine's"], rows
    )


TABLES = {"attention": attention_table, "recipes": recipe_table}


def with_tables(page: str) -> str:
    """The page with the tables of now.

    Raises:
        ValueError: The page lacks the lines between which a table stands.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: tools/backend_tables.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(f"the page must have a line {begin.strip()!r} and {end.strip()!r}")
        page = before + begin + table() + end + after
    return page


def _width(able: Capabilities) -> str:
    return "any" if able.max_width is None else str(able.max_width)


def _devices(able: Capabilities) -> str:
    if able.module is None:
        return "any"
    first, last = (f"{major}.{minor}" for major, minor in able.devices)
    return f"from {first}" if able.devices[1][0] == 99 else f"{first} to {last}"


def _extra(able: Capabilities) -> str:
    return "none" if able.module is None else EXTRAS[able.module]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_tables(PAGE.read_text()))
    else:
        print("\n".join(table() for table in TABLES.values()), end="")
