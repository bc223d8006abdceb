"""Which keys a query sees, and which queries see none."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.layers.attention import AttentionSpec
from megablocks_core.layers.attention.backends.sight import first_seeing, hidden_keys
from tests.layers.attention.requests import WINDOWS


@given(st.sampled_from(["causal", "full"]), WINDOWS, st.integers(0, 6), st.integers(0, 6))
def test_what_is_hidden_follows_from_places(mask, window, tokens, keys):
    window = (window[0], window[1] if mask == "full" else None)
    spec = AttentionSpec(mask=mask, window=window)
    hidden = hidden_keys(
        (0, tokens), (0, keys), spec, offset=keys - tokens, device=torch.device("cpu")
    )
    left, right = spec.limits
    rows = []
    for t in range(tokens):
        place = t + keys - tokens
        rows.append(
            [
                (left is None or s >= place - left) and (right is None or s <= place + right)
                for s in range(keys)
            ]
        )
    seen = torch.tensor(rows, dtype=torch.bool).view(tokens, keys)
    assert seen.all() if hidden is None else torch.equal(hidden, ~seen)
    first = first_seeing(tokens, keys, spec)
    assert not seen[:first].any()
    assert seen[first:].any(-1).all()


def test_a_stretch_is_a_part_of_the_whole():
    spec = AttentionSpec(window=(3, None))
    cpu = torch.device("cpu")
    whole = hidden_keys((0, 9), (0, 9), spec, offset=0, device=cpu)
    part = hidden_keys((4, 7), (2, 6), spec, offset=0, device=cpu)
    assert whole is not None and part is not None
    assert torch.equal(part, whole[4:7, 2:6])
