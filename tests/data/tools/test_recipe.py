"""A recipe is enough to build the steps that are built by hand."""

import json

import numpy as np
import pytest

from megablocks_core.data import (
    BlendedDataset,
    GPTDataset,
    IndexedDataset,
    Loader,
    split_by_content,
    split_documents,
)
from megablocks_core.data.blend_order import greedy
from megablocks_core.data.sources import epoch_of
from megablocks_core.data.tools import open_recipe


def by_hand(folder, *, order="native", num_samples=160, take=None, seeds=(5, 6), **blend):
    """The blend of the recipe of conftest, built without it."""
    sources, lengths = {}, {"web": None, "code": None}
    if order == "megatron":
        drawn = greedy([0.7, 0.3], num_samples).source
        lengths = dict(zip(lengths, np.bincount(drawn).tolist(), strict=True))
    for name, seed in zip(("web", "code"), seeds, strict=True):
        indexed = IndexedDataset(folder / name)
        sources[name] = GPTDataset(
            indexed,
            32,
            seed=seed,
            order=order,
            num_samples=lengths[name],
            split=take(indexed) if take else None,
        )
    weights = blend.pop("weights", {"web": 7, "code": 3})
    return BlendedDataset(
        sources, seed=5, weights=weights, num_samples=num_samples, order=order, **blend
    )


def same_steps(recipe, dataset, **options):
    """Whether the loader of a recipe gives the steps of one by hand; torch compares."""
    options = {"global_batch_size": 4, **options}
    ours = Loader(recipe.dataset, micro_batch_size=2, **recipe.loader_options)
    hand = Loader(dataset, micro_batch_size=2, **options)
    assert recipe.dataset.fingerprint == dataset.fingerprint
    assert len(ours) == len(hand)
    for one, other in zip(ours, hand, strict=True):
        assert one.num_tokens == other.num_tokens
        for batch, twin in zip(one.micro_batches, other.micro_batches, strict=True):
            assert all(
                (batch[key] == twin[key]).all() for key in ("tokens", "labels", "cu_seqlens")
            )
    return True


def test_a_recipe_gives_the_steps_built_by_hand(tmp_path, recipe_file):
    recipe = open_recipe(recipe_file())
    assert recipe.steps == 40 and recipe.loader_options == {"global_batch_size": 4}
    assert same_steps(recipe, by_hand(tmp_path))


@pytest.mark.parametrize("steps", [40, 200])  # inside an epoch, and over several
def test_in_the_order_of_megatron(tmp_path, recipe_file, steps):
    given = {"order": "megatron", "max_repetition": 9}
    recipe = open_recipe(recipe_file(steps=steps, **given))
    assert same_steps(recipe, by_hand(tmp_path, num_samples=4 * steps, **given))


@pytest.mark.parametrize("by", ["documents", "content"])
def test_a_split_of_each_source(tmp_path, recipe_file, by):
    split = {"weights": "8,2", "names": ["train", "valid"], "take": "valid", "by": by}
    split |= {"seed": 9} if by == "content" else {}

    def take(indexed):
        names = ("train", "valid")
        if by == "content":
            return split_by_content(indexed, "8,2", names=names, seed=9)["valid"]
        return split_documents(indexed.num_documents, "8,2", names=names)["valid"]

    recipe = open_recipe(recipe_file(split=split, steps=8))
    assert same_steps(recipe, by_hand(tmp_path, take=take, num_samples=32))


def test_a_split_of_sequences_in_the_order_of_megatron(recipe_file):
    split = {"weights": [9, 1], "take": "train", "by": "sequences"}
    recipe = open_recipe(recipe_file(split=split, order="megatron", steps=8))
    web = recipe.dataset.sources["web"]
    assert isinstance(web, GPTDataset) and web.split.documents == range(54)


def test_schedules_segments_and_options(tmp_path, recipe_file):
    weights = [[0, {"web": 1}], [80, {"web": 1, "code": 2}]]
    sources = {"web": {"prefix": "web", "seed": 11}, "code": {"prefix": str(tmp_path / "code")}}
    changes = {"sources": sources, "weights": weights, "max_repetition": {"web": 2, "code": 3}}
    stages = [[0, 4], [40, 8]]
    options = {"cross_document_loss": False, "end_token": 256, "restart_positions": False}
    path = recipe_file(
        global_batch_size=stages,
        row_length=[[0, 16], [40, 32]],
        skip=[[1, 3]],
        **changes,
        **options,
    )
    recipe = open_recipe(path)
    hand = by_hand(
        tmp_path,
        seeds=(11, 6),
        weights=[(0, {"web": 1}), (80, {"web": 1, "code": 2})],
        num_samples=40 + 30 * 8,
        max_repetition={"web": 2, "code": 3},
    )
    for source in recipe.dataset.sources.values():
        assert {name: getattr(source, name) for name in options} == options
    numbers = np.arange(280)
    assert [part.tolist() for part in recipe.dataset.find(numbers)] == [
        part.tolist() for part in hand.find(numbers)
    ]
    loader = Loader(recipe.dataset, micro_batch_size=4, **recipe.loader_options)
    assert len(loader) == recipe.steps - 2 == 38
    assert next(loader).micro_batches[0]["cu_seqlens"].diff().max() <= 16


