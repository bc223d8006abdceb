"""Wherever a number, a row or a name is asked for, anything else is refused by name.

Nothing is cut to a whole number, read as one from text, or wrapped around; and no error of
Python's or NumPy's own comes out of the inside.
"""

from typing import Any

import numpy as np
import pytest
import torch

from megablocks_core.data import (
    BlendedDataset,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    Permutation,
    Split,
    collate_packed,
    dense_mask,
    first_fit_decreasing,
    gather_tokens,
    shuffled_pieces,
    smallest_dtype,
    split_by_content,
    split_documents,
    write_byte_documents,
)
from megablocks_core.data.collate import cut_sequences

NO_NUMBERS = (
    1.5,
    2.0,
    "3",
    b"3",
    None,
    float("nan"),
    float("inf"),
    [3],
    {},
    np.float32(2),
    -(2**70),
)
NO_ROWS = ([1.5], ["3"], [True], [None], [[1], [1, 2]], 3, None, "3", {1}, [2**70])
NO_PAIRS = (
    1.5,
    "3",
    (3, 5),
    [3, 5],
    [(3,)],
    [(1, 2, 3)],
    {3: 5},
    [(0, "4")],
    [(0.0, 4)],
    [("0", 4)],
)


@pytest.fixture
def parts(stream):
    """An indexed dataset, its samples, a blend of two and a loader of them."""
    indexed = stream([9, 12, 5, 40, 1, 30])
    one, two = (GPTDataset(indexed, 4, seed=seed) for seed in (1, 2))
    blend = BlendedDataset({"one": one, "two": two}, weights={"one": 1, "two": 1}, seed=3)
    return indexed, one, blend, Loader(blend, global_batch_size=4, micro_batch_size=2)


def refused(call, values, name):
    for value in values:
        with pytest.raises((ValueError, IndexError), match=name):
            call(value)


def test_numbers_of_a_dataset_on_disk(parts):
    indexed = parts[0]
    refused(indexed.__getitem__, NO_NUMBERS, "index=|sequence")
    refused(lambda n: indexed[n:2], [1.5, "1"], "index=")
    refused(indexed.get, NO_NUMBERS, "index=|sequence")
    refused(lambda n: indexed.get(1, n), NO_NUMBERS, "offset=")
    refused(lambda n: indexed.get(1, 0, n), [1.5, "3", [1], -1, 13, 2**70], "length=")
    refused(indexed.document_start, [*NO_NUMBERS, -1, 7], "document")
    refused(IndexedDataset, [5, None, b"a", ["a"], "", "folder/"], "prefix=")


@pytest.mark.parametrize("order", ["native", "megatron"])
def test_numbers_of_samples(parts, order):
    indexed = parts[0]

    def build(**options):
        return GPTDataset(indexed, **{"sequence_length": 4, "seed": 1, "order": order, **options})

    for name, also in (
        ("sequence_length", [0]),
        ("seed", [-1, 2**64]),
        ("num_samples", [0, 2**63]),
    ):
        bad = [value for value in (*NO_NUMBERS, *also) if (name, value) != ("num_samples", None)]
        refused(lambda n, name=name: build(**{name: n}), bad, f"{name}=")
    refused(lambda n: build(end_token=n), [1.5, "</s>", [3], 2**40, -(2**40)], "end_token=")
    refused(lambda o: build(order=o), [None, 5, "x", GPTDataset], "order=")
    refused(lambda i: GPTDataset(i, 4, seed=1), ["prefix", None, [1, 2], np.arange(9)], "indexed=")
    splits = split_documents(6, "5,1")
    refused(lambda s: build(split=s), [splits, "train", range(3), [1], np.arange(2), 0], "split=")
    wrong: list[Any] = [[1, 2], None, np.array([1.0]), np.array([True]), np.array([[1]]), "a"]
    refused(lambda d: build(split=Split("odd", d)), wrong, "split 'odd'")
    two = np.array([1, 2])
    refused(lambda o: build(split=Split("odd", two, o)), [[0, 12, 17], np.zeros(3)], "split 'odd'")


def test_rows_of_samples(parts):
    for dataset in parts[1:3]:
        for call in (dataset.batch, dataset.num_loss_tokens):
            refused(call, NO_ROWS, "samples=")
        refused(dataset.__getitem__, [*NO_NUMBERS, -1, 10**6], "samples")
        refused(dataset.locate, [*NO_NUMBERS, -1, 10**6], "samples")
    refused(parts[1].starts, NO_ROWS, "samples=")
    refused(parts[1].resized, [*NO_NUMBERS, 0], "num_samples=")
    refused(parts[2].find, NO_ROWS, "samples=")
    refused(parts[2].counts, [*NO_NUMBERS, -1, 10**6], "num_samples=")


