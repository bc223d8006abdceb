"""What rounded modules share: a recipe is checked before it is taken; cuts and their columns."""

import copy
from typing import Any

import pytest
import torch

from megablocks_core.groups import LOCAL, Mesh, Segment, ShardSpec
from megablocks_core.parallel.recipes import MXFP8, NVFP4, CurrentScaling, DelayedScaling
from megablocks_core.parallel.recipes.emulated import Emulated, check_cut, columns_of
from megablocks_core.parallel.recipes.state import state_for
from megablocks_core.testing import ranks


class Base(torch.nn.Module):
    resets = 0

    def reset_parameters(self, seed=None, prefix=""):
        self.resets += 1


class Module(Emulated, Base):
    def _check(self, recipe):
        if recipe == MXFP8():
            raise ValueError("no blocks here")

    def _own_group(self):
        return LOCAL

    def _new_state(self, recipe):
        state = state_for(recipe)
        return None if state is None else torch.nn.ModuleDict({"a": state})


def test_a_recipe_is_taken_whole_or_not_at_all():
    module: Any = Module()
    module.recipe = DelayedScaling()
    for wrong, message in (("fp8", "recipe='fp8' must be a recipe"), (MXFP8(), "no blocks here")):
        with pytest.raises(ValueError, match=message):
            module.recipe = wrong
        assert module.recipe == DelayedScaling() and "fp8.a.scale_fwd" in module.state_dict()


def test_an_equal_recipe_keeps_the_state_and_another_starts_anew():
    module: Any = Module()
    module.recipe = DelayedScaling()
    module.fp8.a.scale_fwd.fill_(7)
    module.recipe = DelayedScaling()
    assert copy.deepcopy(module).fp8.a.scale_fwd[0] == 7
    module.recipe = DelayedScaling(margin=1)
    assert module.fp8.a.scale_fwd[0] == 1
    module.fp8.a.scale_fwd.fill_(7)
    module.reset_parameters()
    assert module.resets == 1
    assert module.fp8.a.scale_fwd[0] == 1
    module.recipe = CurrentScaling()
    assert not module.state_dict()


@ranks(2)
def test_columns_and_cuts_of_packed_parts():
    tp = Mesh(tp=2).group("tp")
    packed = ShardSpec(0, tp, (Segment(32), Segment(64)))
    columns = columns_of(packed, torch.empty(48, 8))
    assert columns is not None and columns.count == 96
    first = tp.rank * 16
    second = 32 + tp.rank * 32
    assert columns.numbers.tolist() == [*range(first, first + 16), *range(second, second + 32)]
    check_cut(packed, 48, NVFP4())
    check_cut(packed, 48, CurrentScaling())
    with pytest.raises(ValueError, match="blocks of 32, which must lie on one rank each"):
        check_cut(packed, 48, MXFP8())
    # Experts lie on dim 0; columns of a weight that is cut along its inputs are whole.
    stack = torch.empty(4, 16, 8)
    assert columns_of(ShardSpec(2, tp), stack) is None
    rows = columns_of(ShardSpec(1, tp), stack)
    assert rows is not None and rows.numbers.tolist() == list(
        range(tp.rank * 16, tp.rank * 16 + 16)
    )
