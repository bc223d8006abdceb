"""The blocks of a decoder, built from its spec."""

from collections.abc import Callable
from typing import Any

from torch import nn

from megablocks_core.groups import Mesh
from megablocks_core.layers.attention import Attention
from megablocks_core.layers.decoder_layer import DecoderLayer
from megablocks_core.layers.feed_forward import feed_forward, mixture
from megablocks_core.layers.mixer_layer import MixerLayer
from megablocks_core.layers.rotary import RotaryEmbedding
from megablocks_core.layers.spec import DecoderSpec, Mamba1Spec, Mamba2Spec
from megablocks_core.layers.spec.pattern import (
    ATTENTION,
    DELTA,
    EXPERTS,
    FEED_FORWARD,
    MAMBA,
    blocks_of,
)
from megablocks_core.layers.ssm import GatedDeltaNet, Mamba1, Mamba2
from megablocks_core.parallel import Dropout


class BlockBuilder:
    """Builds blocks with everything that all blocks of a decoder share.

    Args:
        spec: Of the model.
        mesh: Its ``expert`` axes cut experts; see ``Decoder``.
        rotary: Turns queries and keys; ``None``: nothing does.
        norm: Builds a norm from its size, ``device`` and ``dtype``.
        experts: As of ``Decoder``.
        attention_backend: As of ``Decoder``.
        projections: ``linear``, ``tp``, ``sequence_parallel``, ``device`` and ``dtype`` of every
            layer.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        mesh: Mesh | None,
        rotary: RotaryEmbedding | None,
        norm: Callable[..., nn.Module],
        experts: Callable[..., nn.Module] | None,
        attention_backend: str,
        projections: dict[str, Any],
    ) -> None:
        self.spec, self.mesh, self.rotary = spec, mesh, rotary
        self.norm, self.experts, self.projections = norm, experts, projections
        self.attention_backend = attention_backend

    def blocks(self, prefix: str) -> list[nn.Module]:
        """All blocks in order; the parameters of block n are called ``{prefix}.{n}...``."""
        names = [f"{prefix}.{number}" for number in range(self.spec.num_layers)]
        if self.spec.pattern is None:
            return [self._pair(number, name) for number, name in enumerate(names)]
        kinds = blocks_of(self.spec.pattern)
        return [self._single(kind, name) for kind, name in zip(kinds, names, strict=True)]

    def _pair(self, number: int, name: str) -> DecoderLayer:
        """Attention, and a feed-forward layer or experts."""
        moe = self.spec.moe
        sparse = moe is not None and moe.is_sparse(number)
        return DecoderLayer(
            self.spec.hidden_size,
            attention=self._attention(f"{name}.self_attn"),
            feed_forward=(self._experts if sparse else self._feed_forward)(f"{name}.mlp"),
            norm=self.norm,
            scale=self.spec.residual_scale,
            hidden_dropout=self.spec.hidden_dropout,
            stream=name,
        )

    def _single(self, kind: str, name: str) -> MixerLayer:
        """One block of a pattern."""
        build = {
            MAMBA: self._mamba,
            DELTA: self._delta,
            ATTENTION: self._attention,
            FEED_FORWARD: self._feed_forward,
            EXPERTS: self._experts,
        }[kind]
        return MixerLayer(
            self.spec.hidden_size,
            mixer=build(f"{name}.mixer"),
            norm=self.norm,
            scale=self.spec.residual_scale,
            float32_residual=self.spec.float32_residual,
            hidden_dropout=self.spec.hidden_dropout,
            sequence_parallel=self.projections["sequence_parallel"],
            stream=name,
            tp=self.projections["tp"],
        )

    def _attention(self, stream: str) -> Attention:
        spec = self.spec
        return Attention(
            spec.hidden_size,
            spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bias=spec.attention_bias,
            rotary=self.rotary,
            scale=spec.attention_scale,
            dropout=Dropout(spec.attention_dropout, stream=stream),
            norm=self.norm if spec.qk_norm is True else None,
            projection_norm_eps=spec.norm_eps if spec.qk_norm == "projection" else None,
            clip=spec.clip_qkv,
            gated=spec.gated_attention,
            backend=self.attention_backend,
            **self.projections,
        )

    def _feed_forward(self, stream: str) -> nn.Module:
        words = {"experts": self.experts, "projections": self.projections}
        return feed_forward(self.spec, stream=stream, **words)

    def _experts(self, _: str) -> nn.Module:
        words = {"experts": self.experts, "projections": self.projections}
        assert self.spec.moe is not None
        return mixture(self.spec, self.spec.moe, mesh=self.mesh, **words)

    def _mamba(self, _: str) -> nn.Module:
        spec, mamba = self.spec, self.spec.mamba
        if isinstance(mamba, Mamba1Spec):
            return Mamba1(
                spec.hidden_size,
                inner_size=mamba.inner_size,
                state_size=mamba.state_size,
                dt_rank=mamba.dt_rank,
                conv_kernel=mamba.conv_kernel,
                bias=mamba.bias,
                conv_bias=mamba.conv_bias,
                **self.projections,
            )
        assert isinstance(mamba, Mamba2Spec)
        return Mamba2(
            spec.hidden_size,
            num_heads=mamba.num_heads,
            head_dim=mamba.head_dim,
            state_size=mamba.state_size,
            num_groups=mamba.num_groups,
            norm_groups=mamba.norm_groups,
            norm_eps=spec.norm_eps,
            conv_kernel=mamba.conv_kernel,
            chunk_size=mamba.chunk_size,
            bias=mamba.bias,
            conv_bias=mamba.conv_bias,
            time_step_limit=mamba.time_step_limit,
            **self.projections,
        )

    def _delta(self, _: str) -> nn.Module:
        spec, delta = self.spec, self.spec.delta
        assert delta is not None
        return GatedDeltaNet(
            spec.hidden_size,
            num_key_heads=delta.num_key_heads,
            num_value_heads=delta.num_value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            conv_kernel=delta.conv_kernel,
            norm_eps=spec.norm_eps,
            **self.projections,
        )
