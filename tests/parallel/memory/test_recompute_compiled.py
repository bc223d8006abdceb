"""A recomputed call compiles whole, and compiled code recomputes."""

from functools import partial
from itertools import product

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from megablocks_core.groups import Mesh
from megablocks_core.parallel.memory.recompute import recompute
from megablocks_core.parallel.memory.replay import remember
from megablocks_core.testing import ranks
from tests.parallel.recompute_blocks import CALLS, assert_same_bits, block_of, ramp, results_of

_COMPILED = {name: CALLS[name] for name in ("whole", "twice nested", "into", "keeps")}


def _remembering(block, x):
    return recompute(lambda x: block(x.gather(-1, remember(lambda: x.argsort(-1)))), x)


@pytest.mark.filterwarnings("ignore:.*context_fn.*")
@pytest.mark.parametrize("name", [*_COMPILED, "remembering"])
def test_it_compiles_whole(name):
    block = block_of()
    call = partial(_COMPILED.get(name, _remembering), block)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same_bits(results_of(block, compiled, ramp(4, 8)), results_of(block, call, ramp(4, 8)))


_ONCE_EACH = [(False, "whole"), (False, "keeps"), (True, "twice nested"), (True, "into")]


@ranks(2, timeout=180)
@pytest.mark.parametrize(
    ("sequence_parallel", "name"),
    [
        pytest.param(*pair, marks=[] if pair in _ONCE_EACH else pytest.mark.slow)
        for pair in product((False, True), _COMPILED)
    ],
)
def test_it_compiles_whole_on_two_ranks(sequence_parallel, name):
    block = block_of(Mesh(tp=2).group("tp"), sequence_parallel=sequence_parallel)
    torch._dynamo.reset()
    compiled = torch.compile(partial(_COMPILED[name], block), fullgraph=True, backend="aot_eager")
    ours = results_of(block, compiled, ramp(4, 8))
    for pair in zip(ours, results_of(block, block, ramp(4, 8)), strict=True):
        torch.testing.assert_close(*pair)


def test_compiled_code_recomputes():
    """The graph of backward computes ``sin`` again, which it otherwise would have kept."""
    graphs = []

    def note(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    for call in (lambda x: x.sin().exp(), partial(recompute, lambda x: x.sin().exp())):
        torch._dynamo.reset()
        y = torch.compile(call, fullgraph=True, backend=backend)(ramp(4).requires_grad_())
        y.sum().backward()
    assert [sum("sin.default" in name for name in graph) for graph in graphs] == [1, 0, 1, 1]


@ranks(2)
def test_cut_over_in_compiled_code_raises():
    torch._dynamo.reset()
    call = partial(recompute, torch.exp, cut_over=Mesh(tp=2).group("tp"))
    with pytest.raises(Exception, match=r"cut_over=.* must be LOCAL in compiled code"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(torch.ones(2, requires_grad=True))
