"""The decoder equals transformers' models, and one process at any size."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megablocks_core.groups import Mesh, gather_whole, load_whole, marks, own_slices
from megablocks_core.layers import Attention, Decoder, DecoderSpec, GatedMLP
from megablocks_core.parallel import (
    linear_cross_entropy,
    reset_parameters,
    vocab_parallel_cross_entropy,
)
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.traffic import Traffic

F64 = torch.float64
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "llama with all biases": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, pad_token_id=5),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, head_dim=16, sliding_window=None)),
}
SPEC = DecoderSpec(97, 32, 48, 2, 4, 2, 8, qk_norm=True, family="qwen3")
TOKENS = torch.arange(14).view(2, 7) * 7  # Every quarter of the vocabulary is used.


@ranks(1, 2, 4, timeout=180)
def test_logits_and_gradients_are_those_of_llama_and_qwen3():
    """Seven tokens divide over no number of ranks; two key heads are fewer than four ranks."""
    for name in ("llama", "qwen3"):
        _assert_equals_transformers(name, _mesh(), sequence_parallel=False)
        _assert_equals_transformers(name, _mesh(), sequence_parallel=True)


@pytest.mark.parametrize("name", ["llama with all biases", "qwen2", "mistral"])
def test_logits_and_gradients_are_those_of_their_kin(name):
    _assert_equals_transformers(name, None, sequence_parallel=False)


@pytest.mark.parametrize("name", MODELS)
def test_state_has_the_names_and_shapes_of_transformers(name):
    model_class, config = MODELS[name]
    with torch.device("meta"):
        theirs = model_class(config).state_dict()
    ours = Decoder(DecoderSpec.from_hf(config), device="meta").state_dict()
    assert {name: x.shape for name, x in ours.items()} == {n: x.shape for n, x in theirs.items()}


@ranks(1, 2, 4)
def test_it_equals_one_process():
    mesh = _mesh()
    spec = DecoderSpec(
        97, 32, 48, 2, 4, 2, 8, attention_bias=True, mlp_bias=True, qk_norm=True, tied=True
    )
    for sequence_parallel in (False, True):
        assert_parallel_equivalence(
            lambda group, cut=sequence_parallel: _Logits(
                Decoder(spec, mesh=mesh if group.size > 1 else None, sequence_parallel=cut)
            ),
            TOKENS,
            group=mesh.group("tp"),
            loss=lambda logits: (logits.sin() * torch.arange(97)).sum(),
            same_start=True,
        )


@ranks(1, 2)
def test_documents_equal_documents_alone():
    """Also where pads follow each document (F-100), and where the row is padded inside."""
    packed = TOKENS.view(-1)[:9]
    storage = F.pad(packed, (0, 1))[[0, 1, 2, 9, 3, 9, 4, 5, 6, 7, 8]]
    cu_seqlens, padded = torch.tensor([0, 3, 4, 9]), torch.tensor([0, 4, 6, 11])
    real = [0, 1, 2, 4, 6, 7, 8, 9, 10]
    decoder = _seeded(lambda: Decoder(SPEC, mesh=_mesh(), sequence_parallel=True, dtype=F64))

    logits_TV = _whole(decoder, packed, cu_seqlens=cu_seqlens, max_seqlen=5)
    padded_TV = _whole(decoder, storage, cu_seqlens=cu_seqlens, cu_seqlens_padded=padded)
    alone = [_whole(decoder, document) for document in packed.split([3, 1, 5])]
    assert_close(logits_TV, torch.cat(alone))
    assert_close(padded_TV[real], torch.cat(alone))


def test_given_positions_are_used():
    decoder = _seeded(lambda: Decoder(SPEC, dtype=F64))
    positions = torch.arange(7)
    logits = _whole(decoder, TOKENS)
    assert_close(_whole(decoder, TOKENS, positions=positions), logits)
    assert_close(_whole(decoder, TOKENS, positions=positions + 11), logits)  # Only distances count.
    assert (_whole(decoder, TOKENS, positions=positions * 2) - logits).abs().max() > 1e-6


@ranks(1, 2, 4)
def test_cut_logits_are_those_that_the_vocabulary_parallel_loss_takes():
    mesh, labels = _mesh(), TOKENS.roll(-1, -1)
    decoder = _seeded(lambda: Decoder(SPEC, mesh=mesh, dtype=F64))
    output = decoder(TOKENS)
    assert output.losses == {}
    loss = vocab_parallel_cross_entropy(output.logits, labels, group=mesh.group("tp"))
    whole = _seeded(lambda: Decoder(SPEC, dtype=F64))(TOKENS).logits
    assert_close(loss, F.cross_entropy(whole.flatten(0, 1), labels.flatten()))


@ranks(2)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_traffic_follows_the_table(qk_norm):
    """``docs/traffic.md``: how many messages each way, and the elements in all of them."""
    layers, tokens, hidden, head_dim, vocab_size = 2, 16, 32, 8, 96
    spec = DecoderSpec(vocab_size, hidden, 48, layers, 4, 2, head_dim, qk_norm=qk_norm)
    large, once, twice = tokens * hidden, 2 * layers + 1, 4 * layers + 2
    weights = layers * 2 * head_dim if qk_norm else 0

    forward, backward = _traffic(spec, sequence_parallel=False)
    assert forward == {"all_reduce": (once, once * large)}
    messages = once + (layers if qk_norm else 0)
    assert backward == {"all_reduce": (messages, once * large + weights)}
    assert _traffic(spec, sequence_parallel=False, gather_logits=True) == (
        {**forward, "all_gather": (1, tokens * vocab_size)},
        backward,
    )
    assert _traffic(spec, sequence_parallel=True) == (
        {
            "all_gather": (once, once * large),
            "reduce_scatter": (once, once * large),
        },
        {
            "all_gather": (twice, twice * large),
            "reduce_scatter": (once, once * large),
            "all_reduce": (layers + 1, layers * 2 * hidden + hidden + weights),
        },
    )


@ranks(1, 2, 4)
def test_saved_elements_follow_the_table():
    """``docs/traffic.md``: elements that one block more saves for backward, on CPU."""
    size = dist.get_world_size()
    for sequence_parallel in (False, True):
        cut = size if sequence_parallel else 1
        saved = []
        for layers in (1, 2):
            spec = DecoderSpec(96, 32, 48, layers, 4, 4, 8)
            decoder = Decoder(spec, mesh=_mesh(), sequence_parallel=sequence_parallel)
            saved.append(_saved_elements(decoder, torch.zeros(1, 8, dtype=torch.int64)))
        tokens, hidden, heads, ffn = 8, 32, 4 // size, 48 // size
        expected = tokens * (6 * hidden // cut + 4 * heads * 8 + heads + 4 * ffn)
        roots = 2 * tokens // cut  # One a norm and token.
        assert expected <= saved[1] - saved[0] <= expected + 2 * roots


def test_values_depend_on_seed_and_name_alone():
    """The same from ``meta``, and in a deeper model for the blocks that both have."""
    built = Decoder(SPEC)
    from_meta = Decoder(SPEC, device="meta").to_empty(device="cpu")
    deeper = Decoder(DecoderSpec(97, 32, 48, 3, 4, 2, 8, qk_norm=True))
    for decoder in (built, from_meta, deeper):
        reset_parameters(decoder, seed=3)
    assert_close(from_meta.state_dict(), built.state_dict(), rtol=0, atol=0)
    common = {name: x for name, x in deeper.state_dict().items() if ".layers.2." not in name}
    assert_close(common, built.state_dict(), rtol=0, atol=0)
    assert built.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_torchs_generator_seeds_a_decoder():
    first, second = (_seeded(lambda: Decoder(SPEC)) for _ in range(2))
    assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    second.reset_parameters()
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_the_padding_row_starts_as_zero_and_stays():
    decoder = Decoder(DecoderSpec(97, 32, 48, 1, 4, 2, 8, pad_token_id=-92))
    assert not decoder.model.embed_tokens.weight[5].any()
    decoder(torch.tensor([5, 6])).logits.sum().backward()
    gradient_VH = decoder.model.embed_tokens.weight.grad
    assert gradient_VH is not None
    assert not gradient_VH[5].any()
    assert gradient_VH[6].any()


def test_a_tie_outlives_what_modules_go_through():
    tied = DecoderSpec(97, 32, 48, 1, 4, 2, 8, tied=True)
    decoder = Decoder(tied, device="meta").to_empty(device="cpu")
    reset_parameters(decoder, seed=1)
    assigned = Decoder(tied)
    assigned.load_state_dict(copy.deepcopy(decoder.state_dict()), assign=True)
    pickled = pickle.loads(pickle.dumps(decoder))
    for part in (decoder, assigned, pickled, copy.deepcopy(decoder), decoder.to(F64)):
        assert part.lm_head.weight is part.model.embed_tokens.weight


def test_injected_projections_and_norms_are_used():
    def linear(in_features, out_features, *, parallel_mode, bias, device, dtype, **others):
        return nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def norm(hidden_size, *, eps, device, dtype):
        return nn.RMSNorm(hidden_size, eps=eps, device=device, dtype=dtype)

    own = Decoder(SPEC, dtype=F64)
    injected = Decoder(SPEC, linear=linear, norm=norm, dtype=F64)
    kinds = {type(part) for part in injected.modules()}
    assert {nn.Linear, nn.RMSNorm} < kinds and not kinds & {type(own.model.norm)}
    injected.load_state_dict(own.state_dict())
    assert_close(injected(TOKENS).logits, own(TOKENS).logits)


@pytest.mark.parametrize("documents", [None, [0, 3, 3, 6]])
def test_the_back_end_of_attention_is_chosen(documents):
    own = Decoder(SPEC, dtype=F64)
    chosen = Decoder(SPEC, attention_backend="naive", dtype=F64)
    chosen.load_state_dict(own.state_dict())
    packed = {} if documents is None else {"cu_seqlens": torch.tensor(documents)}
    tokens = TOKENS if documents is None else TOKENS[:1]
    results = [decoder(tokens, **packed).logits for decoder in (own, chosen)]
    gradients = [
        torch.autograd.grad(logits.sin().sum(), list(decoder.parameters()))
        for logits, decoder in zip(results, (own, chosen), strict=True)
    ]
    assert_close(*results)
    assert_close(*gradients)
    assert {part.backend for part in chosen.modules() if isinstance(part, Attention)} == {"naive"}


class _TwoExperts(nn.Module):
    """Feed-forward layers whose results are averaged."""

    def __init__(self, hidden_size, ffn_size, **options):
        super().__init__()
        self.experts = nn.ModuleList(
            GatedMLP(hidden_size, ffn_size // 2, **options) for _ in range(2)
        )

    def forward(self, x):
        return (self.experts[0](x) + self.experts[1](x)) / 2


@ranks(1, 2)
def test_injected_experts_equal_one_process():
    mesh = _mesh()
    assert_parallel_equivalence(
        lambda group: _Logits(
            Decoder(SPEC, mesh=mesh if group.size > 1 else None, experts=_TwoExperts)
        ),
        TOKENS,
        group=mesh.group("tp"),
        loss=lambda logits: logits.sin().sum(),
        same_start=True,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recompute": "block"}, "modules='block' must name modules of the Decoder"),
        ({"mesh": Mesh(world_size=2, rank=0, pp=2)}, "mesh axis pp=2"),
        ({"mesh": Mesh(world_size=2, rank=0, cp=2)}, "mesh axis cp=2"),
        ({"attention_backend": "flash"}, "backend='flash' must be one of auto, "),
    ],
)
def test_what_is_not_served_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        Decoder(SPEC, **arguments)


@ranks(4)
def test_sizes_that_do_not_divide_raise():
    with pytest.raises(ValueError, match="num_heads=6"):
        Decoder(DecoderSpec(97, 36, 48, 1, 6, 2, 6), mesh=_mesh())
    with pytest.raises(ValueError, match="ffn_size=50"):
        Decoder(DecoderSpec(97, 32, 50, 1, 4, 2, 8), mesh=_mesh())


def test_packings_recompile_at_most_twice():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    decoder = _seeded(lambda: Decoder(DecoderSpec(97, 32, 48, 1, 4, 2, 8), dtype=F64))
    compiled = torch.compile(decoder, fullgraph=True, backend=counter)
    for packing in ([3, 4], [2, 2, 5], [9], [1, 1, 1, 1, 7], [6, 3, 2, 8], [4, 12]):
        cu_seqlens = F.pad(torch.tensor(packing).cumsum(0), (1, 0))
        tokens = torch.arange(sum(packing) + 1) * 7 % 97
        results = []
        for call in (compiled, decoder):
            decoder.zero_grad()
            logits = call(tokens, cu_seqlens=cu_seqlens, max_seqlen=max(packing)).logits
            logits.square().sum().backward()
            results.append([logits, *(p.grad for p in decoder.parameters())])
        assert_close(*results)
    assert counter.frame_count <= 3


@ranks(2, timeout=300)
def test_it_compiles_whole_on_two_ranks():
    spec = DecoderSpec(97, 32, 48, 1, 4, 1, 8, qk_norm=True)
    decoder = _seeded(lambda: Decoder(spec, mesh=_mesh(), sequence_parallel=True, dtype=F64))
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, decoder):
        decoder.zero_grad()
        logits = call(TOKENS, gather_logits=True).logits
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in decoder.parameters())])
    assert_close(*results)


class _Logits(nn.Module):
    """A decoder that gives nothing but its gathered logits."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens):
        return _whole(self.decoder, tokens)


