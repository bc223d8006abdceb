"""Compressed files in blocks: every line once, damage told, memory bounded, all bytes hashed."""

import gzip
import zlib

import pytest
import xxhash
import zstandard

from megablocks_core.data.tokenize.compressed import runs_of_lines, whole_text

LINES = [b"line %d " % n + b"x" * (n % 50) for n in range(400)]
DATA = b"\n".join(LINES) + b"\n"
COMPRESS = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}


def runs(path, compression, unit_bytes=1000, max_bytes=10**6):
    return list(runs_of_lines(str(path), compression, unit_bytes=unit_bytes, max_bytes=max_bytes))


def hashes(data, piece):
    return b"".join(
        xxhash.xxh3_128_digest(data[at : at + piece]) for at in range(0, len(data), piece)
    )


@pytest.mark.parametrize("compression", COMPRESS)
def test_runs_hold_every_line_once_and_hash_every_byte(tmp_path, compression):
    packed = COMPRESS[compression](DATA[:5000]) + COMPRESS[compression](DATA[5000:])
    (tmp_path / "a").write_bytes(packed)  # two members, in the middle of a line
    for piece in (100, len(packed), 10**6):
        found = runs(tmp_path / "a", compression, unit_bytes=piece)
        assert b"".join(run.data for run in found) == DATA
        assert all(run.data.endswith(b"\n") for run in found if run.data)
        assert b"".join(run.pieces for run in found) == hashes(packed, piece)
        assert sum(run.nbytes for run in found) == len(packed)
        assert not any(run.fault for run in found)
        assert found == runs(tmp_path / "a", compression, unit_bytes=piece)


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_file_cut_short_gives_its_whole_lines_and_says_so(tmp_path, compression):
    packed = COMPRESS[compression](bytes(LINES[7] * 20 + b"\n") + DATA)
    seen = set()
    for cut in range(1, len(packed), 97):
        (tmp_path / "a").write_bytes(packed[:cut])
        found = runs(tmp_path / "a", compression)
        data = b"".join(run.data for run in found)
        assert not data or data.endswith(b"\n")
        assert (LINES[7] * 20 + b"\n" + DATA).startswith(data)
        assert found[-1].fault == "the compressed file is cut short"
        assert b"".join(run.pieces for run in found) == hashes(packed[:cut], 1000)
        seen.add(len(data))
    assert compression == "zst" or len(seen) > 2  # of one small frame of zstd nothing comes early


@pytest.mark.parametrize("compression", COMPRESS)
def test_damage_is_told(tmp_path, compression):
    packed = COMPRESS[compression](DATA)
    for data in (b"no such thing" * 9, packed + b"rest that is none" * 3):
        (tmp_path / "a").write_bytes(data)
        assert runs(tmp_path / "a", compression)[-1].fault == "the compressed file is damaged"
    damaged = bytearray(gzip.compress(DATA))
    damaged[-6] ^= 1  # the checksum
    (tmp_path / "a").write_bytes(damaged)
    assert runs(tmp_path / "a", "gz")[-1].fault == "the compressed file is damaged"


def test_zeros_after_a_gzip_file_are_padding(tmp_path):
    (tmp_path / "a").write_bytes(gzip.compress(DATA) + bytes(9000))
    found = runs(tmp_path / "a", "gz")
    assert b"".join(run.data for run in found) == DATA
    assert not found[-1].fault


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("text", [b"", b"a", b"\n\n"])
def test_small_texts(tmp_path, compression, text):
    (tmp_path / "a").write_bytes(COMPRESS[compression](text))
    assert b"".join(run.data for run in runs(tmp_path / "a", compression)) == text
    (tmp_path / "b").write_bytes(b"")
    (run,) = runs(tmp_path / "b", compression)
    assert (run.data, run.pieces, run.fault) == (b"", b"", "")


@pytest.mark.parametrize("compression", COMPRESS)
def test_of_a_long_line_a_byte_too_many_is_handed_on(tmp_path, compression):
    data = b"a\n" + b"y" * 100_000 + b"\nb\n" + b"z" * 50_000
    (tmp_path / "a").write_bytes(COMPRESS[compression](data))
    found = b"".join(run.data for run in runs(tmp_path / "a", compression, max_bytes=10))
    first, long, last, longer = found.split(b"\n")
    assert (first, last) == (b"a", b"b")
    assert len(long) > 10
    assert set(long) == set(b"y")
    assert len(longer) > 10


def test_memory_is_bounded_by_the_longest_line_allowed(tmp_path):
    """A line of 80 MB in a file of 80 kB."""
    import tracemalloc

    (tmp_path / "a").write_bytes(zlib.compress(b"x" * 80_000_000, wbits=31))
    tracemalloc.start()
    (run,) = runs(tmp_path / "a", "gz", unit_bytes=1 << 20, max_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(run.data) == (1 << 20) + 1
    assert peak < 32 << 20


def test_a_whole_text(tmp_path):
    (tmp_path / "a").write_bytes(gzip.compress(DATA))
    packed = (tmp_path / "a").read_bytes()
    run = whole_text(str(tmp_path / "a"), "gz", piece=100, max_bytes=10**6)
    assert run == (DATA, hashes(packed, 100), len(packed), "")
    run = whole_text(str(tmp_path / "a"), "gz", piece=100, max_bytes=10)
    assert (run.data, run.pieces) == (DATA[:11], hashes(packed, 100))
    (tmp_path / "a").write_bytes(packed[:-9])
    assert whole_text(str(tmp_path / "a"), "gz", piece=100, max_bytes=10**6).fault
