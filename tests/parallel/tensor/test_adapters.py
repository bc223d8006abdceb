"""Adapters send and keep what they promise, and are copied, stored and compiled with a model."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, Mesh, Segment, marks, whole_tensor
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    add_lora,
    column_linears,
    tensor_parallelize,
)
from megablocks_core.parallel.tensor.adapters import LoraFactor, adapted_layers
from megablocks_core.testing import ranks
from tests.parallel.lora_models import fill
from tests.parallel.tiny_models import tiny_model
from tests.traffic import Traffic


def _world() -> Group:
    return Group.of(dist.group.WORLD)


class _Block(nn.Module):
    """Two columns on one input, and a row."""

    def __init__(self, group, sequence_parallel=False):
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "group": group}
        self.gate = ColumnParallelLinear(8, 12, **options)
        self.up = ColumnParallelLinear(8, 12, **options)
        self.down = RowParallelLinear(12, 8, **options)

    def forward(self, x):
        gate, up = column_linears(x, self.gate, self.up)
        return self.down(gate * up)


class _Apart(_Block):
    """The same, each layer called by itself."""

    def forward(self, x):
        return self.down(self.gate(x) * self.up(x))


def _adapted(group, kind=_Block, **options):
    torch.manual_seed(0)
    block = kind(group, **options)
    add_lora(block, "*", rank=2, alpha=4)
    return fill(block)


@ranks(2, 4)
def test_a_block_sends_one_small_message_more_without_sequence_parallelism():
    block = _adapted(_world())
    x = torch.ones(3, 8, requires_grad=True)
    with Traffic() as forward:
        y = block(x)
    with Traffic() as backward:
        y.sum().backward()
    assert forward.counts() == {"all_reduce": 1}
    assert backward.counts() == {"all_reduce": 2}


@ranks(2)
def test_under_sequence_parallelism_only_low_rank_features_are_gathered_more():
    block = _adapted(_world(), sequence_parallel=True)
    x = torch.ones(3, 8, requires_grad=True)
    with Traffic() as forward:
        y = block(x)
    with Traffic() as backward:
        y.sum().backward()
    # Its frozen base gathers no input again.
    assert forward.counts() == {"all_gather": 2, "reduce_scatter": 1}
    assert backward.counts() == {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 1}


@ranks(2)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_layers_that_are_called_from_elsewhere_sum_their_own(elsewhere):
    whole, block = _adapted(LOCAL), _adapted(_world())
    x = torch.ones(3, 8)
    whole(x).square().sum().backward()
    y = block.down(block.gate(x) * block.up(x)) if elsewhere else block(x)
    y.square().sum().backward()
    for name, parameter, specs in marks(block):
        if parameter.requires_grad:
            gradient = whole_tensor(parameter.grad, specs)
            assert_close(gradient, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-4)


@ranks(4)
def test_a_transformers_block_sends_one_message_for_all_its_adapters():
    torch.manual_seed(0)
    model = tiny_model("llama", num_key_value_heads=2)
    add_lora(model, "*_proj", rank=2, alpha=4)
    fill(model)
    tensor_parallelize(model, group=_world())
    tokens = torch.arange(8).view(1, 8)
    with Traffic() as plain:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    # Embedding and, in each of two layers, attention and feed-forward; backward these but for
    # the first layer's input, which no adapter lies before, and in each layer one message for
    # each block's adapters and one for keys and values that neighbours hold too.
    assert plain.counts()["all_reduce"] == 1 + 4 + (4 - 1) + 2 * 3 + 1


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, nn.Linear])
def test_a_frozen_base_keeps_no_input_and_computes_no_gradient(kind):
    """Kept are the input once, for A, and the low-rank features."""
    model = nn.Sequential(kind(64, 32))
    add_lora(model, "0", rank=4, alpha=8)
    y, kept = _kept(model, torch.randn(10, 64, requires_grad=True))
    assert kept == [10 * 4, 10 * 64]
    y.sum().backward()
    assert model[0].weight.grad is None and model[0].bias.grad is None


@ranks(2)
def test_sequence_parallel_columns_keep_own_tokens_and_low_rank_features():
    group = _world()
    column = nn.Sequential(ColumnParallelLinear(64, 32, sequence_parallel=True, group=group))
    add_lora(column, "0", rank=4, alpha=8)
    _, kept = _kept(column, torch.randn(10, 64, requires_grad=True))
    assert kept == [20 * 4, 10 * 64]


def _kept(model, x):
    """What ``model`` gives, and the elements of each tensor that it keeps beside its weights."""
    weights = {p.data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = model(x)
    return y, sorted(kept.values())


@pytest.mark.parametrize("trained", ["weight", "lora_A.weight", "lora_B.weight"])
def test_what_is_trained_may_change_at_any_time(trained):
    model = _adapted(LOCAL)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.get_parameter(f"up.{trained}").requires_grad_()
    model(torch.ones(3, 8)).sum().backward()
    grads = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert grads == [f"up.{trained}"]


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_base_that_thaws_has_the_gradients_of_one_process(sequence_parallel):
    group = _world()
    whole, cut = _adapted(LOCAL), _adapted(group, sequence_parallel=sequence_parallel)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for block in (whole, cut):
        block.double().gate.weight.requires_grad_()
        block.down.get_parameter("lora_B.weight").requires_grad_(False)
    whole(x.double()).square().sum().backward()
    own = x.double().chunk(group.size)[group.rank] if sequence_parallel else x.double()
    cut(own).square().sum().backward()
    rows = slice(group.rank * 6, group.rank * 6 + 6)
    assert_close(cut.gate.weight.grad, whole.gate.weight.grad[rows])
    assert_close(
        cut.gate.get_parameter("lora_A.weight").grad, whole.gate.get_parameter("lora_A.weight").grad
    )
    assert_close(
        cut.gate.get_parameter("lora_B.weight").grad,
        whole.gate.get_parameter("lora_B.weight").grad[rows],
    )
    assert cut.down.get_parameter("lora_B.weight").grad is None


@ranks(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_blocks_compile_into_one_graph(sequence_parallel):
    block = _adapted(_world(), sequence_parallel=sequence_parallel)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for _ in range(2):
        factors = [p for p in block.parameters() if p.requires_grad]
        ours = torch.autograd.grad(compiled(x).square().sum(), [x, *factors])
        theirs = torch.autograd.grad(block(x).square().sum(), [x, *factors])
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("kind", [nn.Embedding, VocabParallelEmbedding])
def test_a_padding_row_has_no_gradient(kind):
    model = nn.Sequential(kind(9, 8, padding_idx=3))
    add_lora(model, "0", rank=2, alpha=4)
    fill(model)
    ids = torch.tensor([1, 3, 3])
    a, b = (model.get_parameter(f"0.lora_embedding_{x}.weight") for x in "AB")
    assert_close(model(ids), model.get_parameter("0.weight")[ids] + 2 * (b @ a).T[ids])
    model(ids).sum().backward()
    assert a.grad.any(0).nonzero().flatten().tolist() == [1]


def test_torch_layers_compile_into_one_graph():
    model = nn.Sequential(nn.Embedding(9, 8, padding_idx=3), nn.Linear(8, 8), nn.Linear(8, 9))
    add_lora(model, "*", rank=2, alpha=4)
    fill(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.arange(9)
    assert_close(compiled(ids), model(ids))


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_copies_have_adapters_of_their_own(way):
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    block = nn.Sequential(model, _Block(LOCAL))
    add_lora(block, ["0.0", "0.1", "gate", "down"], rank=2, alpha=4)
    fill(block)
    ids = torch.arange(9)
    y = block(ids)
    if way == "deepcopy":
        twin = copy.deepcopy(block)
    else:
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    assert torch.equal(twin(ids), y)
    assert len(list(adapted_layers(twin))) == 4
    twin(ids).sum().backward()
    assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)


def test_packed_columns_of_16_bits_sum_in_their_own_type():
    column = nn.Sequential(ColumnParallelLinear(8, 8, segments=(Segment(4), Segment(4))))
    column.to(torch.bfloat16)
    add_lora(column, "0", rank=2, alpha=4, dtype=torch.float32)
    assert {p.dtype for p in column.parameters() if p.requires_grad} == {torch.float32}
    assert column(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_factors_start_by_the_whole_number_of_inputs():
    model = nn.Sequential(nn.Linear(400, 64))
    add_lora(model, "0", rank=32, alpha=4, seed=1)
    a = model.get_parameter("0.lora_A.weight").detach()
    bound = 400**-0.5
    assert a.abs().max() <= bound and abs(a.std().item() - bound / 3**0.5) < 0.02 * bound
    assert not model.get_parameter("0.lora_B.weight").any()
    assert repr(model[0].lora_A) == "LoraFactor([32, 400])"
    assert isinstance(model[0].lora_A, LoraFactor)


@ranks(4)
@pytest.mark.parametrize("unit", ["block", "layer"])
def test_sharded_adapters_have_the_gradients_of_one_process(unit):
    mesh = Mesh(tp=2, dp=2)
    whole = _adapted(LOCAL)
    cut = _adapted(mesh.group("tp"), _Apart if unit == "layer" else _Block)
    over = mesh.to_device_mesh()["dp"]
    for layer in (cut.gate, cut.up, cut.down) if unit == "layer" else ():
        fully_shard(layer, mesh=over)
    fully_shard(cut, mesh=over)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    whole(x).square().sum().backward()
    cut(x.chunk(2)[mesh.group("dp").rank]).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    trained = [(name, p, specs) for name, p, specs in marks(cut) if p.requires_grad]
    assert len(trained) == 6
    for name, parameter, specs in trained:
        gradient = whole_tensor(parameter.grad, specs) * 2  # fully_shard takes the mean
        assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_have_the_sizes_of_the_table(sequence_parallel):
    """With T=6, I=8, O=12 and R=2: the table of docs/traffic.md."""
    block = _adapted(_world(), sequence_parallel=sequence_parallel)
    x = torch.ones(3 if sequence_parallel else 6, 8, requires_grad=True)
    with Traffic() as forward:
        y = block(x)
    with Traffic() as backward:
        y.sum().backward()
    factors = 2 * (2 * 8) + 8 * 2
    if sequence_parallel:
        assert forward.sorted_sizes() == {"all_gather": [6 * 4, 6 * 8], "reduce_scatter": [6 * 8]}
        assert backward.sorted_sizes() == {
            "all_gather": [6 * 8],
            "reduce_scatter": [6 * 4, 6 * 8],
            "all_reduce": [factors],
        }
    else:
        assert forward.sorted_sizes() == {"all_reduce": [6 * 8]}
        assert backward.sorted_sizes() == {"all_reduce": sorted([6 * 8, factors])}
