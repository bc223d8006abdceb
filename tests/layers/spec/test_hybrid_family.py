"""A family knows which entries a pattern has, and which any has."""

from megablocks_core.layers.spec.hybrid_families import HYBRIDS
from megablocks_core.layers.spec.hybrid_family import HybridFamily

FAMILY = HybridFamily(
    "X",
    None,
    lambda _: "M",
    lambda _: {},
    {"": {"vocab_size": "vocab_size"}, "M": {"state": "mamba.state_size"}, "*": {"heads": "n"}},
)


def test_entries_follow_the_blocks():
    assert FAMILY.used("MM") == {"vocab_size": "vocab_size", "state": "mamba.state_size"}
    assert FAMILY.used("*") == {"vocab_size": "vocab_size", "heads": "n"}
    assert FAMILY.every_entry() == {"vocab_size", "state", "heads"}


def test_absent_entries_have_a_meaning_or_must_be_there():
    """No default is of an entry that no table names, but for those that others imply."""
    implied = {"expand", "mamba_expand", "residual_in_fp32"}
    for name, family in HYBRIDS.items():
        assert set(family.defaults) <= family.every_entry() | implied, name