def test_arguments_of_a_blend(parts):
    one, two = (GPTDataset(parts[0], 4, seed=seed) for seed in (1, 2))
    both = {"one": 1, "two": 1}

    def build(**options):
        return BlendedDataset({"one": one, "two": two}, **{"seed": 1, "weights": both, **options})

    for order in ("native", "megatron"):
        refused(lambda w, order=order: build(weights=w, order=order), [
            5, "one", [1, 2], {}, {"one": "1"}, {"one": None}, {"one": float("nan")}, {"one": -1},
            {"one": 10**400}, {"one": 1e308, "two": 1e308}, [both], [(0, both, 1)], [(0, None)],
            [(0.5, both)], [("0", both)], [(-1, both)], [(0, both), (0, both)], [(0, {"one": 0})],
        ], "weights")  # fmt: skip
    refused(lambda n: build(seed=n), [*NO_NUMBERS, -1, 2**64], "seed=")
    refused(
        lambda n: build(num_samples=n), [n for n in NO_NUMBERS if n is not None], "num_samples="
    )
    refused(lambda n: build(max_repetition=n), ["3", [1], float("nan"), -1], "max_repetition=")
    refused(
        lambda n: build(max_repetition={"one": n}), ["3", None, float("nan")], "max_repetition="
    )
    for sources in (None, [one, two], "ab", {}, {"a": None}, {"a": parts[0]}, {"a": parts[3]}):
        with pytest.raises(ValueError, match="source"):
            BlendedDataset(sources, seed=1)  # pyright: ignore[reportArgumentType]


def test_arguments_of_a_loader(parts):
    def build(dataset=parts[2], **options):
        return Loader(dataset, **{"global_batch_size": 4, "micro_batch_size": 2, **options})

    for name in ("micro_batch_size", "workers", "prefetch", "consumed"):
        refused(lambda n, name=name: build(**{name: n}), [*NO_NUMBERS, -1], f"{name}=")
    for name in ("global_batch_size", "sequence_length"):
        refused(lambda n, name=name: build(**{name: n}), [*NO_PAIRS, 0, -1], name)
    refused(lambda r: build(skip=r), NO_PAIRS, "skip")
    refused(lambda d: build(dataset=d), [None, [1, 2], parts[0]], "dataset=")
    refused(lambda g: build(group=g), [None, 2, "dp"], "group=")
    loader = parts[3]
    for call in (loader.__getitem__, loader.make, loader.locate):
        refused(call, [*NO_NUMBERS, -1, 10**6], "step|index=")
    refused(loader.state_dict, [*NO_NUMBERS, -1, 10**6], "ahead=|step")
    refused(lambda n: setattr(loader, "consumed", n), [*NO_NUMBERS, -1, 10**6], "consumed=")


def test_f_132_what_is_no_state_is_refused_and_moves_nothing(parts):
    loader = parts[3]
    next(loader)
    state = loader.state_dict()
    refused(loader.load_state_dict, [
        None, {}, [state], [state, state], {"0": state}, {"consumed": 4}, {"recipe": "one"},
    ], "state=.* must hold what state_dict")  # fmt: skip
    for consumed in (*NO_NUMBERS, -1, 10**6):
        refused(loader.load_state_dict, [{**state, "consumed": consumed}], "consumed=")
    refused(loader.load_state_dict, [{**state, "recipe": None}], "recipe=None")
    assert loader.consumed == 4


def test_arguments_of_splits(parts):
    refused(lambda n: split_documents(n, "1"), [*NO_NUMBERS, -1], "num_documents=")
    weights = (1.5, None, {"train": 1}, [None], [[1, 2]], ["a"], [10**400], b"8,1", "8;1", "8,,1")
    names = ("abc", None, 5, ("a", "a", "b"), (1, 2, 3), ())
    for call in (split_documents, lambda _, w, **k: split_by_content(parts[0], w, **k)):
        refused(lambda w, call=call: call(6, w), weights, "weights=")
        refused(lambda n, call=call: call(6, "8,1,1", names=n), names, "names=")
    refused(lambda n: split_by_content(parts[0], "1", seed=n), [*NO_NUMBERS, -1, 2**64], "seed=")
    refused(lambda d: split_by_content(d, "1"), ["prefix", None, parts[1]], "dataset=")


def test_arguments_of_a_builder(tmp_path):
    new: Any = lambda **options: IndexedDatasetBuilder(  # noqa: E731
        options.pop("prefix", tmp_path / "b"), **{"dtype": np.uint16, **options}
    )
    refused(lambda p: new(prefix=p), [5, None, b"a", "", "folder/"], "prefix=")
    refused(lambda d: new(dtype=d), [None, "foo", 5, torch.int32, object], "dtype=")
    refused(lambda t: new(tokenizer=t), [5, object(), b"gpt2", ["gpt2"]], "tokenizer=")
    refused(smallest_dtype, [*NO_NUMBERS, 0, 2**63 + 1], "vocab_size=")
    with new(multimodal=True) as builder:
        tokens = ([1.5], ["1"], [None], None, 5, "12", [[1], [1, 2]], {1}, torch.ones(2).bfloat16())
        refused(builder.add_document, tokens, "token")
        refused(
            lambda n: builder.add_document([1, 2], n), [*NO_ROWS[:4], 2, "11", [2**70]], "lengths"
        )
        refused(lambda n: builder.add_document([1, 2], modes=n), [*NO_ROWS[:4], 2, "1"], "modes")
        refused(lambda n: builder.add_item([1], n), NO_NUMBERS, "mode=")
        refused(builder.add_index, [None, 5, b"a", builder], "prefix=")
        builder.add_document([1, 2])
    assert [each.tolist() for each in IndexedDataset(tmp_path / "b")] == [[1, 2]]
    texts = ("abc", b"abc", None, 5, [None], ["a", 5], ["\ud800"], [["a"]])
    refused(lambda t: write_byte_documents(t, tmp_path / "t"), texts, "texts")
    refused(lambda t: shuffled_pieces(t, max_bytes=9), texts, "texts")
    refused(lambda n: shuffled_pieces(["a"], max_bytes=n), [*NO_NUMBERS, 0], "max_bytes=")
    refused(lambda n: shuffled_pieces(["a"], max_bytes=9, seed=n), NO_NUMBERS[:-1], "seed=")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("t")] == []


