"""Low-precision training: recipes as data, which layers take which, and their arithmetic."""

from megablocks_core.parallel.recipes.choosing import Choice as Choice
from megablocks_core.parallel.recipes.choosing import Recipes as Recipes
from megablocks_core.parallel.recipes.choosing import autocast as autocast
from megablocks_core.parallel.recipes.emulation import emulated_linear as emulated_linear
from megablocks_core.parallel.recipes.layers import (
    emulated_linear_factory as emulated_linear_factory,
)
from megablocks_core.parallel.recipes.recipe import MXFP8 as MXFP8
from megablocks_core.parallel.recipes.recipe import NVFP4 as NVFP4
from megablocks_core.parallel.recipes.recipe import BlockScaling as BlockScaling
from megablocks_core.parallel.recipes.recipe import CurrentScaling as CurrentScaling
from megablocks_core.parallel.recipes.recipe import DelayedScaling as DelayedScaling
from megablocks_core.parallel.recipes.recipe import Recipe as Recipe
from megablocks_core.parallel.recipes.state import state_for as state_for
from megablocks_core.parallel.recipes.torchao import (
    torchao_linear_factory as torchao_linear_factory,
)
from megablocks_core.parallel.recipes.transformer_engine import initialise as initialise
from megablocks_core.parallel.recipes.transformer_engine import (
    to_transformer_engine as to_transformer_engine,
)
