"""Functions refuse what they cannot compute with, by the argument's name."""

import pytest
import torch
from torch import nn

from megablocks_core.layers.ssm.functions.arguments import (
    check_arguments,
    check_dims,
    check_groups_of_heads,
    check_shapes,
)
from megablocks_core.layers.ssm.functions.convolution import causal_conv1d
from megablocks_core.layers.ssm.functions.delta import gated_delta_rule
from megablocks_core.layers.ssm.functions.selective import selective_scan
from megablocks_core.layers.ssm.functions.ssd import ssd_chunk_scan
from megablocks_core.parallel import SequenceCut

BLH, BLHN = (1, 6, 2), (1, 6, 2, 3)
SHAPES = {
    causal_conv1d: {"x": BLH, "weight": (2, 4), "bias": (2,)},
    selective_scan: {"x": BLH, "dt": BLH, "A": (2, 3), "B": (1, 6, 3), "C": (1, 6, 3), "D": (2,)},
    ssd_chunk_scan: {"x": BLHN, "dt": BLH, "A": (2,), "B": BLHN, "C": BLHN, "D": (2,)},
    gated_delta_rule: {"q": BLHN, "k": BLHN, "v": BLHN, "g": BLH, "beta": BLH},
}
# Sizes that no other argument has, so that another one is another call, and not a wrong one.
FREE = {
    causal_conv1d: [("x", 0), ("x", 1), ("weight", 1)],
    ssd_chunk_scan: [("x", 3)],
    gated_delta_rule: [("v", 3)],
}
WRONG = {
    "list": lambda x: x.tolist(),
    "integers": lambda x: x.long(),
    "truths": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "elsewhere": lambda x: x.to("meta"),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
}
each_function = pytest.mark.parametrize("function", SHAPES, ids=lambda each: each.__name__)


def arguments(function):
    return {name: torch.zeros(shape) for name, shape in SHAPES[function].items()}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@each_function
def test_what_is_no_floating_point_tensor_here_is_named(function, wrong):
    given = arguments(function)
    state = function(**given)[1]
    for name, x in {**given, "initial_state": state}.items():
        named = name if name != next(iter(given)) or not _is_elsewhere(wrong(x)) else "weight|dt|k"
        with pytest.raises(ValueError, match=rf"^({named})\b"):
            function(**{**given, "initial_state": state, name: wrong(x)})


@each_function
def test_no_size_is_broadcast(function):
    for name, shape in SHAPES[function].items():
        for dim, size in enumerate(shape):
            if (name, dim) in FREE.get(function, []):
                continue
            for other in {0, 1, size + 1} - {size}:
                wrong = torch.zeros(*shape[:dim], other, *shape[dim + 1 :])
                with pytest.raises(ValueError, match=r"^\w+ of "):
                    function(**{**arguments(function), name: wrong})
        for wrong in (torch.zeros(shape)[None], torch.zeros(())):
            with pytest.raises(ValueError, match=r"^\w+ of shape"):
                function(**{**arguments(function), name: wrong})


@pytest.mark.parametrize("heads, features, states", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_heads_have_features_and_states(heads, features, states):
    B = torch.zeros(1, 6, 1, states)
    with pytest.raises(ValueError, match="^x of .* at least one"):
        ssd_chunk_scan(
            torch.zeros(1, 6, heads, features), torch.zeros(1, 6, heads), torch.zeros(heads), B, B
        )


def test_keys_have_features():
    with pytest.raises(ValueError, match="^q of shape .* at least one"):
        gated_delta_rule(*(torch.zeros(1, 6, 2, n) for n in (0, 0, 3)), *torch.zeros(2, 1, 6, 2))


def test_shapes_are_those_beside_them():
    x = torch.zeros(2, 3)
    check_dims(x=(x, 2))
    check_shapes(x=(x, (2, 3)), missing=(None, (1,)))
    with pytest.raises(ValueError, match=r"^x of shape \(2, 3\) must have 3 dimensions"):
        check_dims(x=(x, 3))
    with pytest.raises(ValueError, match=r"^x of shape \(2, 3\) must have shape \(1, 3\)"):
        check_shapes(x=(x, (1, 3)))
    check_groups_of_heads(2, 4)
    for groups in (0, 3):
        with pytest.raises(ValueError, match=f"^B of {groups} groups must divide the 4 heads"):
            check_groups_of_heads(groups, 4)


@each_function
def test_documents_are_a_tensor_beside_the_tokens(function):
    for sums in ([0, 6], torch.tensor([0, 6], device="meta")):
        with pytest.raises(ValueError, match="^cu_seqlens"):
            function(**arguments(function), cu_seqlens=sums)


@each_function
def test_a_cut_gives_these_tokens(function):
    for cut in (SequenceCut(3), SequenceCut(5), SequenceCut(12), 6):
        with pytest.raises(ValueError, match="^cut="):
            function(**arguments(function), cut=cut)


@pytest.mark.parametrize(
    "options",
    [{"chunk_size": True}, {"chunk_size": 2.5}, {"chunk_size": 0}, {"return_final_state": "no"}],
)
@each_function
def test_options_are_numbers_and_flags(function, options):
    if function is causal_conv1d and "chunk_size" in options:
        pytest.skip("it has no chunks")
    with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
        function(**arguments(function), **options)


@pytest.mark.parametrize(
    "options", [{"householders": 1.5}, {"householders": True}, {"scale": "a"}, {"scale": torch.inf}]
)
def test_options_of_the_delta_rule(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
        gated_delta_rule(**arguments(gated_delta_rule), **options)


def test_what_is_optional_may_be_missing():
    check_arguments({"D": None}, x=torch.zeros(2))
    check_arguments({"D": nn.Parameter(torch.zeros(2))}, x=torch.zeros(2, dtype=torch.bfloat16))


@each_function
def test_backward_reaches_arguments_without_tokens(function):
    shapes = SHAPES[function]
    given = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tokens = {name: x[:, :0] for name, x in given.items() if x.dim() > 2}
    leaves = {name: x.requires_grad_() for name, x in {**given, **tokens}.items()}
    for sums in (None, torch.tensor([0, 0])):
        y, _ = function(**leaves, cu_seqlens=sums)
        gradients = torch.autograd.grad(y.sum(), list(leaves.values()), allow_unused=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            assert gradient is not None or name not in tokens, name


def _is_elsewhere(x):
    return isinstance(x, torch.Tensor) and x.is_meta
