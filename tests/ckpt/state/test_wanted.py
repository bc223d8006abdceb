"""What is wanted of a checkpoint, what is missing, and what does not fit."""

import pytest
import torch
from torch import nn

from megablocks_core.ckpt.manifest import Manifest, StoredAs
from megablocks_core.ckpt.state.wanted import Wanted, check_cast, unexpected
from megablocks_core.groups import LOCAL
from tests.ckpt.flat_optimizer import FlatAdam


def _manifest(tensors, **state):
    stored = {name: StoredAs(code, shape, []) for name, (code, shape) in tensors.items()}
    return Manifest(0, state, stored)


def _wanted(state, manifest, cast=None):
    return Wanted(state, manifest, group=LOCAL, cast=cast or {})


def test_names_shapes_and_dtypes_are_compared():
    tensors = {"m/weight": ("F32", (3, 3)), "m/bias": ("BF16", (3,)), "m/old": ("F32", ())}
    manifest = _manifest(tensors, m={"kind": "module"}, gone={"kind": "json", "value": 1})
    wanted = _wanted({"m": nn.Linear(2, 3), "new": 1}, manifest)
    assert wanted.missing == ["new"] and wanted.asked == {"m"}
    assert wanted.faults == [
        "m/weight has shape (3, 2), saved with (3, 3)",
        "m/bias has dtype torch.float32, saved with torch.bfloat16",
    ]
    names = {share.name for share in wanted.shares}
    assert unexpected(manifest, wanted.asked, names) == ["gone", "m/old"]


def test_a_cast_is_allowed_by_name():
    manifest = _manifest({"x/x": ("F32", (2,))}, x={"kind": "tensor"})
    state = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    assert _wanted(state, manifest, {torch.float32: torch.bfloat16}).faults == []
    assert len(_wanted(state, manifest, {torch.bfloat16: torch.float32}).faults) == 1
    with pytest.raises(ValueError, match="must be from and to floating-point dtypes"):
        check_cast({torch.float32: torch.int32})


def test_a_tied_tensor_is_wanted_under_the_names_that_are_stored():
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    net["b"].weight = net["a"].weight
    for stored, names, missing in (
        (["m/b.weight"], ["m/b.weight"], []),
        (["m/a.weight", "m/b.weight"], ["m/a.weight", "m/b.weight"], []),
        ([], [], ["m/a.weight"]),
    ):
        manifest = _manifest(dict.fromkeys(stored, ("F32", (2, 2))), m={"kind": "module"})
        wanted = _wanted({"m": net}, manifest)
        assert ([share.name for share in wanted.shares], wanted.missing) == (names, missing)


def test_kinds_of_optimizers_are_told_apart():
    net = nn.Linear(2, 2)
    flat, sgd = FlatAdam([list(net.parameters())]), torch.optim.SGD(net.parameters())
    for optimizer, value, fault in (
        (flat, {"param_groups": [], "state": {}}, "saved by a torch optimizer"),
        (sgd, {"values": None}, "saved by one of another kind"),
    ):
        manifest = _manifest({}, o={"kind": "optimizer", "value": value}, m={"kind": "module"})
        (found,) = _wanted({"m": net, "o": optimizer}, manifest).faults
        assert fault in found


def test_unexpected_parameters_of_an_optimizer_are_named_once():
    groups = [{"names": ["m/a", "m/b"], "values": {}}]
    entry = {"kind": "optimizer", "value": {"param_groups": groups, "state": {}}}
    manifest = _manifest({"o/m/a/x": ("F32", ()), "o/m/b/x": ("F32", ())}, o=entry)
    assert unexpected(manifest, {"o", "o/m/b"}, {"o/m/b/x"}) == ["o/m/a"]
    assert unexpected(manifest, set(), set()) == ["o"]


def test_values_are_set_at_the_end():
    manifest = _manifest({}, n={"kind": "json", "value": [1, 2]})
    state = {"n": 0}
    wanted = _wanted(state, manifest)
    assert state == {"n": 0}
    wanted.finish(state)
    assert state == {"n": [1, 2]}
