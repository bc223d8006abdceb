"""A place is a plain tuple: it compares, sorts and prints."""

from megablocks_core.data import Place


def test_a_place_compares_as_its_parts():
    place = Place("web", [(3, 0, 7)])
    assert place == ("web", [(3, 0, 7)])
    assert sorted([place, Place("code", [(9, 1, 2)])])[1] is place
    assert place.documents[0] == (3, 0, 7)
