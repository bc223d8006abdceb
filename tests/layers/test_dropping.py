"""A decoder that drops equals one process: cut, in micro-batches, packed, and computed again."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from megablocks_core.groups import LOCAL, Mesh, marks, own_slices
from megablocks_core.layers import Decoder, DecoderLayer, DecoderSpec, GatedMLP
from megablocks_core.layers.dropping import ids_of_tokens, own_tokens
from megablocks_core.parallel import Dropout, DropoutKey, reduce_gradients
from megablocks_core.testing import assert_parallel_equivalence, ranks

F64 = torch.float64
KINDS = ("attention_dropout", "hidden_dropout", "activation_dropout")
SPEC = DecoderSpec(
    97,
    32,
    48,
    2,
    4,
    2,
    8,
    attention_dropout=0.1,
    hidden_dropout=0.1,
    activation_dropout=0.1,
    initializer_range=0.3,
)
TOKENS = torch.arange(28).view(4, 7) * 7 % 97
SAMPLES = torch.tensor([11, 3, 40, 7])
KEY = DropoutKey(seed=5, step=9)


@ranks(1, 2, 4, timeout=180)
def test_every_cut_equals_one_process():
    """Seven tokens divide over no number of ranks; two key heads are fewer than four ranks.

    Cut tokens are computed again in backward.
    """
    mesh = Mesh(tp=dist.get_world_size())
    for sequence_parallel in (False, True):
        assert_parallel_equivalence(
            lambda group, cut=sequence_parallel: _Logits(
                Decoder(
                    SPEC,
                    mesh=mesh if group.size > 1 else None,
                    sequence_parallel=cut,
                    recompute="layers.*" if group.size > 1 and cut else None,
                )
            ),
            {"tokens": TOKENS, "dropout": KEY, "sample_ids": SAMPLES},
            group=mesh.group("tp"),
            loss=lambda logits: (logits.sin() * torch.arange(97)).sum(),
            same_start=True,
        )


@ranks(2, 4, timeout=180)
def test_data_parallel_ranks_and_micro_batches_equal_one_batch():
    mesh = Mesh(tp=dist.get_world_size() // 2, dp=2)
    whole = _decoder()
    loss, expected = _step(whole, [slice(0, 4)])
    own = {0: (0, 3), 1: (1, 2)}[mesh.coordinate("dp")]
    for rows in ([own], [[row] for row in own]):
        decoder = _decoder(mesh=mesh, sequence_parallel=True)
        own_loss, _ = _step(decoder, rows)
        assert_close(mesh.group("dp").all_reduce(own_loss), loss)
        reduce_gradients(decoder, group=mesh.group("dp"), reduction="sum")
        for name, parameter, specs in marks(decoder):
            for place, local in own_slices(specs, tuple(expected[name].shape)):
                assert_close(parameter.grad[local], expected[name][place], rtol=1e-10, atol=1e-10)


def test_micro_batches_equal_one_batch():
    losses, gradients = zip(
        *(
            _step(_decoder(), rows)
            for rows in ([[0, 1, 2, 3]], [[2, 0], [3, 1]], [[3], [0], [1], [2]])
        ),
        strict=True,
    )
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        assert_close((loss, gradient), (losses[0], gradients[0]), rtol=1e-10, atol=1e-10)


def test_documents_in_one_row_equal_rows_and_documents_alone():
    """Also where pads follow each document."""
    decoder, samples = _decoder(), torch.tensor([8, 1, 6])
    packed = TOKENS.view(-1)[:9]
    storage = F.pad(packed, (0, 1))[[0, 1, 2, 9, 3, 9, 4, 5, 6, 7, 8]]
    cu_seqlens, padded = torch.tensor([0, 3, 4, 9]), torch.tensor([0, 4, 6, 11])
    run = partial(_logits, decoder, dropout=KEY)
    together = run(packed, cu_seqlens=cu_seqlens, sample_ids=samples)
    with_pads = run(storage, cu_seqlens=cu_seqlens, cu_seqlens_padded=padded, sample_ids=samples)
    alone = [
        run(document, sample_ids=sample)
        for document, sample in zip(packed.split([3, 1, 5]), samples, strict=True)
    ]
    assert_close(together, torch.cat(alone))
    assert_close(with_pads[[0, 1, 2, 4, 6, 7, 8, 9, 10]], torch.cat(alone))
    assert_close(run(packed[None], cu_seqlens=cu_seqlens, sample_ids=samples)[0], together)
    rows = run(packed[:8].view(2, 4), sample_ids=samples[:2])
    halves = run(packed[:8], cu_seqlens=torch.tensor([0, 4, 8]), sample_ids=samples[:2])
    assert_close(rows.flatten(0, 1), halves)


def test_samples_count_from_zero_by_default():
    decoder = _decoder()
    run = partial(_logits, decoder, dropout=KEY)
    assert_close(run(TOKENS), run(TOKENS, sample_ids=torch.arange(4)))
    assert_close(run(TOKENS[0]), run(TOKENS)[0])
    row, cu_seqlens = TOKENS.view(-1), torch.tensor([0, 5, 21])
    numbered = run(row, cu_seqlens=cu_seqlens, sample_ids=torch.arange(2))
    assert_close(run(row, cu_seqlens=cu_seqlens), numbered)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_drops_in_every_layer_and_follows_its_key(kind):
    spec = replace(SPEC, **{**dict.fromkeys(KINDS, 0.0), kind: 0.1})
    decoder, exact = _decoder(spec), _decoder(replace(spec, **{kind: 0.0}))
    rates = {name: part.p for name, part in decoder.named_modules() if isinstance(part, Dropout)}
    assert sum(rate > 0 for rate in rates.values()) == (5 if kind == "hidden_dropout" else 2)
    run = partial(_logits, decoder, TOKENS)
    dropped = run(dropout=KEY)
    assert torch.equal(run(dropout=KEY), dropped)
    for other in (DropoutKey(5, 10), DropoutKey(6, 9)):
        assert (run(dropout=other) - dropped).abs().max() > 1e-3
    assert (run(dropout=KEY, sample_ids=SAMPLES) - dropped).abs().max() > 1e-3
    expected = _logits(exact, TOKENS)
    assert (dropped - expected).abs().max() > 1e-3
    assert torch.equal(_logits(decoder.eval(), TOKENS, dropout=KEY), expected)


def test_no_two_dropouts_of_a_model_share_a_stream():
    streams = [part.stream for part in _decoder().modules() if isinstance(part, Dropout)]
    assert len(streams) == len(set(streams)) == 9
    assert "model.layers.1.self_attn" in streams and "model.layers.0.mlp" in streams


@pytest.mark.parametrize("again", ["reentrant", "torch", "layers.*", "self_attn", "mlp"])
def test_f_101_layers_computed_again_drop_alike(again):
    plain, kind = _decoder(), again
    again = _decoder(recompute=None if kind in ("reentrant", "torch") else kind)
    if kind in ("reentrant", "torch"):
        for layer in again.model.layers:
            layer.forward = _Checkpointed(layer, use_reentrant=kind == "reentrant")
    (loss, expected), (other, gradients) = (_step(part, [[0, 1, 2, 3]]) for part in (plain, again))
    assert torch.equal(loss, other)
    assert_close(gradients, expected, rtol=0, atol=0)


def test_state_is_two_integers():
    """A run that goes on elsewhere draws what the first would have drawn."""
    first = _decoder()
    _step(first, [[0, 1]])
    torch.manual_seed(987)
    second = _decoder()
    resumed = DropoutKey(seed=KEY.seed, step=KEY.step)
    assert torch.equal(
        _logits(second, TOKENS, dropout=resumed), _logits(first, TOKENS, dropout=KEY)
    )


def test_training_needs_a_key_and_evaluation_none():
    decoder = _decoder()
    with pytest.raises(ValueError, match="dropout=None must be a DropoutKey"):
        decoder(TOKENS)
    decoder.eval()(TOKENS)
    _decoder(replace(SPEC, **dict.fromkeys(KINDS, 0.0)))(TOKENS)
    layer = _decoder().model.layers[0]
    inputs = {"positions": torch.arange(7)}
    with pytest.raises(ValueError, match="dropout_index=None .* 'model.layers.0.self_attn'"):
        layer(torch.ones(7, 32, dtype=F64), **inputs)
    with pytest.raises(ValueError, match="stream='' must name the layer"):
        DecoderLayer(
            8, attention=layer.self_attn, feed_forward=layer.mlp, norm=nn.Identity, hidden_dropout=1
        )


@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        (TOKENS, {"sample_ids": SAMPLES[:3]}, r"\[3\] must have one number for each row, \[4\]"),
        (TOKENS[0], {"sample_ids": SAMPLES}, r"\[4\] must have one number for each row, \[\]"),
        (
            TOKENS[0],
            {"sample_ids": SAMPLES, "cu_seqlens": torch.tensor([0, 3, 7])},
            r"\[4\] must have one number for each document, \[2\]",
        ),
    ],
)
def test_sample_ids_of_other_things_raise(tokens, arguments, message):
    with pytest.raises(ValueError, match=message):
        _decoder()(tokens, dropout=KEY, **arguments)


class _DroppingExperts(nn.Module):
    """Takes words, for it has a ``dropout`` of its own."""

    def __init__(self, hidden_size, ffn_size, *, dropout, **options):
        super().__init__()
        self.dropout = dropout
        self.inner = GatedMLP(hidden_size, ffn_size, **options)

    def forward(self, x, *, dropout_index):
        assert dropout_index.shape == x.shape[:-1]
        return self.dropout(self.inner(x), index=dropout_index)


def test_injected_experts_are_handed_words_if_they_drop():
    decoder = _decoder(experts=_DroppingExperts)
    experts = [part for part in decoder.modules() if isinstance(part, _DroppingExperts)]
    assert [part.dropout.stream for part in experts] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    _logits(decoder, TOKENS, dropout=KEY)


def test_steps_compile_once_and_change_nothing():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    decoder = _decoder(replace(SPEC, num_layers=1))
    compiled = torch.compile(decoder, fullgraph=True, backend=counter)
    for step in range(6):
        key, results = DropoutKey(seed=5, step=step), []
        for call in (compiled, decoder):
            decoder.zero_grad()
            logits = call(TOKENS, dropout=key, sample_ids=SAMPLES).logits
            logits.square().sum().backward()
            results.append([logits, *(p.grad for p in decoder.parameters())])
        assert_close(*results)
    assert counter.frame_count <= 2


@ranks(2, timeout=300)
@pytest.mark.parametrize("kinds", [KINDS[1:2], pytest.param(KINDS, marks=pytest.mark.slow)])
def test_it_compiles_whole_on_two_ranks(kinds):
    spec = replace(SPEC, num_layers=1, **dict.fromkeys(set(KINDS) - set(kinds), 0.0))
    decoder = _decoder(spec, mesh=Mesh(tp=2), sequence_parallel=True)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    row, cu_seqlens = TOKENS.view(-1)[:9], torch.tensor([0, 3, 4, 9])
    results = []
    for call in (compiled, decoder):
        decoder.zero_grad()
        logits = call(row, dropout=KEY, cu_seqlens=cu_seqlens, gather_logits=True).logits
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in decoder.parameters())])
    assert_close(*results)


def test_ids_follow_rows_and_documents():
    places = torch.tensor([0, 2, 2, 5])
    numbers = ids_of_tokens(torch.tensor([7, 8, 9]), torch.zeros(7), places)
    assert numbers.tolist() == [7, 7, 9, 9, 9, 9, 9]
    assert ids_of_tokens(None, torch.zeros(2, 3), None).tolist() == [[0], [1]]
    assert ids_of_tokens(None, torch.zeros(3), None).tolist() == [0]
    words = torch.arange(6)
    assert own_tokens(words, sequence_parallel=False, group=LOCAL) is words
    assert own_tokens(None, sequence_parallel=True, group=LOCAL) is None


class _Checkpointed:
    def __init__(self, layer, use_reentrant):
        self.layer, self.use_reentrant = layer, use_reentrant

    def __call__(self, x, **inputs):
        run = partial(DecoderLayer.forward, self.layer, **inputs)
        return checkpoint(run, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)


class _Logits(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens, **arguments):
        return _logits(self.decoder, tokens, **arguments)


def _step(decoder, micro_batches):
    """Loss and whole gradients (by name) of the rows in ``micro_batches``."""
    loss = torch.zeros((), dtype=F64)
    for rows in micro_batches:
        rows = torch.arange(4)[rows] if isinstance(rows, slice) else torch.tensor(rows)
        logits = _logits(decoder, TOKENS[rows], dropout=KEY, sample_ids=SAMPLES[rows])
        part = (logits.sin() * torch.arange(97)).sum()
        part.backward()
        loss += part.detach()
    gradients = {name: parameter.grad for name, parameter, _ in marks(decoder)}
    return loss, gradients


def _logits(decoder, tokens, **arguments):
    return decoder(tokens, gather_logits=True, **arguments).logits


def _decoder(spec=SPEC, **options):
    torch.manual_seed(0)
    return Decoder(spec, dtype=F64, **options)