def test_without_steps_it_lasts_as_long_as_its_sources(recipe_file):
    sources = {"web": {"prefix": "web"}, "code": {"prefix": "code"}}
    recipe = open_recipe(recipe_file(sources=sources, without=["steps"]))
    one_epoch = sum(epoch_of(source) for source in recipe.dataset.sources.values())
    assert len(recipe.dataset) == one_epoch and recipe.steps == one_epoch // 4
    with pytest.raises(ValueError, match="steps=40 must be left out where no source has a weight"):
        open_recipe(recipe_file(sources=sources, steps=40))


def test_toml_is_the_same(tmp_path, recipe_file):
    recipe_file()
    path = tmp_path / "recipe.toml"
    path.write_text(
        "sequence_length = 32\nglobal_batch_size = 4\nseed = 5\nsteps = 40\nmax_repetition = inf\n"
        '[sources.web]\nprefix = "web"\nweight = 7\n[sources.code]\nprefix = "code"\nweight = 3\n'
    )
    assert same_steps(open_recipe(path), by_hand(tmp_path))
    path.write_text("a = 1\na = 2")
    with pytest.raises(ValueError, match="recipe.toml: is no recipe: "):
        open_recipe(path)


SOURCE = {"prefix": "web", "weight": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sed": 1}, r"the recipe has the keys \['sed'\], must have only of"),
        ({"without": ["seed", "sources"]}, r"the recipe must have \['seed', 'sources'\]"),
        ({"sources": {}}, "sources={} must name at least one"),
        ({"sources": []}, r"sources=\[\] must be an object"),
        ({"sources": {"a": {**SOURCE, "wieght": 1}}}, r"source 'a' has the keys \['wieght'\]"),
        ({"sources": {"a": {"weight": 1}}}, r"source 'a' must have \['prefix'\]"),
        ({"sources": {"a": {"prefix": 1, "weight": 1}}}, "prefix=1 must be a path"),
        (
            {"sources": {"a": SOURCE, "b": {"prefix": "code"}}},
            r"sources \['b'\] must have a weight too, or none may",
        ),
        ({"weights": {"web": 1}}, "weights and the weight of a source must not be given"),
        ({"sources": {"a": {**SOURCE, "weight": -1}}}, "weights: a=-1 must be a number, 0 or more"),
        ({"sources": {"a": {**SOURCE, "weight": 0}}, "order": "megatron"}, "must have one above 0"),
        ({"sequence_length": 0}, "sequence_length=0 must be at least 1"),
        ({"sequence_length": "32"}, "sequence_length='32' must be a whole number"),
        ({"global_batch_size": 0}, "global_batch_size=0 must be at least 1"),
        ({"global_batch_size": [[5, 1]]}, "must begin at sample 0"),
        ({"steps": 1.5}, "steps=1.5 must be a whole number"),
        ({"steps": 10**6}, "source 'web' is asked for"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"order": "random"}, "order='random' must be"),
        ({"cross_document_loss": 1}, "cross_document_loss=1 must be true or false"),
        ({"split": {"weights": "9,1"}}, r"split must have \['take'\]"),
        ({"split": {"weights": "9,1", "take": "tarin"}}, "take='tarin' must be one of"),
        ({"split": {"weights": "9,1", "take": "train", "by": "x"}}, "by='x' must be"),
        ({"split": {"weights": "9,1", "take": "train", "seed": 1}}, "must go with by='content'"),
        ({"split": {"weights": "9,1", "take": "train", "x": 1}}, r"split has the keys \['x'\]"),
        ({"split": "9,1"}, "split='9,1' must be an object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_the_file(recipe_file, changes, message):
    with pytest.raises(ValueError, match=f"recipe.json: .*{message}"):
        open_recipe(recipe_file(**changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is no recipe: "),
        (b"\xff", "is no recipe: "),
        (b"[" * 100_000, "is no recipe: "),
        (b"[1]", "must hold an object at its top"),
        (b'{"seed": 1, "seed": 2}', "a key is there twice among"),
    ],
)
def test_what_is_no_recipe(tmp_path, text, message):
    (tmp_path / "r.json").write_bytes(text)
    with pytest.raises(ValueError, match=f"r.json: .*{message}"):
        open_recipe(tmp_path / "r.json")


def test_a_prefix_begins_at_the_recipes_folder(tmp_path, recipe_file, monkeypatch):
    recipe_file()
    (tmp_path / "sub").mkdir()
    whole = json.loads((tmp_path / "recipe.json").read_text())
    whole["sources"]["web"]["prefix"] = "../web"
    whole["sources"]["code"]["prefix"] = f"file://{tmp_path}/code"
    (tmp_path / "sub" / "r.json").write_text(json.dumps(whole))
    monkeypatch.chdir("/")
    assert same_steps(open_recipe(tmp_path / "sub" / "r.json"), by_hand(tmp_path))
    (tmp_path / "web.bin").unlink()
    with pytest.raises(FileNotFoundError):
        open_recipe(tmp_path / "sub" / "r.json")
