"""read_tokens.py prints what it says, alone and beside another rank, on any text."""

import re

import pytest

from examples import read_tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_runs_as_a_script(ranks, printed):
    for output in printed("read_tokens.py", ranks=ranks):
        assert re.match(r"wrote \d+ documents, \d+ tokens\nfirst document begins '", output)
        assert output.endswith("resumed at sample 16 with other micro-batches: same tokens True\n")


def test_it_reads_the_text_that_it_is_given(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    for name in "abcdefghij":
        (text / f"{name}.txt").write_text(name * 200)
    read_tokens.main([str(text)], str(tmp_path))
    assert "wrote 10 documents, 2010 tokens" in capsys.readouterr().out
