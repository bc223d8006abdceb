"""The native gather of token ranges equals its NumPy twin and never reads outside the tokens."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core import _native
from megablocks_core.data import gather
from megablocks_core.data.gather import TOKEN_DTYPES, gather_tokens, gather_tokens_numpy


def _ranges(pairs):
    starts, lengths = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
    return starts, lengths


@st.composite
def _tokens_and_ranges(draw):
    dtype = draw(st.sampled_from(TOKEN_DTYPES))
    limits = np.iinfo(dtype)
    tokens = draw(st.lists(st.integers(limits.min, limits.max), max_size=40))
    start = st.integers(0, len(tokens))
    pairs = draw(st.lists(start.flatmap(lambda s: st.tuples(st.just(s), _length(tokens, s)))))
    return np.array(tokens, dtype=dtype), *_ranges(pairs)


def _length(tokens, start):
    return st.integers(0, len(tokens) - start)


@given(_tokens_and_ranges(), st.integers(1, 8))
def test_native_equals_its_twin(case, threads):
    tokens, starts, lengths = case
    native, twin = (np.full(lengths.sum(), -7, dtype=np.int64) for _ in range(2))
    gather_tokens(tokens, starts, lengths, out=native, threads=threads)
    gather_tokens_numpy(tokens, starts, lengths, out=twin)
    assert native.tolist() == twin.tolist()


@given(st.data())
def test_native_refuses_what_its_twin_refuses_and_writes_nothing(data):
    edge = st.sampled_from([-(2**63), -1, 0, 1, 3, 5, 6, 2**62, 2**63 - 1])
    pairs = data.draw(st.lists(st.tuples(edge, edge), min_size=1, max_size=4))
    tokens, (starts, lengths) = np.arange(5, dtype=np.uint16), _ranges(pairs)
    out = np.full(data.draw(st.integers(0, 8)), -7, dtype=np.int64)

    def said_by(function):
        try:
            function(tokens, starts, lengths, out=out)
        except ValueError as error:
            assert (out == -7).all()
            return str(error)
        result = out.tolist()
        out.fill(-7)
        return result

    assert said_by(gather_tokens) == said_by(gather_tokens_numpy) == said_by(_native.gather_tokens)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[3_500_001], [0, 1, 0] + [49_999] * 64 + [10, 0]])
def test_every_thread_writes_its_whole_share(lengths, threads):
    tokens = np.random.default_rng(0).integers(0, 65_536, 4_000_000, dtype=np.uint16)
    lengths = np.array(lengths, dtype=np.int64)
    starts = np.random.default_rng(1).integers(0, tokens.size - lengths + 1)
    native, twin = (np.full(lengths.sum(), -7, dtype=np.int64) for _ in range(2))
    gather_tokens(tokens, starts, lengths, out=native, threads=threads)
    gather_tokens_numpy(tokens, starts, lengths, out=twin)
    assert np.array_equal(native, twin)


def test_a_batch_comes_from_a_read_only_memory_map(tmp_path):
    np.arange(100, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.int32, mode="r")
    batch_BS = np.zeros((2, 5), dtype=np.int64)
    starts, lengths = _ranges([(0, 3), (50, 2), (95, 5)])
    gather_tokens(tokens, starts, lengths, out=batch_BS.reshape(-1))
    assert batch_BS.tolist() == [[0, 1, 2, 50, 51], [95, 96, 97, 98, 99]]


def test_no_read_goes_past_the_end_of_the_mapping():
    page = mmap.PAGESIZE
    tokens = np.frombuffer(mmap.mmap(-1, page), dtype=np.uint8)
    out = np.full(page, -7, dtype=np.int64)
    gather_tokens(tokens, *_ranges([(0, page)]), out=out, threads=4)
    assert not out.any()
    with pytest.raises(ValueError, match=rf"lengths\[0\]={page} must lie within {page} tokens"):
        gather_tokens(tokens, *_ranges([(1, page)]), out=out)


def test_other_python_threads_run_meanwhile():
    tokens = np.zeros(4_000_000, dtype=np.uint8)
    starts, lengths = _ranges([(0, tokens.size)])

    def is_seen_half_written():
        out = np.full(tokens.size, -7, dtype=np.int64)
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(gather_tokens, tokens, starts, lengths, out=out)
            while not work.done():
                if out[0] == 0 and out[-1] == -7:
                    return True
        return False

    # A busy machine may stop this thread at the wrong time; the interpreter lock always would.
    assert any(is_seen_half_written() for _ in range(50))


GOOD = {
    "tokens": np.arange(5, dtype=np.uint16),
    "starts": np.array([1]),
    "lengths": np.array([3]),
    "out": np.zeros(3, dtype=np.int64),
    "threads": 1,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.arange(5.0)}, "tokens.dtype=float64 must be uint8 or int8"),
        ({"tokens": np.arange(5, dtype=">i4")}, "tokens.dtype=>i4 must be"),
        ({"tokens": np.arange(5, dtype=np.uint64)}, "tokens.dtype=uint64 must be"),
        ({"tokens": np.arange(10, dtype=np.int32)[::2]}, "one contiguous, aligned row"),
        ({"tokens": np.zeros((5, 1), dtype=np.int32)}, "tokens of shape \\(5, 1\\) must be one"),
        ({"tokens": np.frombuffer(bytes(11), np.int16, 5, 1)}, "one contiguous, aligned row"),
        ({"starts": np.array([1], dtype=np.int32)}, "starts.dtype=int32 must be int64"),
        ({"starts": np.array([1, 2])}, "starts.size=2 must equal lengths.size=1"),
        ({"out": np.zeros(3)}, "out.dtype=float64 must be int64"),
        ({"out": np.zeros(4, dtype=np.int64)}, "out.size=4 must be the sum of lengths"),
        ({"out": np.zeros(6, dtype=np.int64)[::2]}, "out of shape \\(3,\\) must be one contiguous"),
        ({"threads": 0}, "threads=0 must be at least 1"),
    ],
)
@pytest.mark.parametrize("native", [_native, None], ids=["native", "numpy"])
def test_bad_input_is_named(monkeypatch, native, change, message):
    monkeypatch.setattr(gather, "_native", native)
    arguments = {**GOOD, **change}
    with pytest.raises(ValueError, match=message):
        gather_tokens(
            arguments["tokens"],
            arguments["starts"],
            arguments["lengths"],
            out=arguments["out"],
            threads=arguments["threads"],
        )


def test_a_read_only_out_is_refused():
    out = np.zeros(3, dtype=np.int64)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writeable"):
        gather_tokens(GOOD["tokens"], GOOD["starts"], GOOD["lengths"], out=out)
