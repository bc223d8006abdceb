"""blend_tokens.py mixes as it says, and no sample comes twice when the mix changes."""

import re


def test_it_runs_as_a_script(printed):
    (output,) = printed("blend_tokens.py")
    first, second, twice = output.splitlines()
    given = [
        {name: int(count) for name, count in re.findall(r"'(\w+)': (\d+)", line)}
        for line in (first, second)
    ]
    assert [sum(counts.values()) for counts in given] == [100, 100]
    assert 10 < given[0]["json"] < 30
    assert 40 < given[1]["json"] < 60
    assert twice == "samples that came twice: 0"
