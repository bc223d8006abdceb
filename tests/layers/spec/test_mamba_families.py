"""What is particular to configs of Mamba and Mamba-2."""

import pytest

from megablocks_core.layers import DecoderSpec, Mamba1Spec
from tests.layers.spec.hybrid_configs import config_of


@pytest.mark.parametrize("rank", ["auto", None])
def test_absent_sizes_of_mamba_follow_from_the_hidden_size(rank):
    config = config_of("mamba").to_dict()
    for key in ("intermediate_size", "time_step_rank"):
        del config[key]
    if rank is not None:
        config["time_step_rank"] = rank
    spec = DecoderSpec.from_hf({**config, "hidden_size": 40})
    assert isinstance(spec.mamba, Mamba1Spec)
    assert (spec.mamba.inner_size, spec.mamba.dt_rank) == (120, 3)


def test_heads_of_mamba2_must_fill_the_width_that_the_config_says():
    with pytest.raises(ValueError, match="^expand=3 times hidden_size=32 must be"):
        DecoderSpec.from_hf({**config_of("mamba2").to_dict(), "expand": 3})
