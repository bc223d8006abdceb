"""One block of a hybrid model: a single mixer of tokens or features behind a norm.

Dimensions: T tokens, H hidden size; under sequence parallelism t = T / tp.size.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.layers.attention import Attention
from megablocks_core.layers.dropping import own_tokens
from megablocks_core.layers.moe import MoE
from megablocks_core.layers.norm import on_part
from megablocks_core.layers.ssm import GatedDeltaNet, Mamba1, Mamba2
from megablocks_core.parallel import Dropout


class MixerLayer(nn.Module):
    """One block: ``x + scale * mixer(norm(x))``.

    Maps ``x`` [... T H] to ``y`` [... T H], or with a ``MoE`` to ``y`` and its ``Routing``; under
    sequence parallelism both hold this rank's tokens. It sends what the mixer sends, and under
    sequence parallelism one small all-reduce in backward for the norm, which attention's norms
    share.

    Args:
        hidden_size: H.
        mixer: An ``Attention``, a mixer of ``layers.ssm``, a ``MoE``, or a module from tensor to
            tensor.
        norm: Builds a norm from ``hidden_size``.
        scale: Of what the mixer adds.
        float32_residual: ``x`` and ``y`` are wider than the norm's weight, and stay so.
        hidden_dropout: Dropout of what the mixer adds.
        sequence_parallel: The ranks hold equal slices of the tokens.
        stream: Name of the block, if it drops.
        tp: The tensor-parallel ranks.

    Raises:
        ValueError: ``hidden_dropout`` is no probability, or comes without ``stream``.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        mixer: nn.Module,
        norm: Callable[[int], nn.Module],
        scale: float = 1.0,
        float32_residual: bool = False,
        hidden_dropout: float = 0.0,
        sequence_parallel: bool = False,
        stream: str = "",
        tp: Group = LOCAL,
    ) -> None:
        super().__init__()
        self.norm = norm(hidden_size)
        self.mixer = mixer
        self.scale, self.float32_residual = scale, float32_residual
        self.dropout = Dropout(hidden_dropout, stream=stream and f"{stream}.dropout")
        self.sequence_parallel, self.tp = sequence_parallel, tp

    def forward(
        self,
        x_TH: Tensor,
        *,
        dropout_index: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        **attention_inputs: Any,
    ) -> Any:
        """Apply the block.

        Args:
            x_TH: Input [... T H].
            mask: For a ``MoE``: true for the tokens that count, as of ``x_TH`` [... T].
            dropout_index: ``DropoutKey.index`` of all T tokens [... T], if the block drops.
            cu_seqlens: Sums of the documents' lengths, from 0 [E+1].
            cu_seqlens_padded: Where documents are stored, if pads lie between them [E+1].
            **attention_inputs: Further ones of ``Attention``.
        """
        norm, *head_norms = self._norms()
        normed_TH = norm(narrowed(x_TH, self.norm) if self.float32_residual else x_TH)
        documents = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
        words = {} if dropout_index is None else {"dropout_index": dropout_index}
        routing = None
        if isinstance(self.mixer, Attention):
            words |= documents | attention_inputs
            mixed_TH = self.mixer(normed_TH, norms=head_norms, **words)
        elif isinstance(self.mixer, Mamba1 | Mamba2 | GatedDeltaNet):
            mixed_TH = self.mixer(normed_TH, **documents)
        elif isinstance(self.mixer, MoE):
            mixed_TH, routing = self.mixer(normed_TH, mask=mask)
        else:
            drops = isinstance(getattr(self.mixer, "dropout", None), Dropout)
            mixed_TH = self.mixer(normed_TH, **(words if drops else {}))
        own_index = own_tokens(
            dropout_index, sequence_parallel=self.sequence_parallel, group=self.tp
        )
        mixed_TH = self.dropout(mixed_TH, index=own_index)
        y_TH = x_TH + (mixed_TH if self.scale == 1 else self.scale * mixed_TH)
        return y_TH if routing is None else (y_TH, routing)

    def _norms(self) -> list[Callable[[Tensor], Tensor]]:
        of_heads = self.mixer.head_norms if isinstance(self.mixer, Attention) else []
        if self.sequence_parallel:
            return on_part(self.norm, *of_heads, group=self.tp)
        return [self.norm, *on_part(*of_heads, group=self.tp)]


def narrowed(x_TH: Tensor, norm: nn.Module) -> Tensor:
    """``x`` in the dtype of a norm's weight."""
    return x_TH.to(next(norm.parameters()).dtype)