def _assert_equals_transformers(name, mesh, *, sequence_parallel):
    model_class, config = MODELS[name]
    theirs = _seeded(lambda: model_class(config)).to(F64)
    for parameter in theirs.parameters():  # Far from the initial values, where all is linear.
        nn.init.normal_(parameter, std=0.3)
    ours = Decoder(
        DecoderSpec.from_hf(config), mesh=mesh, sequence_parallel=sequence_parallel, dtype=F64
    )
    load_whole(ours, theirs.state_dict())
    weights = torch.randn(2, 7, 97, dtype=F64)

    logits, expected = _whole(ours, TOKENS), theirs(TOKENS).logits
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()

    _assert_close_by_norm("logits", logits, expected)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = {name: (parameter.grad, specs) for name, parameter, specs in marks(ours)}
    assert found.keys() == gradients.keys()
    for name, (gradient, specs) in found.items():
        assert gradient is not None
        for whole, local in own_slices(specs, tuple(gradients[name].shape)):
            _assert_close_by_norm(name, gradient[local], gradients[name][whole])
    assert_close(gather_whole(ours), theirs.state_dict(), rtol=0, atol=0)


def _assert_close_by_norm(name, ours, theirs):
    """Transformers rounds to float32 inside norms and rotary tables."""
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 2e-6, f"{name}: {error}"


