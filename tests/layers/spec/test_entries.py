"""Entries are taken, inert or off; anything else raises."""

from types import SimpleNamespace

import pytest

from megablocks_core.layers.spec.entries import Entries, as_dict, rope


def test_what_is_on_and_not_taken_raises_by_name():
    entries = Entries({"size": 3, "extra": True, "off": False, "none": None, "use_cache": True})
    assert entries.need("size") == 3 and "none" in entries.null
    with pytest.raises(ValueError, match="config must have 'size'"):
        entries.need("size")
    with pytest.raises(ValueError, match="does not have: {'extra': True}"):
        entries.finish()
    assert entries.take("extra") is True
    entries.finish()


def test_rotary_entries_have_an_older_and_a_newer_place():
    assert rope(Entries({})) == {"rope_base": 10000.0, "rope_scaling": None}
    new = Entries({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})
    assert rope(new) == rope(Entries({"rope_theta": 5.0}))


def test_configs_are_dicts_or_objects():
    assert as_dict({"a": 1}) == {"a": 1}
    assert as_dict(SimpleNamespace(to_dict=lambda: {"a": 1})) == {"a": 1}
