"""A manifest reads back as it was written, or is refused."""

import json

import pytest
import xxhash

from megablocks_core.data.manifest import FileRecord, Manifest, parse_manifest

MANIFEST = Manifest(
    build="0123abcd",
    dtype="uint16",
    num_sequences=3,
    num_documents=2,
    num_tokens=7,
    tokenizer='quotes " and \u00fc',
    files={".bin": FileRecord(14, "00" * 16), ".idx": FileRecord(94, "11" * 16)},
)


@pytest.mark.parametrize("tokenizer", [None, "", 'quotes " and \u00fc', ',\n "xxh3_128": "x"\n}\n'])
def test_round_trip(tokenizer):
    manifest = Manifest(**{**vars(MANIFEST), "tokenizer": tokenizer})
    text = manifest.text()
    assert parse_manifest(text.encode(), "a") == manifest
    assert json.loads(text)["num_tokens"] == 7


def test_any_changed_bit_and_any_cut_is_refused():
    text = MANIFEST.text().encode()
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"a\.json: is no manifest of a dataset"):
            parse_manifest(bytes(changed), "a.json")
    for length in range(len(text)):
        with pytest.raises(ValueError, match=r"a\.json: is no manifest of a dataset"):
            parse_manifest(text[:length], "a.json")


@pytest.mark.parametrize(
    "change",
    [{"format": "another"}, {"version": 2}, {"files": []}, {"files": {".bin": 3}}, {"more": 1}],
)
def test_another_kind_of_manifest_is_refused(change):
    body = json.loads(MANIFEST.text()) | change
    del body["xxh3_128"]
    head = json.dumps(body, indent=1).removesuffix("\n}")
    text = f'{head},\n "xxh3_128": "{xxhash.xxh3_128_hexdigest(head.encode())}"\n}}\n'
    with pytest.raises(ValueError, match="is no manifest of a dataset"):
        parse_manifest(text.encode(), "a.json")