def _traffic(spec, *, sequence_parallel, gather_logits=False):
    decoder = Decoder(spec, mesh=_mesh(), sequence_parallel=sequence_parallel)
    with Traffic() as forward:
        logits = decoder(torch.zeros(2, 8, dtype=torch.int64), gather_logits=gather_logits).logits
    with Traffic() as backward:
        logits.sum().backward()
    return forward.totals(), backward.totals()


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


def _whole(decoder, tokens, **arguments):
    return decoder(tokens, **arguments, gather_logits=True).logits


def _seeded(build):
    torch.manual_seed(0)
    return build()


def _mesh():
    return Mesh(tp=dist.get_world_size())


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_hidden_states_give_the_loss_and_gradients_of_logits(tied, sequence_parallel):
    """Seven tokens, which no number of ranks divides."""
    spec = DecoderSpec(96, 32, 48, 1, 4, 2, 8, tied=tied)
    torch.manual_seed(0)
    decoder = Decoder(spec, mesh=_mesh(), sequence_parallel=sequence_parallel).double()
    tokens = torch.arange(14).view(2, 7) % spec.vocab_size
    options = {"vocab_size": spec.vocab_size, "group": decoder.tp}
    results = []
    for whole in (True, False):
        decoder.zero_grad()
        if whole:
            loss = vocab_parallel_cross_entropy(decoder(tokens).logits, tokens, **options)
        else:
            hidden = decoder(tokens, head=False).hidden
            loss = linear_cross_entropy(
                hidden,
                decoder.lm_head.weight,
                tokens,
                sequence_parallel=sequence_parallel,
                **options,
            )
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in decoder.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)


def test_what_are_no_tokens_or_documents_is_refused_by_name():
    decoder = Decoder(DecoderSpec(96, 32, 48, 1, 4, 2, 8))
    tokens = torch.arange(8)
    for wrong in (tokens.float(), tokens.tolist(), None, tokens.bool()):
        with pytest.raises(ValueError, match="^tokens must be a tensor of int64 or int32 ids, not"):
            decoder(wrong)
    for wrong in (tokens[:0], tokens.view(8, 1)[:, :0], tokens[0]):
        with pytest.raises(ValueError, match=r"^tokens of shape .* must have at least one in a r"):
            decoder(wrong)
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        for wrong in ([0, 3, 8], (0, 8), 8, torch.tensor(8), torch.tensor([[0, 8]])):
            documents: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 8]), name: wrong}
            with pytest.raises(ValueError, match=f"^{name} must be a tensor of the ends of docum"):
                decoder(tokens, **documents)
