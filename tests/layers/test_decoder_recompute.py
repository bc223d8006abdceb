"""A decoder that recomputes has the bits of one that does not, sends and keeps what pages say."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import DropoutKey, HostBuffers, RecomputePolicy, offload
from megablocks_core.testing import ranks
from tests.traffic import Traffic

F64 = torch.float64
SPEC = DecoderSpec(97, 32, 48, 2, 4, 2, 8, qk_norm=True, family="qwen3")
DROPS = replace(SPEC, hidden_dropout=0.1, attention_dropout=0.1, activation_dropout=0.1)
TOKENS = torch.arange(14).view(2, 7) * 7

POLICIES = {
    "layers": "layers.*",
    "parts": ["layers.*.self_attn", "layers.*.mlp", "layers.*.input_layernorm", "model.norm"],
    "nested": ["layers.*", "self_attn", "q_proj"],
    "every other, with kept results": RecomputePolicy(
        "layers.*", every=2, keep=["matmul", "attention", "messages"]
    ),
    "all": "",
}


def _decoder(recompute, *, mesh=None, sequence_parallel=False, spec=SPEC):
    torch.manual_seed(0)
    return Decoder(
        spec, mesh=mesh, sequence_parallel=sequence_parallel, recompute=recompute, dtype=F64
    )


def _results(decoder, call=None, **arguments):
    call = decoder if call is None else call
    decoder.zero_grad()
    logits = call(TOKENS, gather_logits=True, **arguments).logits
    logits.sin().sum().backward()
    return [logits, *(parameter.grad for parameter in decoder.parameters())]


def _offloaded(decoder, buffers, *args, **arguments):
    with offload(buffers, min_bytes=1, from_host=True):
        return decoder(*args, **arguments)


def _assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@ranks(1, 2, 4, timeout=180)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_has_the_bits_of_no_recomputation_and_no_offload(sequence_parallel):
    """With dropout everywhere; and under ``cut_over``, which whole tokens allow."""
    mesh = Mesh(tp=dist.get_world_size())
    policies = [*POLICIES.values()]
    if not sequence_parallel:
        policies.append(RecomputePolicy("layers.*", cut_over=mesh.group("tp")))
    options = {"mesh": mesh, "sequence_parallel": sequence_parallel, "spec": DROPS}
    dropout = DropoutKey(seed=1, step=2)
    expected = _results(_decoder(None, **options), dropout=dropout)
    buffers = HostBuffers()
    for policy in (None, *policies):
        decoder = _decoder(policy, **options)
        _assert_same_bits(_results(decoder, dropout=dropout), expected)
        offloaded = partial(_offloaded, decoder, buffers)
        _assert_same_bits(_results(decoder, offloaded, dropout=dropout), expected)
    assert buffers.free == buffers.allocated > 0


def test_documents_and_frozen_parts():
    documents = {"cu_seqlens": torch.tensor([0, 5, 9, 14])}
    results = []
    for policy in (None, *POLICIES.values()):
        decoder = _decoder(policy)
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_("norm" not in name and "k_proj" not in name)
        logits = decoder(TOKENS.view(-1), **documents).logits
        logits.sin().sum().backward()
        gradients = [p.grad for p in decoder.parameters() if p.requires_grad]
        results.append([logits, *gradients])
    for result in results[1:]:
        _assert_same_bits(result, results[0])


@ranks(2)
def test_traffic_follows_the_table():
    """``docs/traffic.md``: each block sends in backward all but its last message again."""
    layers, large = SPEC.num_layers, 12 * 32
    once, twice = (layers, layers * large), (2 * layers, 2 * layers * large)
    cut = RecomputePolicy("layers.*", cut_over=Mesh(tp=2).group("tp"))
    assert _more("layers.*", sequence_parallel=False) == {"all_reduce": once}
    assert _more("layers.*", sequence_parallel=True) == {
        "all_gather": twice,
        "reduce_scatter": once,
    }
    assert _more(cut, sequence_parallel=False) == {
        "all_reduce": once,
        "all_gather": once,
    }


def _more(recompute, *, sequence_parallel):
    """Messages of backward by kind, and their elements, beyond those without recomputation."""
    sent = []
    for policy in (None, recompute):
        decoder = _decoder(policy, mesh=Mesh(tp=2), sequence_parallel=sequence_parallel)
        logits = decoder(TOKENS[:, :6]).logits
        with Traffic() as backward:
            logits.sum().backward()
        sent.append(backward.totals())
    plain, ours = sent
    more = {
        kind: (ours[kind][0] - before[0], ours[kind][1] - before[1])
        for kind in ours
        for before in [plain.get(kind, (0, 0))]
    }
    return {kind: counts for kind, counts in more.items() if any(counts)}


@ranks(1, 2, 4)
def test_saved_elements_follow_the_table():
    """``docs/traffic.md``: a recomputed block keeps its input, or a slice of it."""
    mesh = Mesh(tp=dist.get_world_size())
    size, tokens, hidden = mesh.size("tp"), 8, 32
    cut = RecomputePolicy("layers.*", cut_over=mesh.group("tp"))
    for policy, sequence_parallel in (("layers.*", False), ("layers.*", True), (cut, False)):
        saved = []
        for layers in (1, 2):
            spec = DecoderSpec(96, hidden, 48, layers, 4, 4, 8)
            decoder = _decoder(policy, mesh=mesh, sequence_parallel=sequence_parallel, spec=spec)
            saved.append(_saved_elements(decoder, torch.zeros(1, tokens, dtype=torch.int64)))
        share = 1 if policy != cut and not sequence_parallel else size
        assert saved[1] - saved[0] == tokens * hidden // share


def _saved_elements(decoder, tokens):
    """Elements of the tensors kept for backward, each storage once, parameters left out."""
    saved = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}

    def note(x):
        saved[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes() // x.itemsize)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        decoder(tokens)
    return sum(count for place, (x, count) in saved.items() if place not in own)


@ranks(2)
def test_own_tokens_are_not_cut_again():
    mesh = Mesh(tp=2)
    policy = RecomputePolicy("layers.*", cut_over=mesh.group("tp"))
    with pytest.raises(ValueError, match=r"recompute=.* must not set cut_over under sequence"):
        Decoder(SPEC, mesh=mesh, sequence_parallel=True, recompute=policy)
    Decoder(SPEC, sequence_parallel=True, recompute=RecomputePolicy("layers.*", cut_over=LOCAL))


@pytest.mark.parametrize("name", ["layers", "every other, with kept results"])
def test_it_compiles_whole(name):
    torch._dynamo.reset()
    decoder = _decoder(POLICIES[name])
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    for pair in zip(_results(decoder, compiled), _results(decoder), strict=True):
        torch.testing.assert_close(*pair)


@ranks(2, timeout=300)
def test_it_compiles_whole_on_two_ranks():
    spec = DecoderSpec(97, 32, 48, 1, 4, 1, 8, qk_norm=True)
    decoder = _decoder("layers.*", mesh=Mesh(tp=2), sequence_parallel=True, spec=spec)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    for pair in zip(_results(decoder, compiled), _results(decoder), strict=True):
        torch.testing.assert_close(*pair)
