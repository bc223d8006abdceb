"""Each tokenizer gives the ids that its own library gives, and nothing else."""

import base64
import json
import sys

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers

from megablocks_core.data.tokenize.encoders import end_of_document, open_encoder

from .conftest import END, some_texts

TEXTS = ["plain", "", "naïve 数据 \U0001f600", f"a{END}b", "two  spaces\n", *some_texts(30)]


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sp")
    (folder / "texts.txt").write_text("\n".join(some_texts(300, seed=9)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "texts.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=320,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    return folder / "m.model"


@pytest.fixture
def encoding_of_tiktoken(tmp_path, monkeypatch):
    """An encoding of single bytes and one pair, as a plugin that tiktoken finds by itself."""
    ranks = {bytes([n]): n for n in range(256)} | {b"ab": 256}
    (tmp_path / "tiktoken_ext").mkdir()
    table = {base64.b64encode(token).decode(): rank for token, rank in ranks.items()}
    (tmp_path / "tiktoken_ext" / "ours_for_test.py").write_text(
        f"import base64\n"
        f"RANKS = {{base64.b64decode(key): rank for key, rank in {table!r}.items()}}\n"
        f"def ours():\n"
        f"    return dict(name='ours', pat_str=r'\\S+|\\s+', mergeable_ranks=RANKS,\n"
        f"                special_tokens={{'{END}': 257}})\n"
        f"ENCODING_CONSTRUCTORS = {{'ours': ours}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
    tiktoken.registry._available_plugin_modules.cache_clear()
    monkeypatch.delitem(sys.modules, "tiktoken_ext", raising=False)
    yield "tiktoken:ours"
    tiktoken.registry._available_plugin_modules.cache_clear()
    tiktoken.registry.ENCODING_CONSTRUCTORS = None
    tiktoken.registry.ENCODINGS.pop("ours", None)


def encoded(encoder, texts):
    ids, lengths = encoder.encode(texts)
    assert ids.max(initial=0) < encoder.vocab_size
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def test_bytes():
    encoder = open_encoder("bytes")
    assert encoded(encoder, TEXTS) == [list(text.encode()) for text in TEXTS]
    assert (encoder.vocab_size, encoder.end, encoder.name) == (257, 256, "bytes")


def test_hugging_face(bpe):
    plain = tokenizers.Tokenizer.from_file(str(bpe))
    expected = [plain.encode(text, add_special_tokens=False).ids for text in TEXTS]
    for path in (bpe, bpe.parent):
        encoder = open_encoder(f"hf:{path}")
        assert encoded(encoder, TEXTS) == expected
        assert (encoder.vocab_size, encoder.end) == (290, plain.token_to_id(END))
        assert encoder.id_of("zzzz") is None


def test_a_post_processor_truncation_and_padding_change_nothing(bpe, tmp_path):
    plain = tokenizers.Tokenizer.from_file(str(bpe))
    expected = [plain.encode(text, add_special_tokens=False).ids for text in TEXTS]
    plain.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    plain.enable_truncation(3)
    plain.enable_padding(length=50)
    plain.save(str(tmp_path / "tokenizer.json"))
    assert encoded(open_encoder(f"hf:{tmp_path}"), TEXTS) == expected


def test_the_end_is_the_one_that_the_configuration_names(bpe, tmp_path):
    plain = tokenizers.Tokenizer.from_file(str(bpe))
    plain.add_special_tokens(["</s>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    assert open_encoder(f"hf:{tmp_path}").end is None  # of two that are usual, neither
    config = tmp_path / "tokenizer_config.json"
    for token in ("</s>", {"content": "</s>"}):
        config.write_text(json.dumps({"eos_token": token}))
        assert open_encoder(f"hf:{tmp_path}").end == 290
    config.write_text("no JSON")
    assert open_encoder(f"hf:{tmp_path}").end is None


def test_tiktoken(encoding_of_tiktoken):
    encoder = open_encoder(encoding_of_tiktoken)
    plain = tiktoken.get_encoding("ours")
    assert encoded(encoder, TEXTS) == [plain.encode_ordinary(text) for text in TEXTS]
    assert encoded(encoder, ["ab"]) == [[256]]
    assert 257 not in encoder.encode([END]).ids
    assert (encoder.vocab_size, encoder.end) == (258, 257)
    assert encoder.name.startswith("tiktoken ours xxh3_128:")
    assert (encoder.id_of("ab"), encoder.id_of("zz")) == (256, None)


def test_sentencepiece(sentencepiece_model):
    import sentencepiece

    encoder = open_encoder(f"sp:{sentencepiece_model}")
    plain = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert encoded(encoder, TEXTS) == [plain.encode(text) for text in TEXTS]
    assert (encoder.vocab_size, encoder.end) == (320, plain.eos_id())
    assert (encoder.id_of("</s>"), encoder.id_of("nothing")) == (2, None)


def test_the_name_is_that_of_the_content(bpe, tmp_path):
    (tmp_path / "other.json").write_bytes(bpe.read_bytes())
    names = {open_encoder(f"hf:{path}").name for path in (bpe, tmp_path / "other.json")}
    assert len(names) == 1
    (tmp_path / "other.json").write_bytes(bpe.read_bytes() + b"\n")
    assert open_encoder(f"hf:{tmp_path}/other.json").name not in names


@pytest.mark.parametrize(
    ("given", "end"), [(False, None), (True, 0), (7, 7), (END, 0), ("a", None), (289, 289)]
)
def test_which_end(bpe, given, end):
    encoder = open_encoder(f"hf:{bpe}")
    found = end_of_document(encoder, given)
    assert found == (encoder.id_of("a") if given == "a" else end)


def test_wrong_ends_are_refused(bpe, tmp_path):
    encoder = open_encoder(f"hf:{bpe}")
    for given in ("zzzz", 290, -1):
        with pytest.raises(ValueError, match=f"append_eod={given!r} must be"):
            end_of_document(encoder, given)
    encoder.end = None
    with pytest.raises(ValueError, match="append_eod=True needs"):
        end_of_document(encoder, True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt2", "must be bytes, hf:PATH"),
        ("hf:", "must be bytes, hf:PATH"),
        ("bytes:x", "must be bytes, hf:PATH"),
        ("hf:nowhere", "must be a tokenizer.json"),
        ("sp:nowhere", "must be a file that exists"),
        ("tiktoken:nowhere", "must be an encoding"),
    ],
)
def test_wrong_names_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        open_encoder(spec)


def test_files_that_hold_no_tokenizer_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        open_encoder(f"hf:{tmp_path}/x")
    with pytest.raises(ValueError, match="is no model of sentencepiece"):
        open_encoder(f"sp:{tmp_path}/x")


@pytest.mark.parametrize(
    ("package", "spec"),
    [("tokenizers", "hf:x"), ("tiktoken", "tiktoken:x"), ("sentencepiece", "sp:x")],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package, spec):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{package}.*megablocks-core\[tokenize\]"):
        open_encoder(spec)
