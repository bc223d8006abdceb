"""Tests on many ranks: bodies on each of them, and modules against their one-process twins."""

from megablocks_core.testing.equivalence import (
    assert_parallel_equivalence as assert_parallel_equivalence,
)
from megablocks_core.testing.ranks import ranks as ranks
