"""What is shown of a step is what a loader gives for it."""

import numpy as np
import pytest

from megablocks_core.data import IndexedDatasetBuilder, Loader, decode_bytes
from megablocks_core.data.tools import open_recipe, show, show_step

from .conftest import build


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"order": "megatron"},
        {"global_batch_size": [[0, 3], [30, 7]]},
        {"split": {"weights": "8,2", "take": "train", "by": "content"}, "steps": 30},
    ],
    ids=["native", "megatron", "schedule", "split"],
)
def test_a_step_is_that_of_a_loader(recipe_file, changes):
    recipe = open_recipe(recipe_file(**changes))
    loader = Loader(recipe.dataset, micro_batch_size=1, **recipe.loader_options)
    sources, number = set(), 0
    for step in range(recipe.steps):
        samples = show_step(recipe, step, tokenizer="bytes")
        batches = loader.make(step).micro_batches
        for sample, batch in zip(samples, batches, strict=True):
            assert sample.number == number == int(batch["sample_ids"][0])
            number += 1
            ids = np.concatenate([part.ids for part in sample.parts])
            assert ids.tolist() == batch["tokens"][0].tolist()
            for part in sample.parts:
                sources.add(part.source)
                assert part.length == len(part.ids)
                whole = show(part.prefix, part.document)
                assert (
                    whole.ids[part.start : part.start + part.length].tolist() == part.ids.tolist()
                )
                known = [one for one in part.ids.tolist() if one < 256]
                assert part.text.replace("<id 256>", "") == decode_bytes(known)
    assert sources == {"web", "code"}


def test_a_document_and_the_first_of_its_tokens(tmp_path):
    prefix = tmp_path / "a"
    with IndexedDatasetBuilder(prefix, dtype=np.uint16, tokenizer="bytes") as builder:
        builder.add_document([1])
        builder.add_document([104, 105, 33], lengths=[2, 1])  # of two sequences
        builder.add_document([])
    part = show(prefix, 1)
    assert (part.source, part.prefix) == (str(prefix), str(prefix))
    assert (part.document, part.start, part.length, part.text) == (1, 0, 3, "hi!")
    part = show(prefix, 1, most=2)
    assert (part.length, part.ids.tolist(), part.text) == (3, [104, 105], "hi")
    assert show(prefix, 2).text == ""
    with pytest.raises(ValueError, match="most=-1 must be at least 0"):
        show(prefix, 1, most=-1)
    for document in (3, -1):
        with pytest.raises(IndexError, match=f"document {document} of 3"):
            show(prefix, document)


def test_without_a_tokenizer_there_are_ids_alone(tmp_path, recipe_file):
    part = show(build(tmp_path / "a", [[7, 8]], tokenizer="gpt2"), 0)
    assert (part.ids.tolist(), part.text) == ([7, 8], None)
    recipe = open_recipe(recipe_file())
    assert show_step(recipe, 0, most=3)[0].parts[0].text is None
    assert len(show_step(recipe, 0, most=3)[0].parts[0].ids) <= 3


def test_a_step_that_is_not_there(recipe_file):
    recipe = open_recipe(recipe_file())
    with pytest.raises(IndexError, match="step 40 of 40"):
        show_step(recipe, 40)
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        show_step(recipe, -1)
