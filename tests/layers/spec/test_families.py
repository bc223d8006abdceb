"""Every family has a class of transformers, and fixes fields of a spec."""

from dataclasses import fields

import transformers

from megablocks_core.layers import DecoderSpec
from megablocks_core.layers.spec.families import (
    ARCHITECTURES,
    FAMILIES,
    OPTIONS,
    OWN_OPTIONS,
    SIZES,
)


def test_every_family_names_a_model_and_fields():
    names = {field.name for field in fields(DecoderSpec)}
    assert ARCHITECTURES.keys() == FAMILIES.keys()
    for family, architecture in ARCHITECTURES.items():
        assert getattr(transformers, architecture).config_class.model_type == family
        assert FAMILIES[family].keys() <= names
    own = {name for options in OWN_OPTIONS.values() for name in options.values()}
    assert {*SIZES.values(), *OPTIONS.values(), *own} <= names
