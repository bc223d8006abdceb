"""The page has the formats and families of the code."""

import pytest

from megablocks_core.export.quantising.recipe import RECIPES
from megablocks_core.export.trtllm.model import SERVED
from tools.export_tables import END, MARK, PAGE, TABLES, families, formats, with_tables


def test_the_page_has_the_tables_of_the_code():
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python tools/export_tables.py --write"


def test_every_recipe_and_family_has_a_row():
    assert formats().count("\n") == len(RECIPES) + 2
    assert families().count("\n") == len(SERVED) + 2
    for name, kind in RECIPES.items():
        assert f"| `{kind.__name__}()` | `{name}` |" in formats()
    assert "`k_proj.weight_scale_inv` F32 [4 12] |" in formats()
    assert "| `gpt2` | `GPTForCausalLM` | `GPT2LMHeadModel` |" in families()


def test_other_tables_are_put_in_the_place_of_old_ones():
    old, new = (
        "a\n" + "b\n".join(MARK.format(name) + text() + END.format(name) for name, text in pairs)
        for pairs in ([(name, lambda: "old\n") for name in TABLES], TABLES.items())
    )
    assert with_tables(old) == new
    with pytest.raises(ValueError, match="must have a line"):
        with_tables("a page without")
