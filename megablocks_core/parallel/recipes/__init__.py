"""Low-precision training: recipes as data, which layers take which, and their arithmetic."""

from megablocks_core.parallel.recipes.recipe import MXFP8 as MXFP8
from megablocks_core.parallel.recipes.recipe import NVFP4 as NVFP4
from megablocks_core.parallel.recipes.recipe import BlockScaling as BlockScaling
from megablocks_core.parallel.recipes.recipe import CurrentScaling as CurrentScaling
from megablocks_core.parallel.recipes.recipe import DelayedScaling as DelayedScaling
from megablocks_core.parallel.recipes.recipe import Recipe as Recipe
