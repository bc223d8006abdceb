"""Models with adapters are written merged or with adapters beside, and are left as they were."""

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

from megablocks_core.auto import decoder_from_hf, save_adapted_hf
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.groups import Mesh, gather_whole
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import add_lora, load_lora, merge_lora, remove_lora
from megablocks_core.testing import ranks
from tests.export.tiny_models import TOKENS, pretrained, tiny_model
from tests.parallel.lora_models import fill

PATTERNS = ["q_proj", "o_proj", "layers.1.mlp.down_proj", "lm_head"]


def _adapted(folder, mesh=None, patterns=PATTERNS):
    decoder = decoder_from_hf(folder, mesh=mesh)
    add_lora(decoder, patterns, rank=2, alpha=3)
    return fill(decoder)


def _state(model):
    return {name: tensor.clone() for name, tensor in gather_whole(model).items()}


def _assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@ranks(1, 2)
def test_merged_adapters_are_in_the_weights(tmp_path):
    mesh = Mesh(tp=dist.get_world_size())
    world = mesh.group("tp")
    pretrained(tmp_path / "in")
    model = _adapted(tmp_path / "in", mesh)
    before, logits = _state(model), model(TOKENS, gather_logits=True).logits
    save_adapted_hf(model, tmp_path / "out", group=world)
    dist.barrier()
    _assert_same(_state(model), before)
    assert torch.equal(model(TOKENS, gather_logits=True).logits, logits)

    verify(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_close(theirs(TOKENS).logits, logits, atol=1e-4, rtol=1e-4)
    merge_lora(model)
    save_adapted_hf(model, tmp_path / "again", group=world)
    dist.barrier()
    _assert_same(load_file(tmp_path / "again" / "model.safetensors"), written)
    remove_lora(model)
    _assert_same(written, gather_whole(model))
    opened = decoder_from_hf(tmp_path / "out", mesh=mesh)
    merged = model(TOKENS, gather_logits=True).logits
    assert torch.equal(opened(TOKENS, gather_logits=True).logits, merged)


@ranks(1, 2)
def test_kept_adapters_stand_beside_the_weights_that_they_were_added_to(tmp_path):
    mesh = Mesh(tp=dist.get_world_size())
    world = mesh.group("tp")
    pretrained(tmp_path / "in")
    model = _adapted(tmp_path / "in", mesh)
    logits = model(TOKENS, gather_logits=True).logits
    folders = {"unmerged": tmp_path / "out", "merged": tmp_path / "again"}
    for state, folder in folders.items():
        if state == "merged":
            merge_lora(model)
        before = _state(model)
        save_adapted_hf(model, folder, adapters=tmp_path / f"lora-{state}", group=world)
        _assert_same(_state(model), before)
    dist.barrier()
    for state, folder in folders.items():
        verify(folder)
        files = [one / "model.safetensors" for one in (folder, tmp_path / "in")]
        _assert_same(*(load_file(path) for path in files))
        opened = decoder_from_hf(folder, mesh=mesh)
        load_lora(opened, tmp_path / f"lora-{state}")
        assert torch.equal(opened(TOKENS, gather_logits=True).logits, logits)


def test_peft_opens_kept_adapters_on_the_weights_beside(tmp_path):
    import peft

    pretrained(tmp_path / "in")
    model = _adapted(tmp_path / "in")
    save_adapted_hf(model, tmp_path / "out", adapters=tmp_path / "lora")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "lora")
    logits = model(TOKENS).logits
    assert_close(theirs(input_ids=TOKENS).logits, logits, atol=1e-4, rtol=1e-4)
    assert (base(TOKENS).logits - tiny_model()(TOKENS).logits).abs().max() > 0.1


@ranks(2)
@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_adapters_of_experts(tmp_path, axis):
    mesh = Mesh(tp=2, etp=2) if axis == "tp" else Mesh(dp=2, ep=2)
    world = mesh.group("tp", "dp")
    if world.rank == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
        config = transformers.Qwen3MoeConfig(
            vocab_size=10, **sizes, **experts, **heads, eos_token_id=2
        )
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "in")
    dist.barrier()
    names = ["experts.*.up_proj", "experts.*.down_proj", "v_proj"]
    model = _adapted(tmp_path / "in", mesh, names)
    before, logits = _state(model), model(TOKENS, gather_logits=True).logits
    save_adapted_hf(model, tmp_path / "merged", group=world)
    save_adapted_hf(model, tmp_path / "kept", adapters=tmp_path / "lora", group=world)
    dist.barrier()
    _assert_same(_state(model), before)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(theirs(TOKENS).logits, logits, atol=1e-5, rtol=1e-4)
    opened = decoder_from_hf(tmp_path / "kept", mesh=mesh)
    load_lora(opened, tmp_path / "lora")
    assert torch.equal(opened(TOKENS, gather_logits=True).logits, logits)
    merge_lora(model)
    remove_lora(model)
    _assert_same(load_file(tmp_path / "merged" / "model.safetensors"), gather_whole(model))


def test_a_model_of_transformers(tmp_path):
    model = tiny_model()
    add_lora(model, ["q_proj", "embed_tokens"], rank=2, alpha=3)
    fill(model)
    save_adapted_hf(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    merge_lora(model)
    assert torch.equal(theirs(TOKENS).logits, model(TOKENS).logits)


def test_what_cannot_be_written_is_named_and_the_model_stays(tmp_path):
    pretrained(tmp_path / "in", "qwen3")
    spec = DecoderSpec.from_hf(tmp_path / "in")
    plain = Decoder(spec)
    load_hf(plain, tmp_path / "in")
    adapted = _adapted(tmp_path / "in", patterns=["q_proj", "k_proj"])
    tied = _adapted(tmp_path / "in", patterns=["lm_head"])
    half = _adapted(tmp_path / "in", patterns=["q_proj"])
    merge_lora(half)
    add_lora(half, ["k_proj"], rank=2, alpha=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("a")
    for model, target, kept, message in (
        (plain, "out", None, "model must have adapters"),
        (tied, "out", None, "lm_head.weight must not be merged: it is tied"),
        (half, "out", None, "adapters must all be merged or none, not .*q_proj"),
        (adapted, "full", None, "must be new or an empty folder"),
        (adapted, "out", "out", "must be another folder than path"),
        (adapted, "out", "full", "must be new or an empty folder"),
    ):
        before = _state(model)
        kept = None if kept is None else tmp_path / kept
        with pytest.raises(ValueError, match=message):
            save_adapted_hf(model, tmp_path / target, adapters=kept)
        _assert_same(_state(model), before)
    with pytest.raises(ValueError, match=r"not described \['model.layers.0.self_attn.*lora_A"):
        save_hf(adapted, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "in"]
