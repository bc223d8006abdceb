"""Tools for datasets: look, check, compare, merge, split, draw; ``megablocks-data`` runs them.

Loads NumPy only; tokenizers and matplotlib come with the call that needs them.
"""

from megablocks_core.data.tools.checking import Check as Check
from megablocks_core.data.tools.checking import Checked as Checked
from megablocks_core.data.tools.checking import Pair as Pair
from megablocks_core.data.tools.checking import check as check
from megablocks_core.data.tools.documents import DamagedDataset as DamagedDataset
from megablocks_core.data.tools.inspecting import Bin as Bin
from megablocks_core.data.tools.inspecting import Ids as Ids
from megablocks_core.data.tools.inspecting import Inspection as Inspection
from megablocks_core.data.tools.inspecting import Lengths as Lengths
from megablocks_core.data.tools.inspecting import inspect as inspect
from megablocks_core.data.tools.merging import Merged as Merged
from megablocks_core.data.tools.merging import merge as merge
from megablocks_core.data.tools.mixing import RecipeUse as RecipeUse
from megablocks_core.data.tools.mixing import SourceUse as SourceUse
from megablocks_core.data.tools.mixing import inspect_recipe as inspect_recipe
from megablocks_core.data.tools.plotting import plot_lengths as plot_lengths
from megablocks_core.data.tools.plotting import plot_recipe as plot_recipe
from megablocks_core.data.tools.recipe import Recipe as Recipe
from megablocks_core.data.tools.recipe import open_recipe as open_recipe
from megablocks_core.data.tools.showing import Part as Part
from megablocks_core.data.tools.showing import Sample as Sample
from megablocks_core.data.tools.showing import show as show
from megablocks_core.data.tools.showing import show_step as show_step
from megablocks_core.data.tools.splitting import Written as Written
from megablocks_core.data.tools.splitting import split as split
from megablocks_core.data.tools.verifying import Verification as Verification
from megablocks_core.data.tools.verifying import verify as verify
