"""The page of back ends has the tables of the code."""

import pytest

from megablocks_core.layers.attention.backends import CAPABILITIES, Capabilities
from megablocks_core.parallel.recipes import to_transformer_engine
from megablocks_core.parallel.recipes.recipe import RECIPES
from tests.parallel.transformer_engine import fake
from tools.backend_tables import (
    EXTRAS,
    PAGE,
    SERVES,
    THEIRS,
    attention_table,
    recipe_table,
    with_tables,
)


def test_the_page_has_the_tables_of_the_code():
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python tools/backend_tables.py --write"


def test_every_capability_and_package_has_its_words():
    told = {"max_width", "devices", "module"}
    assert set(SERVES) == set(Capabilities._fields) - told
    assert set(EXTRAS) == {able.module for able in CAPABILITIES.values()} - {None}
    heading = attention_table().splitlines()[0]
    assert all(f"`{name}`" in heading for name in CAPABILITIES)


def test_every_recipe_is_transformer_engines_of_that_name():
    assert set(THEIRS) == {kind.__name__ for kind in RECIPES}
    assert recipe_table().count("\n") == len(RECIPES) + 2
    with fake.installed():
        for kind in RECIPES:
            assert type(to_transformer_engine(kind())).__name__ == THEIRS[kind.__name__]


def test_a_page_without_the_lines_is_refused():
    with pytest.raises(ValueError, match="must have a line '<!-- attention"):
        with_tables("a page without")
