"""Experts with adapters whose values show: at the start one factor of each is zero."""

from megablocks_core.groups import marks
from megablocks_core.parallel import add_lora
from megablocks_core.parallel.initial import key_of, normal_


def with_adapters(module, patterns="*_proj", *, rank=3, alpha=6.0, **options):
    """The module with filled adapters; values depend on names and places alone."""
    add_lora(module, patterns, rank=rank, alpha=alpha, seed=1, **options)
    return fill_factors(module)


def fill_factors(module, *, std=0.3):
    """Give all factors normal values."""
    for name, parameter, specs in marks(module):
        if "lora_" in name:
            normal_(parameter, key=key_of(7, name), std=std, specs=specs)
    return module
