"""Mixers of transformers beside ours with the same sizes, for tests."""

import math

import torch
from torch.overrides import TorchFunctionMode

from megablocks_core.layers.ssm import GatedDeltaNet, Mamba1, Mamba2

HIDDEN = 12


class KeepFloat64(TorchFunctionMode):
    """Casts of float64 tensors to float32 do nothing: published layers cast whatever comes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                return first
            if func is torch.Tensor.to:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)


def mamba2():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=HIDDEN,
        num_heads=6,
        head_dim=4,
        state_size=5,
        n_groups=2,
        expand=2,
        conv_kernel=3,
        chunk_size=4,
        num_hidden_layers=1,
        time_step_limit=(0.01, 0.08),
        use_bias=True,
    )
    ours = Mamba2(
        HIDDEN,
        num_heads=6,
        head_dim=4,
        state_size=5,
        num_groups=2,
        conv_kernel=3,
        bias=True,
        time_step_limit=(0.01, 0.08),
    )
    return config, Mamba2Mixer(config, layer_idx=0), ours


def nemotron_h():
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    config = NemotronHConfig(
        hidden_size=HIDDEN,
        mamba_num_heads=4,
        mamba_head_dim=4,
        ssm_state_size=5,
        n_groups=4,
        chunk_size=4,
        layers_block_type=["mamba"],
        layer_norm_epsilon=1e-4,
    )
    ours = Mamba2(
        HIDDEN,
        num_heads=4,
        head_dim=4,
        state_size=5,
        num_groups=4,
        norm_eps=1e-4,
        time_step_limit=(config.time_step_min, math.inf),
    )
    return config, NemotronHMamba2Mixer(config, layer_idx=0), ours


def bamba():
    """One group of the norm, whatever the groups of heads."""
    from transformers import BambaConfig
    from transformers.models.bamba.modeling_bamba import BambaMixer

    config = BambaConfig(
        hidden_size=HIDDEN,
        mamba_n_heads=4,
        mamba_d_head=6,
        mamba_d_state=5,
        mamba_n_groups=2,
        mamba_expand=2,
        mamba_chunk_size=4,
        num_hidden_layers=1,
        attn_layer_indices=[],
    )
    published = BambaMixer(config, layer_idx=0)
    ours = Mamba2(
        HIDDEN,
        num_heads=4,
        head_dim=6,
        state_size=5,
        num_groups=2,
        norm_groups=24 // published.norm.group_size,
        norm_eps=config.rms_norm_eps,
    )
    return config, published, ours


def zamba2():
    from transformers import Zamba2Config
    from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer

    config = Zamba2Config(
        hidden_size=HIDDEN,
        n_mamba_heads=4,
        mamba_headdim=6,
        mamba_d_state=5,
        mamba_ngroups=1,
        mamba_expand=2,
        chunk_size=4,
        num_hidden_layers=1,
        layers_block_type=["mamba"],
        hybrid_layer_ids=[],
    )
    ours = Mamba2(
        HIDDEN,
        num_heads=4,
        head_dim=6,
        state_size=5,
        time_step_limit=(config.time_step_min, math.inf),
    )
    return config, Zamba2MambaMixer(config, layer_idx=0), ours


def mamba():
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(
        hidden_size=HIDDEN, state_size=5, num_hidden_layers=1, time_step_rank=3, use_bias=True
    )
    return (
        config,
        MambaMixer(config, layer_idx=0),
        Mamba1(HIDDEN, state_size=5, dt_rank=3, bias=True),
    )


def falcon_mamba():
    from transformers import FalconMambaConfig
    from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer

    config = FalconMambaConfig(
        hidden_size=HIDDEN, state_size=5, num_hidden_layers=1, time_step_rank=3
    )
    ours = Mamba1(
        HIDDEN,
        state_size=5,
        dt_rank=3,
        projection_norms="plain",
        norm_eps=config.mixer_rms_eps,
    )
    # Its own drawing of values reads norms that are made after it.
    return config, FalconMambaMixer(config, layer_idx=0, initialize_mixer_weights=False), ours


def jamba():
    from transformers import JambaConfig
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer

    config = JambaConfig(
        hidden_size=HIDDEN, mamba_d_state=5, mamba_dt_rank=3, num_hidden_layers=1, num_experts=2
    )
    ours = Mamba1(HIDDEN, state_size=5, dt_rank=3, projection_norms="weights")
    return config, JambaMambaMixer(config, layer_idx=0), ours


def qwen3_next():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=5,
        linear_value_head_dim=3,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    ours = GatedDeltaNet(HIDDEN, num_key_heads=2, num_value_heads=4, key_dim=5, value_dim=3)
    return config, Qwen3NextGatedDeltaNet(config, layer_idx=0), ours


PUBLISHED = {
    pair.__name__: pair
    for pair in (mamba2, nemotron_h, bamba, zamba2, mamba, falcon_mamba, jamba, qwen3_next)
}


def same_weights(pair):
    """The configuration, the published mixer and ours in float64, with the same random values."""
    torch.manual_seed(0)
    config, theirs, ours = PUBLISHED[pair]()
    for mixer in (theirs, ours):
        mixer.double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    missing = theirs.load_state_dict(ours.state_dict(), strict=False)
    unknown = [name for name in missing.missing_keys if "layernorm" not in name]
    assert not unknown and not missing.unexpected_keys
    return config, theirs, ours
