"""Folders are loaded bit for bit at any layout, and what does not fit is named."""

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.groups import Mesh, gather_whole, marks
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import tensor_parallelize
from megablocks_core.testing import ranks
from tests.export.tiny_models import FAMILIES, TOKENS, assert_same, pretrained, tiny_model


@pytest.mark.parametrize("family", list(FAMILIES))
@ranks(1, 2)
def test_a_decoder_on_meta_gets_memory_and_its_own_slices(tmp_path, family):
    reference = pretrained(tmp_path / "in", family)
    mesh = Mesh(tp=dist.get_world_size())
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh, device="meta")
    load_hf(decoder, tmp_path / "in", group=mesh.group("tp"))
    assert not any(parameter.is_meta for parameter in decoder.parameters())
    assert len(list(marks(decoder))) == len(list(decoder.parameters()))
    assert_same(gather_whole(decoder), reference)
    logits = decoder(TOKENS, gather_logits=True).logits
    torch.testing.assert_close(logits, reference(TOKENS).logits)


@pytest.mark.parametrize("family", list(FAMILIES))
@ranks(2)
def test_a_transformers_model_cut_on_meta_is_filled_and_written(tmp_path, family):
    reference = pretrained(tmp_path / "in", family)
    tp = Mesh(tp=2).group("tp")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference.config)
    tensor_parallelize(model, group=tp)
    load_hf(model, tmp_path / "in", group=tp)
    assert sum(p.numel() for p in model.parameters()) < sum(
        p.numel() for p in reference.parameters()
    )
    torch.testing.assert_close(model(TOKENS).logits, reference(TOKENS).logits)
    save_hf(model, tmp_path / "out", group=tp)
    dist.barrier()
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), reference)


def test_f_168_every_name_on_both_sides_is_covered_or_listed(tmp_path):
    reference = pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    kept = tensors.pop("model.norm.weight")
    extra = {"model.extra": torch.ones(2), "lm_head.weight": torch.ones(10, 17)}
    save_file({**tensors, **extra}, path)
    for model in (tiny_model(), Decoder(DecoderSpec.from_hf(tmp_path))):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError) as caught:
            load_hf(model, tmp_path)
        for part in (
            "the folder lacks ['model.norm.weight']",
            "the model lacks ['model.extra']",
            "lm_head.weight has shape (10, 16), on disk (10, 17)",
        ):
            assert part in str(caught.value)
        assert_same(before, model)
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**tensors, "model.norm.weight": kept, **tables}, path)
    model = Decoder(DecoderSpec.from_hf(tmp_path))
    load_hf(model, tmp_path)
    assert_same(model.state_dict(), reference)


@ranks(2)
def test_a_folder_that_does_not_fit_raises_on_all_ranks(tmp_path):
    pretrained(tmp_path)
    mesh = Mesh(tp=2)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path), mesh=mesh)
    if dist.get_rank() == 1:
        decoder.register_parameter("stranger", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"the folder lacks \['stranger'\]"):
        load_hf(decoder, tmp_path, group=mesh.group("tp"))


def test_tied_heads(tmp_path):
    tied = pretrained(tmp_path / "tied", tie_word_embeddings=True)
    loose = Decoder(DecoderSpec.from_hf(tiny_model(tie_word_embeddings=False).config))
    load_hf(loose, tmp_path / "tied")  # the config ties what this model keeps apart
    assert torch.equal(loose.lm_head.weight, tied.model.embed_tokens.weight)

    path = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, path)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "tied"))
    load_hf(decoder, tmp_path / "tied")
    verify(tmp_path / "tied")
    assert_same(decoder.state_dict(), tied)
    save_file({**tensors, "lm_head.weight": head + 1}, path)
    for model in (decoder, loose):
        with pytest.raises(ValueError, match="are tied, but differ on disk"):
            load_hf(model, tmp_path / "tied")


def test_quantised_tensors_are_refused(tmp_path):
    pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="model.norm.weight is torch.float32, which F8_E4M3"):
        load_hf(Decoder(DecoderSpec.from_hf(tmp_path)), tmp_path)
