"""What sources give over a run is what the loader's steps take."""

from collections import Counter

import pytest

from megablocks_core.data import Loader
from megablocks_core.data.sources import epoch_of
from megablocks_core.data.tools import inspect_recipe, open_recipe
from megablocks_core.data.tools.mixing import curves


def counted(recipe, steps):
    """Samples of each source in some steps, by going through them."""
    loader = Loader(recipe.dataset, micro_batch_size=1, **recipe.loader_options)
    return Counter(place.source for step in steps for place in loader.locate(step))


@pytest.mark.parametrize("changes", [{}, {"global_batch_size": [[0, 3], [30, 5]]}])
def test_the_table_counts_what_a_loader_gives(recipe_file, tmp_path, changes):
    recipe = open_recipe(recipe_file(max_repetition=3, **changes))
    found, taken = inspect_recipe(recipe), counted(recipe, range(40))
    assert found.samples == sum(taken.values()) and found.tokens == 32 * found.samples
    assert (found.steps, found.path) == (40, str(tmp_path / "recipe.json"))
    for one in found.sources:
        assert one.samples == taken[one.name] and one.tokens == 32 * one.samples
        assert one.share == one.samples / found.samples
        epoch = epoch_of(recipe.dataset.sources[one.name])
        assert one.samples_per_epoch == epoch and one.epochs == one.samples / epoch
        assert one.prefix == str(tmp_path / one.name)
    assert [one.weight for one in found.sources] == pytest.approx([0.7, 0.3])
    assert [one.documents for one in found.sources] == [60, 30]


def test_repetitions_are_whole_passes(recipe_file):
    recipe = open_recipe(recipe_file(steps=200, max_repetition=float("inf")))
    for one in inspect_recipe(recipe).sources:
        assert one.epochs > 1
        assert one.repetitions - 1 < one.epochs <= one.repetitions


def test_curves_follow_the_steps(recipe_file):
    weights = [[0, {"web": 1}], [80, {"code": 1}]]
    sources = {"web": {"prefix": "web"}, "code": {"prefix": "code"}}
    recipe = open_recipe(recipe_file(sources=sources, weights=weights))
    found = curves(recipe, points=11)
    assert found.steps == list(range(0, 41, 4))
    assert found.shares == {"web": [1.0] * 5 + [0.0] * 5, "code": [0.0] * 5 + [1.0] * 5}
    for name, source in recipe.dataset.sources.items():
        counts = [counted(recipe, range(step))[name] for step in found.steps]
        assert found.epochs[name] == [count / epoch_of(source) for count in counts]
    few = curves(open_recipe(recipe_file(steps=2)))
    assert few.steps == [0, 1, 2]
