"""The page has the families of the code, each with a phrase and who serves it."""

import pytest

from megablocks_core.export.families import FAMILIES
from megablocks_core.layers import DecoderSpec
from tools.family_table import BEGIN, DIFFERS, END, MISSING, PAGE, served, table, with_table


def test_the_page_has_the_table_of_the_code():
    page = PAGE.read_text()
    assert with_table(page) == page, "run python tools/family_table.py --write"
    assert table().count("\n") == len(FAMILIES) + 3


def test_every_family_has_a_phrase_and_no_other_has():
    assert set(DIFFERS) == set(FAMILIES)
    assert set(MISSING) <= set(FAMILIES)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_a_decoder_is_said_to_lack_it_refuses(family):
    with pytest.raises(ValueError) as caught:
        DecoderSpec.from_hf({"model_type": family})
    refused = "a Decoder has no" in str(caught.value)
    assert refused == served(family).startswith("no ")
    if refused:
        assert served(family).removeprefix("no ") in str(caught.value)


def test_another_table_is_put_in_the_place_of_the_old_one():
    assert with_table(f"a\n{BEGIN}old\n{END}b\n") == f"a\n{BEGIN}{table()}{END}b\n"
    with pytest.raises(ValueError, match="must have a line"):
        with_table("a page without")
