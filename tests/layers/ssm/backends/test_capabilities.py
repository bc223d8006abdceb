"""A call that a back end does not serve is refused with what is missing, as the page says."""

import sys
from pathlib import Path

import pytest
import torch

from megablocks_core.layers.ssm.backends import (
    CAPABILITIES,
    Capabilities,
    causal_conv1d,
    fla,
    mamba_ssm,
)
from megablocks_core.layers.ssm.backends.capabilities import refuse_unserved

PAGE = Path(__file__).parents[4] / "docs" / "ssm_backends.md"
NOTHING = {
    "initial_state": None,
    "cu_seqlens": None,
    "cut": None,
    "return_final_state": False,
}
STATE, SUMS = {"initial_state": torch.zeros(1, 2)}, {"cu_seqlens": torch.tensor([0, 3])}
FINAL = {"return_final_state": True}
NEEDS = {
    "initial_states": (STATE, "initial_state"),
    "final_states": (FINAL, "return_final_state"),
    "documents": (SUMS, "cu_seqlens"),
    "document_initial_states": ({**STATE, **SUMS}, "initial_state with cu_seqlens"),
    "document_final_states": ({**FINAL, **SUMS}, "return_final_state with cu_seqlens"),
}


@pytest.mark.parametrize("name", CAPABILITIES)
@pytest.mark.parametrize("field", NEEDS)
def test_what_is_not_there_is_refused(name, field):
    given, named = NEEDS[field]
    call = {**NOTHING, **given}
    if getattr(CAPABILITIES[name], field):
        return refuse_unserved(name, [torch.zeros(1, 3, 2)], **call)
    with pytest.raises(ValueError, match=f"{name} does not serve .*{named}"):
        refuse_unserved(name, [torch.zeros(1, 3, 2)], **call)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_what_none_has_is_refused(name):
    with pytest.raises(ValueError, match="does not serve cut, float64, rows without tokens, that"):
        refuse_unserved(
            name,
            [torch.zeros(1, 0, 2, dtype=torch.float64)],
            **{**NOTHING, "cut": object()},
            other={"that": True, "this": False},
        )


def test_gradients_of_final_states():
    x = torch.zeros(1, 3, 2, requires_grad=True)
    name = "mamba_ssm.selective_scan_fn"
    with pytest.raises(ValueError, match="return_final_state where gradients are taken"):
        refuse_unserved(name, [x], **{**NOTHING, **FINAL})
    with torch.no_grad():
        refuse_unserved(name, [x], **{**NOTHING, **FINAL})


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("mamba_ssm", "mamba", lambda x: mamba_ssm.ssd_chunk_scan(x, x, x, x, x)),
        ("mamba_ssm", "mamba", lambda x: mamba_ssm.selective_scan(x, x, x, x, x)),
        ("causal_conv1d", "conv1d", lambda x: causal_conv1d.causal_conv1d(x, x[0, :, :2])),
        (
            "causal_conv1d",
            "conv1d",
            lambda x: causal_conv1d.causal_conv1d_step(x, x[0, :, :2], state=x),
        ),
        ("fla", "fla", lambda x: fla.gated_delta_rule(x, x, x, x, x)),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, package, extra, call):
    for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {package}: .*megablocks-core\[{extra}\]"):
        call(torch.zeros(1, 8, 8))


def test_the_page_has_the_table():
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `") and line.count("|") == len(Capabilities._fields) + 2
    ]
    found = {row[0].strip("`"): Capabilities(*(cell == "yes" for cell in row[1:])) for row in rows}
    assert found == CAPABILITIES
