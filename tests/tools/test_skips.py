"""The summary of CI's reports counts each test once and fails for a skipped oracle."""

import pytest

from tools.skips import main

PASSED = '<testcase classname="tests.a" name="t"/>'
FAILED = '<testcase classname="tests.a" name="t"><failure message="m"/></testcase>'
SKIPPED = '<testcase classname="tests.a" name="t"><skipped message="{}"/></testcase>'
MODULE_SKIPPED = '<testcase classname="" name="tests.a"><skipped message="oracle x"/></testcase>'


@pytest.mark.parametrize(
    ("reports", "code", "summary"),
    [
        ([PASSED], 0, "1 passed, 0 failed, 0 skipped"),
        ([FAILED], 1, "0 passed, 1 failed, 0 skipped"),
        ([PASSED, FAILED], 1, "0 passed, 1 failed, 0 skipped"),
        ([FAILED, PASSED], 1, "0 passed, 1 failed, 0 skipped"),
        ([SKIPPED.format("needs a GPU")], 0, "0 passed, 0 failed, 1 skipped"),
        ([SKIPPED.format("oracle x")], 1, "0 passed, 0 failed, 1 skipped"),
        ([SKIPPED.format("oracle x"), PASSED], 0, "1 passed, 0 failed, 0 skipped"),
        ([PASSED, SKIPPED.format("oracle x")], 0, "1 passed, 0 failed, 0 skipped"),
        ([MODULE_SKIPPED], 1, "0 passed, 0 failed, 1 skipped"),
        ([MODULE_SKIPPED, PASSED], 0, "1 passed, 0 failed, 0 skipped"),
    ],
)
def test_summary_and_exit_status(tmp_path, capsys, reports, code, summary):
    for i, report in enumerate(reports):
        (tmp_path / f"{i}.xml").write_text(f"<testsuites>{report}</testsuites>")
    assert main(sorted(map(str, tmp_path.glob("*.xml")))) == code
    assert capsys.readouterr().out.splitlines()[-1] == summary
