"""One block of a decoder: attention, then a feed-forward layer or a mixture of experts.

Dimensions: T tokens, H hidden size; under sequence parallelism t = T / tp.size.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megablocks_core.layers.attention import Attention
from megablocks_core.layers.dropping import own_tokens
from megablocks_core.layers.moe import MoE
from megablocks_core.layers.norm import on_part
from megablocks_core.parallel import Dropout


class DecoderLayer(nn.Module):
    """One block: ``x + scale * attention(norm(x))``, then ``x + scale * feed_forward(norm(x))``.

    Maps ``x`` [... T H] to ``y`` [... T H], or with a ``MoE`` to ``y`` and its ``Routing``. Forward
    sends 2 all-reduces and backward 2, or what a ``MoE`` sends in place of one of them; under
    sequence parallelism ``x`` and ``y`` hold this rank's tokens [... t H], forward sends 2
    all-gathers and 2 reduce-scatters, and backward these and 2 gathers of inputs again. All
    norms whose weights a rank uses on a part (of tokens, or of query and key heads) share one
    small all-reduce more in backward.

    Args:
        hidden_size: H.
        attention: Called as ``Attention`` is.
        feed_forward: A ``MoE``, or from tensor to tensor; one whose attribute ``dropout`` is a
            ``Dropout`` is also handed ``dropout_index``.
        norm: Builds a norm from ``hidden_size``.
        scale: Of what the two layers add.
        hidden_dropout: Dropout of what the two layers add.
        stream: Name of the block, if it drops.

    Raises:
        ValueError: ``hidden_dropout`` is no probability, or comes without ``stream``.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        attention: Attention,
        feed_forward: nn.Module,
        norm: Callable[[int], nn.Module],
        scale: float = 1.0,
        hidden_dropout: float = 0.0,
        stream: str = "",
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = feed_forward
        self.input_layernorm = norm(hidden_size)
        self.post_attention_layernorm = norm(hidden_size)
        self.scale = scale
        self.post_attention_dropout, self.post_mlp_dropout = (
            Dropout(hidden_dropout, stream=stream and f"{stream}.{name}")
            for name in ("post_attention_dropout", "post_mlp_dropout")
        )

    def forward(
        self,
        x_TH: Tensor,
        *,
        dropout_index: Tensor | None = None,
        mask: Tensor | None = None,
        **attention_inputs: Any,
    ) -> Any:
        """Apply the block.

        Args:
            x_TH: Input [... T H].
            mask: For a ``MoE``: true for the tokens that count, as of ``x_TH`` [... T].
            dropout_index: ``DropoutKey.index`` of all T tokens [... T], if the block drops.
            **attention_inputs: Those of the attention.
        """
        first_norm, second_norm, *head_norms = self._norms()
        words = {} if dropout_index is None else {"dropout_index": dropout_index}
        attended_TH = self.self_attn(
            first_norm(x_TH), norms=head_norms, **words, **attention_inputs
        )
        own_index = own_tokens(
            dropout_index,
            sequence_parallel=self.self_attn.sequence_parallel,
            group=self.self_attn.tp,
        )
        x_TH = x_TH + self._scaled(self.post_attention_dropout(attended_TH, index=own_index))
        normed_TH = second_norm(x_TH)
        if isinstance(self.mlp, MoE):
            mlp_TH, routing = self.mlp(normed_TH, mask=mask)
            return x_TH + self._scaled(self.post_mlp_dropout(mlp_TH, index=own_index)), routing
        drops = isinstance(getattr(self.mlp, "dropout", None), Dropout)
        mlp_TH = self.mlp(normed_TH, **(words if drops else {}))
        return x_TH + self._scaled(self.post_mlp_dropout(mlp_TH, index=own_index))

    def _scaled(self, added_TH: Tensor) -> Tensor:
        return added_TH if self.scale == 1 else self.scale * added_TH

    def _norms(self) -> list[Callable[[Tensor], Tensor]]:
        attention = self.self_attn
        of_tokens = [self.input_layernorm, self.post_attention_layernorm]
        of_heads = attention.head_norms
        if attention.sequence_parallel:
            return on_part(*of_tokens, *of_heads, group=attention.tp)
        return [*of_tokens, *on_part(*of_heads, group=attention.tp)]
