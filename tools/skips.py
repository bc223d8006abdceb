"""Sums up JUnit reports; fails when a test that an oracle stands behind ran in none of them.

    python tools/skips.py REPORT.xml...

Prints each test that every report skipped, with the reason, then one line of counts. A reason that
names an oracle ("oracle megatron") fails, since ``tools/oracles.sh`` can install each of them.
"""

import sys
import xml.etree.ElementTree as ET


def outcomes(reports: list[str]) -> dict[str, str]:
    """Return the outcome of every test: "passed", "failed", or why it was skipped everywhere."""
    found: dict[str, str] = {}
    for case in (case for report in reports for case in ET.parse(report).iter("testcase")):
        module, name = case.get("classname", ""), case.get("name", "")
        test = f"{module}::{name}" if module else name  # a module skipped whole has no class name
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found[test] = "failed"
        elif skipped is not None:
            found.setdefault(test, skipped.get("message", "no reason"))
        elif found.get(test) != "failed":
            found[test] = "passed"
    modules_that_ran = {test.split("::")[0] for test in found if "::" in test}
    return {test: outcome for test, outcome in found.items() if test not in modules_that_ran}


def main(reports: list[str]) -> int:
    """Print the summary; return 1 if a test failed or an oracle's test was skipped."""
    found = outcomes(reports)
    passed, failed = (list(found.values()).count(outcome) for outcome in ("passed", "failed"))
    skipped = {test: why for test, why in found.items() if why not in ("passed", "failed")}
    for test, why in skipped.items():
        print(f"skipped {test}: {why}")
    print(f"{passed} passed, {failed} failed, {len(skipped)} skipped")
    return int(failed > 0 or any("oracle " in why for why in skipped.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
