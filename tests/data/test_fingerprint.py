"""Names of recipes are short, the same everywhere, and change with every fact."""

import numpy as np

from megablocks_core.data import Split
from megablocks_core.data.fingerprint import facts_of_split, fingerprint


def test_a_fingerprint_does_not_depend_on_the_order_of_its_facts_or_on_the_machine():
    assert fingerprint(b=2, a=[1, "x"]) == fingerprint(a=[1, "x"], b=2) == "65989928e381c0cc"


def test_numbers_of_numpy_are_the_numbers_they_are():
    assert fingerprint(a=np.int64(3), b=np.float64(0.1)) == fingerprint(a=3, b=0.1)


def test_every_fact_counts():
    facts = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": None}, {"a": [1]}, {"a": 1, "b": 1}]
    assert len({fingerprint(**each) for each in facts}) == len(facts)


def test_a_split_is_told_by_its_documents_and_not_by_its_name():
    splits = [range(3), range(1, 3), np.array([0, 1, 2]), np.array([0, 1, 3]), np.array([0, 1])]
    facts = [facts_of_split(Split("s", documents)) for documents in splits]
    assert len({fingerprint(split=each) for each in facts}) == len(splits)
    assert facts[0] == facts_of_split(Split("other", range(3)))
