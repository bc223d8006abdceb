"""Folders of quantised weights, of what a model's tensors are made of."""

from megablocks_core.export.quantising.recipe import Fp8 as Fp8
from megablocks_core.export.quantising.recipe import Fp8Blocks as Fp8Blocks
from megablocks_core.export.quantising.recipe import Int4 as Int4
from megablocks_core.export.quantising.recipe import Int8 as Int8
from megablocks_core.export.quantising.recipe import Nvfp4 as Nvfp4
from megablocks_core.export.quantising.recipe import Recipe as Recipe
