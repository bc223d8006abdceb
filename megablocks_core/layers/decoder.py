"""A decoder-only language model (Llama, https://arxiv.org/abs/2302.13971, and its kin).

Dimensions: T tokens, H hidden size, V vocabulary, E documents. A lowercase letter is this
rank's share of the capital one; under sequence parallelism t = T / tp.size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from megablocks_core.groups import LOCAL, Mesh, chunk_slice, marks
from megablocks_core.layers.attention.documents import document_positions
from megablocks_core.layers.blocks import BlockBuilder
from megablocks_core.layers.dropping import ids_of_tokens, own_tokens
from megablocks_core.layers.feed_forward import Losses, counted_tokens, routing_losses
from megablocks_core.layers.linear import LinearFactory, blank_linear
from megablocks_core.layers.mixer_layer import narrowed
from megablocks_core.layers.moe import Routing
from megablocks_core.layers.norm import RMSNorm, on_part
from megablocks_core.layers.rotary import RotaryEmbedding
from megablocks_core.layers.spec import DecoderSpec
from megablocks_core.layers.ssm.mixers.initial import draws_itself
from megablocks_core.parallel import (
    ColumnParallelLinear,
    Dropout,
    DropoutKey,
    RecomputePolicy,
    VocabParallelEmbedding,
    gather_features,
    recompute_modules,
)
from megablocks_core.parallel.counter import key_of
from megablocks_core.parallel.initial import draw_key, normal_
from megablocks_core.parallel.tensor.adapters import LoraFactor


class DecoderOutput(NamedTuple):
    """What a ``Decoder`` gives.

    Attributes:
        logits: [... T v], or [... T V] if gathered.
        losses: Name of an auxiliary loss ("load_balance", "z") to its (sum, count) in each layer
            that has experts, over the tokens of all tensor-parallel ranks. Loads are balanced in
            each row or document.
        tokens_per_expert: Choices of each layer that has experts [E], of this rank's tokens.
    """

    logits: Tensor
    losses: Losses
    tokens_per_expert: Sequence[Tensor] = ()


class HiddenStates(NamedTuple):
    """What a ``Decoder`` gives without its head.

    Attributes:
        hidden: The head's input [... T H], equal on every rank; under sequence parallelism this
            rank's tokens, cut by ``torch.chunk``'s rule.
        losses: As of ``DecoderOutput``.
        tokens_per_expert: As of ``DecoderOutput``.
    """

    hidden: Tensor
    losses: Losses
    tokens_per_expert: Sequence[Tensor] = ()


class _Trunk(nn.Module):
    """The parts of a decoder before its head, under Hugging Face's names."""

    def __init__(
        self, embed_tokens: VocabParallelEmbedding, layers: list[nn.Module], norm: nn.Module
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class Decoder(nn.Module):
    """Logits of the next token, for every token.

    Maps tokens [... T], equal on every tensor-parallel rank, to logits [... T v], cut over
    the vocabulary, as ``vocab_parallel_cross_entropy`` takes them. Parameters have the names
    and layouts of Hugging Face's Llama, Qwen and Mistral, and those of experts are Qwen3-MoE's.
    Forward sends the messages of its blocks and one all-reduce of the embeddings, backward those
    of its blocks and one all-reduce at the head; under sequence parallelism a reduce-scatter and
    an all-gather take the place of each, backward gathers the head's input again, and the last
    norm's weight costs one small all-reduce. A number of tokens that does not divide evenly is
    padded inside. ``docs/traffic.md`` has the formulas.

    One draw from torch's default generator is the seed of all values; each depends on that,
    its parameter's name and its place in the whole tensor alone. What is dropped in training
    follows from the ``DropoutKey`` of each call.

    Args:
        spec: Sizes and features.
        mesh: Its axis ``tp`` cuts the model, and its ``expert`` axes ``ep`` and ``etp`` the
            experts; default one process. Tokens over ``dp`` are the caller's business.
        sequence_parallel: Between blocks every rank holds a slice of the tokens.
        recompute: Which modules run again in backward, in place of keeping what they compute:
            names such as "layers.*" or "layers.*.mlp", or a ``RecomputePolicy``. Nothing else
            changes, not by a bit.
        linear: Builds the projections of attention and feed-forward layers; see
            ``layers.linear.parallel_linear`` for what it is called with.
        norm: Builds the norms; called as ``RMSNorm`` is, with ``zero_centered=True`` if the spec
            says so, and without that word otherwise.
        experts: Builds the experts of mixtures in place of ``GroupedExperts``, and is called as
            it is; where ``spec.moe`` is ``None``, the feed-forward layers in place of
            ``GatedMLP``, and is called as that. Its modules mark what they cut.
        attention_backend: What computes attention; see ``attention``.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: Sizes do not divide evenly over ``tp``, the mesh has an axis that is not
            served (``pp``, ``cp``), ``recompute`` names no module, or there is no such back end.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        mesh: Mesh | None = None,
        sequence_parallel: bool = False,
        recompute: str | Sequence[str] | RecomputePolicy | None = None,
        linear: LinearFactory | None = None,
        norm: Callable[..., nn.Module] | None = None,
        experts: Callable[..., nn.Module] | None = None,
        attention_backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _refuse(recompute, mesh=mesh, sequence_parallel=sequence_parallel)
        self.spec = spec
        self.tp = LOCAL if mesh is None else mesh.group("tp")
        self.sequence_parallel = sequence_parallel
        self.rotary = None
        if spec.rope and spec.head_dim:
            self.rotary = RotaryEmbedding(
                spec.head_dim,
                rotary_dim=spec.rotary_dim,
                base=spec.rope_base,
                scaling=spec.rope_scaling,
            )
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        parallel = {"sequence_parallel": sequence_parallel, **place}
        around = {"zero_centered": True} if spec.zero_centered_norms else {}
        make_norm = partial(norm or RMSNorm, eps=spec.norm_eps, **around, **place)
        layers = BlockBuilder(
            spec,
            mesh=mesh,
            rotary=self.rotary,
            norm=make_norm,
            experts=experts,
            attention_backend=attention_backend,
            projections={"linear": linear or blank_linear, "tp": self.tp, **parallel},
        ).blocks("model.layers")
        # Values are drawn once, at the end.
        blank = {**parallel, "group": self.tp, "device": "meta"}
        where = torch.get_default_device() if device is None else device
        embedding = VocabParallelEmbedding(
            spec.vocab_size, spec.hidden_size, padding_idx=spec.pad_token_id, **blank
        )
        head = ColumnParallelLinear(
            spec.hidden_size, spec.vocab_size, bias=False, uneven=True, **blank
        )
        self.model = _Trunk(embedding.to_empty(device=where), layers, make_norm(spec.hidden_size))
        self.lm_head = head.to_empty(device=where)
        self.embedding_dropout = Dropout(spec.hidden_dropout, stream="model.embed_tokens")
        self._drops = any(isinstance(part, Dropout) and part.p for part in self.modules())
        self._tie()
        self.register_load_state_dict_post_hook(_tie_again)
        self.reset_parameters()
        if recompute is not None:
            recompute_modules(self, recompute)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw matrices with deviation ``spec.initializer_range`` and set biases to zero.

        Norms draw nothing: they reset themselves. So do adapters, and what makes the decays,
        step sizes and convolutions of state-space blocks.
        """
        seed = draw_key() if seed is None else seed
        own = {name: part for name, part in self.named_modules() if _draws_itself(part)}
        for name, part in own.items():
            part.reset_parameters(seed, f"{prefix}{name}.")
        for name, parameter, specs in marks(self):
            if name.rpartition(".")[0] in own:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() >= 2:
                key = key_of(seed, prefix + name)
                normal_(parameter, key=key, std=self.spec.initializer_range, specs=specs)
        for bias in _biases_on_choices(self):
            bias.zero_()
        for name, part in self.named_modules():
            reset = getattr(part, "reset_parameters", None)
            if reset is not None and name not in own and _is_norm(part):
                reset()
        embedding = self.model.embed_tokens
        padding, rows = embedding.padding_idx, embedding.rows
        if padding is not None and rows.start <= padding < rows.stop:
            embedding.weight[padding - rows.start].zero_()

    def _mask(
        self,
        tokens_T: Tensor,
        cu_seqlens: Tensor | None,
        cu_seqlens_padded: Tensor | None,
        missing: int,
    ) -> Tensor | None:
        """True for tokens that are no pads, where experts would otherwise take these."""
        if self.spec.moe is None:
            return None
        return counted_tokens(tokens_T, cu_seqlens, cu_seqlens_padded, missing)

    def _embedded(self, tokens_T: Tensor, index: Tensor | None) -> Tensor:
        """The residual stream before the first block."""
        x_tH = self.embedding_dropout(self.model.embed_tokens(tokens_T), index=index)
        x_tH = _scaled(x_tH, self.spec.embedding_scale)
        if self.spec.float32_residual:
            return x_tH.to(torch.promote_types(x_tH.dtype, torch.float32))
        return x_tH

    def _narrowed(self, x_tH: Tensor) -> Tensor:
        return narrowed(x_tH, self.model.norm) if self.spec.float32_residual else x_tH

    def _own_tokens(self, num_tokens: int) -> int:
        """How many of the tokens this rank has behind the last norm, without pads."""
        if not self.sequence_parallel:
            return num_tokens
        part = chunk_slice(num_tokens, self.tp.size, self.tp.rank)
        return part.stop - part.start

    def forward(
        self,
        tokens_T: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_padded: Tensor | None = None,
        dropout: DropoutKey | None = None,
        sample_ids: Tensor | None = None,
        gather_logits: bool = False,
        head: bool = True,
    ) -> DecoderOutput | HiddenStates:
        """Logits for rows of tokens, or for documents packed into one row.

        Args:
            tokens_T: Ids [... T]; one row, [T] or [1 T], with documents.
            positions: Every token's position [T] or [... T]; default 0, 1, 2, ... in each row
                or document.
            cu_seqlens: Sums of the documents' lengths, from 0 [E+1]; each document attends to
                itself alone.
            max_seqlen: Length of the longest document, for back ends that ask for it.
            cu_seqlens_padded: Where documents are stored, if pads lie between them [E+1].
            dropout: Seed and step of what is dropped in training.
            sample_ids: The number of each row's sample, or each document's, in the data set or
                the global batch: integers [...] or [E]. With them the masks are the same in any
                micro-batches and on any data-parallel ranks. By default rows or documents count
                from 0, so that other micro-batches and ranks drop alike unless their step differs.
            gather_logits: All-gather the logits; all ranks must go on with them alike.
            head: Without the head the output is ``HiddenStates``, for losses that take them and
                ``lm_head.weight``, such as ``linear_cross_entropy``; adapters of the head are
                left out then.

        Raises:
            ValueError: Tokens or ``cu_seqlens`` are no tensor of integers, or there are no tokens;
                something drops and ``dropout`` is missing; ``sample_ids`` has another shape; or see
                ``Attention``.
        """
        _check_tokens(tokens_T, cu_seqlens, cu_seqlens_padded)
        num_tokens = tokens_T.shape[-1]
        if positions is None and cu_seqlens is not None:
            positions = document_positions(num_tokens, cu_seqlens, cu_seqlens_padded)
        elif positions is None:
            positions = torch.arange(num_tokens, device=tokens_T.device)
        index_T = None
        if self.training and self._drops and dropout is None:
            raise ValueError("dropout=None must be a DropoutKey in training, because layers drop")
        if self.training and dropout is not None:
            places = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
            ids = ids_of_tokens(sample_ids, tokens_T, places)
            index_T = dropout.index(ids, positions).expand_as(tokens_T)
        missing = -num_tokens % self.tp.size if self.sequence_parallel else 0
        mask_T = self._mask(tokens_T, cu_seqlens, cu_seqlens_padded, missing)
        counted = tokens_T.numel() if mask_T is None else mask_T.sum()
        if self.sequence_parallel:
            # Pads come last and belong to no document, so that no token attends to them.
            tokens_T, positions = pad(tokens_T, (0, missing)), pad(positions, (0, missing))
            index_T = None if index_T is None else pad(index_T, (0, missing))
            mask_T = own_tokens(mask_T, sequence_parallel=True, group=self.tp)

        own_index = own_tokens(index_T, sequence_parallel=self.sequence_parallel, group=self.tp)
        x_tH = self._embedded(tokens_T, own_index)
        tables = None if self.rotary is None else self.rotary(positions, dtype=x_tH.dtype)
        routings: list[Routing] = []
        for layer in self.model.layers:
            output = layer(
                x_tH,
                positions=positions,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                cu_seqlens_padded=cu_seqlens_padded,
                tables=tables,
                dropout_index=index_T,
                mask=mask_T,
            )
            x_tH = output if isinstance(output, Tensor) else output[0]
            routings += [] if isinstance(output, Tensor) else [output[1]]
        (last_norm,) = on_part(self.model.norm, group=self.tp if self.sequence_parallel else LOCAL)
        hidden_tH = _scaled(last_norm(self._narrowed(x_tH)), 1 / self.spec.logits_divisor)
        losses = routing_losses(
            routings,
            num_tokens=counted,
            row_length=x_tH.shape[-2],
            cu_seqlens=cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded,
            group=self.tp if self.sequence_parallel else LOCAL,
        )
        loads = tuple(routing.tokens_per_expert for routing in routings)
        if not head:
            own_tH = hidden_tH[..., : self._own_tokens(num_tokens), :]
            return HiddenStates(own_tH, losses, loads)
        logits_Tv = self.lm_head(hidden_tH)
        if self.sequence_parallel:
            logits_Tv = logits_Tv[..., :num_tokens, :]
        if gather_logits:
            logits_Tv = gather_features(logits_Tv, self.lm_head.spec)
        return DecoderOutput(logits_Tv, losses, loads)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoder":
        """Move or convert all parameters; ``to_empty`` would otherwise cut the tie."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def _tie_again(decoder: Decoder, _: Any) -> None:
    """Loading with ``assign=True`` cuts the tie."""
    decoder._tie()


def _refuse(recompute: Any, *, mesh: Mesh | None, sequence_parallel: bool) -> None:
    cut = isinstance(recompute, RecomputePolicy) and recompute.cut_over.size > 1
    if cut and sequence_parallel:
        raise ValueError(
            f"recompute={recompute} must not set cut_over under sequence parallelism: each rank "
            "holds its own tokens already"
        )
    for axis in ("pp", "cp"):
        if mesh is not None and mesh.size(axis) > 1:
            raise ValueError(f"mesh axis {axis}={mesh.size(axis)} must be 1: it is not served yet")


def _scaled(x_tH: Tensor, scale: float) -> Tensor:
    return x_tH if scale == 1 else scale * x_tH


def _draws_itself(part: Any) -> bool:
    return isinstance(part, LoraFactor) or draws_itself(part)


def _biases_on_choices(decoder: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in decoder.named_buffers() if name.endswith("bias")]


def _is_norm(part: nn.Module) -> bool:
    own = list(part.parameters(recurse=False))
    return bool(own) and all(parameter.dim() == 1 for parameter in own)


def _check_tokens(tokens: object, *ends: object) -> None:
    """Raise unless there are tokens, and documents' ends are what they must be.

    Raises:
        ValueError: As said.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be a tensor of int64 or int32 ids, not {kind}")
    if tokens.dim() == 0 or tokens.shape[-1] == 0:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} must have at least one in a row")
    for name, given in zip(("cu_seqlens", "cu_seqlens_padded"), ends, strict=True):
        if given is not None and not (isinstance(given, Tensor) and given.dim() == 1):
            kind = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{name} must be a tensor of the ends of documents [E+1], not {kind}")
