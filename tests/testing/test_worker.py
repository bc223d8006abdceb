"""A worker finds a test's body by file and name and reports how it ended."""

import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megablocks_core.testing import ranks
from megablocks_core.testing.worker import _undone, find

SOURCE = """
    from megablocks_core.testing import ranks

    @ranks(2)
    def test_values(value):
        assert [value] == [3]
    """


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "test_found.py"
    file.write_text(textwrap.dedent(SOURCE))
    yield file
    sys.modules.pop("test_found", None)


def test_what_a_body_patches_is_as_before_at_its_end():
    given = {"monkeypatch": pytest.MonkeyPatch(), "value": 3}
    with pytest.raises(KeyError), _undone(given):
        given["monkeypatch"].setattr(sys, "maxsize", 7)
        raise KeyError
    assert sys.maxsize > 7


def test_a_body_is_found_by_file_and_name_and_its_asserts_show_values(file):
    body = find(str(file), "test_found", "test_values")
    body(value=3)
    with pytest.raises(AssertionError, match=r"\[4\] == \[3\]"):
        body(value=4)
    assert find(str(file), "test_found", "test_values") is body  # imported once


def test_a_module_of_the_same_name_in_another_file_is_not_mistaken(file, tmp_path):
    body = find(str(file), "test_found", "test_values")
    other = tmp_path / "other" / "test_found.py"
    other.parent.mkdir()
    other.write_text(textwrap.dedent(SOURCE))
    assert find(str(other), "test_found", "test_values") is not body


def test_a_file_that_cannot_be_imported_leaves_nothing_behind(tmp_path):
    broken = tmp_path / "test_broken.py"
    broken.write_text("raise KeyError('here')")
    with pytest.raises(KeyError, match="here"):
        find(str(broken), "test_broken", "test_values")
    assert "test_broken" not in sys.modules


@ranks(2)
@pytest.mark.parametrize("num_other_groups", [3, 0])
def test_a_dtensor_has_no_mesh_of_an_earlier_test(num_other_groups):
    for _ in range(num_other_groups):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 1))  # equal to that of the test before
    parameter = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0), Replicate()]))
    assert isinstance(parameter, DTensor)
    assert parameter.device_mesh.get_group(1).size() == 1


def _doubled(x):
    return 2 * x


def _inputs_of_a_compiled_graph(size):
    """The second is the size, where it is not taken as known."""
    inputs = []

    def backend(graph, examples):
        inputs.extend(type(example) for example in examples)
        return graph.forward

    torch.compile(_doubled, backend=backend)(torch.ones(size))
    return inputs


@pytest.mark.parametrize("size", [3, 4, 5])
def test_here_sizes_that_an_earlier_test_compiled_for_are_forgotten(size):
    assert _inputs_of_a_compiled_graph(size) == [torch.Tensor]


@ranks(1)
@pytest.mark.parametrize("size", [3, 4, 5])
def test_on_ranks_sizes_that_an_earlier_test_compiled_for_are_forgotten(size):
    assert _inputs_of_a_compiled_graph(size) == [torch.Tensor]
