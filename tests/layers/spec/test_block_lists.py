"""Lists of blocks in configs become patterns, and patterns become lists that read alike."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.layers.spec.block_lists import (
    read_count,
    read_pairs,
    read_singles,
    write_count,
    write_layer_types,
    write_places,
    write_singles,
)
from megablocks_core.layers.spec.entries import Entries


@given(st.text("M*-E", min_size=1, max_size=12))
def test_singles_read_alike(pattern: str):
    assert read_singles(Entries(write_singles(pattern))) == pattern


@given(st.text("M*", min_size=1, max_size=8), st.sampled_from("-E"))
def test_pairs_read_alike(mixers: str, second: str):
    pattern = "".join(letter + second for letter in mixers)
    types = {"num_local_experts": 4, **write_layer_types(pattern)}
    assert read_pairs(Entries(types)) == pattern
    if second == "-":
        assert read_pairs(Entries(write_places(pattern))) == pattern


def test_a_count_is_of_mamba_blocks():
    assert read_count(Entries(write_count("MMM"))) == "MMM"


def test_lists_have_old_and_new_names():
    names = ["mamba", "linear_attention", "attention", "full_attention", "mlp", "moe"]
    assert read_singles(Entries({"layers_block_type": names})) == "MM**-E"
    assert read_pairs(Entries({"layer_types": names[1:3], "num_hidden_layers": 2})) == "M-*-"


@pytest.mark.parametrize(
    ("read", "config"),
    [
        (read_singles, {}),
        (read_singles, {"layers_block_type": ["mamba", "delta"]}),
        (read_singles, {"hybrid_override_pattern": "M*", "num_hidden_layers": 3}),
        (read_pairs, {"num_hidden_layers": 2, "layer_types": ["mamba"]}),
        (read_pairs, {"num_hidden_layers": 1, "layer_types": ["mlp"]}),
    ],
)
def test_lists_that_make_no_pattern_are_named(read: Any, config: dict[str, Any]):
    with pytest.raises(ValueError, match="layers_block_type|num_hidden_layers|layer_types"):
        read(Entries(config))


@pytest.mark.parametrize(
    ("write", "pattern"),
    [
        (write_count, "M*"),
        (write_singles, "MG"),
        (write_places, "M"),
        (write_places, "M-*E"),
        (write_layer_types, "-M"),
    ],
)
def test_patterns_that_a_config_cannot_tell_are_named(write: Any, pattern: str):
    with pytest.raises(ValueError, match="pattern="):
        write(pattern)
