"""What the files of each family of Hugging Face models hold, as data."""

from megablocks_core.export.families.dense import DENSE_FAMILIES
from megablocks_core.export.families.hybrid import HYBRID_FAMILIES
from megablocks_core.export.families.weights import Family as Family

FAMILIES: dict[str, Family] = DENSE_FAMILIES | HYBRID_FAMILIES