def test_arguments_of_packing(parts):
    batch = parts[1].batch([0, 1])
    ends = ([1, 2], [0, 1], [0, 5], [0, 2, 1, 2], [], [0], "02", [0, 1.5, 2])
    refused(lambda e: collate_packed([{"tokens": [1, 2], "cu_seqlens": e}]), ends, "'cu_seqlens'")
    refused(dense_mask, [[], [1, 2], [0, 2, 1], [0, 1.5], "02", None, 5], "cu_seqlens=")
    refused(lambda row: collate_packed([row]), [*NO_ROWS, np.ones((2, 2), int)], r"samples\[0\]")
    refused(collate_packed, [[1, 2], "ab", {"tokens": [1]}, None, 5], "samples")
    for name, values in (
        ("labels", [None, ["a"], [1.5, 2]]), ("loss_mask", [None, ["a"], [float("nan"), 1], [1]]),
        ("position_ids", [[0.5, 1], [0]]), ("document_ids", [[1, 2, 3], 0]), ("weights", [[1, 2]]),
    ):  # fmt: skip
        refused(lambda v, name=name: collate_packed([{"tokens": [1, 2], name: v}]), values, name)
    for call in (lambda n: collate_packed([[1]], length=n), lambda n: cut_sequences(batch, n)):
        refused(call, [*(n for n in NO_NUMBERS if n is not None), 0], "length=")
    refused(lambda n: first_fit_decreasing(n, 9), NO_ROWS, "lengths=")
    refused(lambda n: first_fit_decreasing([1], n), [*NO_NUMBERS, 2**70], "capacity=")


def test_arguments_of_the_native_parts():
    for name in ("size", "seed", "epoch"):
        options = {"size": 9, "seed": 1, "epoch": 0}
        bad = [*NO_NUMBERS, -1, 2**70]
        refused(lambda n, n_=name, o=options: Permutation(**{**o, n_: n}), bad, f"{name}=")
    shuffled = Permutation(9, seed=1)
    refused(shuffled, [*NO_NUMBERS, 9, [1], torch.arange(2)], "place")
    refused(shuffled, [np.array([1.5]), np.array(["1"]), np.array([True]), np.array([9])], "places")
    arrays: dict[str, Any] = {"tokens": np.arange(9), "starts": np.zeros(1, int)}
    arrays |= {"lengths": np.ones(1, int), "out": np.zeros(1, int)}
    for name in arrays:
        bad = [[0], None, "x", torch.arange(1), np.zeros(1), np.zeros((1, 1), int)]
        refused(lambda a, n=name: gather_tokens(**{**arrays, n: a}), bad, name)
    refused(lambda n: gather_tokens(**arrays, threads=n), NO_NUMBERS, "threads=")


@pytest.mark.parametrize("three", [np.int64(3), np.uint64(3), np.uint8(3), torch.tensor(3)])
def test_numbers_of_numpy_and_torch_are_the_numbers_they_are(parts, three):
    """``uint64`` and small dtypes wrap around in sums with a negative or a large number."""
    indexed = parts[0]

    def run(n):
        sources = {
            name: GPTDataset(indexed, n, seed=seed, num_samples=n, order=order)
            for name, seed, order in (("a", n, "native"), ("b", 7, "megatron"))
        }
        weights = [(0, {"a": n, "b": n}), (n, {"a": n})]
        blend = BlendedDataset(sources, weights=weights, seed=n, num_samples=n, max_repetition=n)
        loader = Loader(
            blend, global_batch_size=[(0, n)], micro_batch_size=n, sequence_length=n, prefetch=n,
            skip=[(n, n + 1)], consumed=0, workers=n,
        )  # fmt: skip
        recipe = loader.state_dict()["recipe"]
        tokens = next(loader).micro_batches[0]["tokens"].tolist()
        loader.consumed = n
        places = Permutation(n, seed=n, epoch=n)(np.arange(3)).tolist()
        return (
            recipe,
            tokens,
            loader.consumed,
            places,
            indexed[n].tolist(),
            indexed.document_start(n),
        )

    assert run(three) == run(3)
