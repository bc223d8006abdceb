"""Tests on many ranks: ``@ranks`` runs a body on each of them."""

from megablocks_core.testing.ranks import ranks

__all__ = ["ranks"]
