"""Adapters with values that show: at the start one factor of each is zero."""

from megablocks_core.groups import specs_of
from megablocks_core.parallel.initial import key_of, normal_
from megablocks_core.parallel.tensor.adapters import adapted_layers


def fill(module):
    """Give all factors normal values that depend on names and places alone."""
    for name, _, adapter in adapted_layers(module):
        for which, factor in (("a", adapter.a), ("b", adapter.b)):
            key = key_of(7, f"{name}.{which}")
            normal_(factor.weight, key=key, std=0.3, specs=specs_of(factor, "weight"))
    return module
