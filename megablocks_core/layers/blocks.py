"""The blocks of a decoder, built from its spec."""

from collections.abc import Callable
from typing import Any

from torch import nn

from megablocks_core.groups import Mesh
from megablocks_core.layers.attention import Attention
from megablocks_core.layers.decoder_layer import DecoderLayer
from megablocks_core.layers.feed_forward import feed_forward, mixture
from megablocks_core.layers.rotary import RotaryEmbedding
from megablocks_core.layers.spec import DecoderSpec
from megablocks_core.parallel import Dropout


class BlockBuilder:
    """Builds blocks with everything that all blocks of a decoder share.

    Args:
        spec: Of the model.
        mesh: Its ``expert`` axes cut experts; see ``Decoder``.
        rotary: Turns queries and keys; ``None``: nothing does.
        norm: Builds a norm from its size, ``device`` and ``dtype``.
        experts: As of ``Decoder``.
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
        projections: dict[str, Any],
    ) -> None:
        self.spec, self.mesh, self.rotary = spec, mesh, rotary
        self.norm, self.experts, self.projections = norm, experts, projections

    def blocks(self, prefix: str) -> list[nn.Module]:
        """All blocks in order; the parameters of block n are called ``{prefix}.{n}...``."""
        names = [f"{prefix}.{number}" for number in range(self.spec.num_layers)]
        return [self._pair(number, name) for number, name in enumerate(names)]

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
            **self.projections,
        )

    def _feed_forward(self, stream: str) -> nn.Module:
        words = {"experts": self.experts, "projections": self.projections}
        return feed_forward(self.spec, stream=stream, **words)

    def _experts(self, _: str) -> nn.Module:
        words = {"experts": self.experts, "projections": self.projections}
        assert self.spec.moe is not None
        return mixture(self.spec, self.spec.moe, mesh=self.mesh, **words)
