"""Hooks at the edges of a model's modules: where whole tensors become shares and back.

They let ``tensor_parallelize`` leave a model's own code alone. Each is a small record, so
that copies and pickles of the model keep it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import (
    Group,
    ShardSpec,
    all_gather_to,
    copy_slices_to,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from megablocks_core.parallel.tensor.linear import gather_features


class Boundary:
    """Marks the hooks of this module, so that they can be found and taken off again."""


class SharedInput(Boundary):
    """Before sibling projections: ``copy_to`` of their one input, once for all of them.

    Query, key and value read the same tensor; its gradient is summed over the ranks in one
    message. The copy is remembered while the siblings' parent runs, and no longer.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.inside = False
        self._last: tuple[Tensor, Tensor, bool] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the first argument by its copy."""
        x, *rest = args
        known, copy, graded = self._last or (None, x, False)
        if known is not x or graded != torch.is_grad_enabled():
            copy = copy_to(x, group=self.group)
            self._last = (x, copy, torch.is_grad_enabled()) if self.inside else None
        return (copy, *rest)

    def begin(self) -> None:
        """The parent starts to run."""
        self.inside = True

    def end(self) -> None:
        """The parent has run: forget the copy."""
        self.inside, self._last = False, None

    def __reduce__(self) -> tuple[Any, ...]:
        return (SharedInput, (self.group,))


@dataclass(frozen=True)
class BeginSharing(Boundary):
    """Before the parent of siblings."""

    shared: SharedInput

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Let the siblings share from here."""
        self.shared.begin()


@dataclass(frozen=True)
class EndSharing(Boundary):
    """After the parent of siblings, also if it raised."""

    shared: SharedInput

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget what they shared."""
        self.shared.end()


@dataclass(frozen=True)
class EnterBlock(Boundary):
    """Before a block that works on whole sequences: all-gather its tokens along dim -2."""

    group: Group

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Replace the hidden states by those of all tokens."""
        return _with_hidden(args, kwargs, self._gathered)

    def _gathered(self, x: Tensor) -> Tensor:
        return all_gather_to(x, dim=-2, group=self.group, sizes=[x.shape[-2]] * self.group.size)


@dataclass(frozen=True)
class ScatterTokens(Boundary):
    """Before the first layer: keep this rank's tokens, along dim -2."""

    group: Group

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Replace the hidden states by those of this rank's tokens."""
        return _with_hidden(args, kwargs, self._scattered)

    def _scattered(self, x: Tensor) -> Tensor:
        if x.shape[-2] % self.group.size:
            raise ValueError(
                f"a sequence of {x.shape[-2]} tokens must divide evenly over a group of "
                f"{self.group.size} ranks under sequence parallelism"
            )
        return scatter_to(x, dim=-2, group=self.group)


@dataclass(frozen=True)
class GatherTokens(Boundary):
    """After the last layer: all tokens again, with which the ranks go on alike."""

    group: Group

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Replace the output by that of all tokens."""
        sizes = [output.shape[-2]] * self.group.size
        return gather_from(output, dim=-2, group=self.group, sizes=sizes)


@dataclass(frozen=True)
class EnterExperts(Boundary):
    """Before stacked experts (hidden states, expert indices, expert weights): one dim of tokens.

    Each rank has a slice of every expert, so states and weights get parts of their gradients.
    Under sequence parallelism all tokens are gathered.
    """

    group: Group
    sequence_parallel: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the three arguments."""
        return tuple(self._entered(x) if isinstance(x, Tensor) else x for x in args)

    def _entered(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            return all_gather_to(x, dim=0, group=self.group, sizes=[len(x)] * self.group.size)
        return copy_to(x, group=self.group) if x.is_floating_point() else x


@dataclass(frozen=True)
class LeaveExperts(Boundary):
    """After stacked experts: sum their parts, and keep this rank's tokens if they were gathered."""

    group: Group
    sequence_parallel: bool

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Replace the output by the sum."""
        if self.sequence_parallel:
            return reduce_scatter_to(output, dim=0, group=self.group)
        return reduce_from(output, group=self.group)


@dataclass(frozen=True)
class SumGradients(Boundary):
    """Before a module: the named parameters below it stand in as copies whose gradients sum.

    Each rank uses these weights on its own heads or tokens. While the module runs, their
    owners see the copies in place of the parameters; one message serves all. Reentrant
    checkpoints of a transformers layer raise.

    Attributes:
        group: The ranks.
        names: The parameters, relative to the module.
        specs: Their cuts, if only slices that neighbours hold too are summed; else the
            parameters are whole.
    """

    group: Group
    names: tuple[str, ...]
    specs: tuple[ShardSpec, ...] | None = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Put the copies in place."""
        owned = [owner_of(module, name) for name in self.names]
        tensors = [owner.get_parameter(leaf) for owner, leaf in owned]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return
        _refuse_reentrant(module)
        if any(hasattr(tensor, "full_tensor") for tensor in tensors):
            raise ValueError(
                f"a {type(module).__name__} that is cut must be one unit of fully_shard: it uses "
                f"{list(self.names)} together, and parts of it are sharded on their own"
            )
        if self.specs is not None:
            copies = copy_slices_to(*tensors, specs=self.specs)
        else:
            wire = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
            copies = copy_to(*tensors, group=self.group, reduce_dtype=wire)
        for (owner, leaf), copy in zip(owned, _listed(copies), strict=True):
            owner.__dict__[leaf] = copy

    def clear(self, module: nn.Module) -> None:
        """Let the parameters be seen again."""
        for owner, leaf in (owner_of(module, name) for name in self.names):
            owner.__dict__.pop(leaf, None)


@dataclass(frozen=True)
class EndSumGradients(Boundary):
    """After the module of a ``SumGradients``, also if it raised."""

    start: SumGradients

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take the copies away."""
        self.start.clear(module)


@dataclass(frozen=True)
class GatherFeatures(Boundary):
    """After a projection that is cut: the features of all ranks, with which they go on alike."""

    spec: ShardSpec

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Replace the output by that of all features."""
        return gather_features(output, self.spec)


@dataclass(frozen=True)
class RefuseOutputs(Boundary):
    """Before a model: what it would return of this rank's share alone raises.

    Attributes:
        flags: Arguments of the call, or else attributes of the model's config, that ask for it.
        reason: Why.
    """

    flags: tuple[str, ...]
    reason: str

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Look at the call, else at the model's config."""
        config = getattr(module, "config", None)
        for flag in self.flags:
            asked = kwargs.get(flag)
            if getattr(config, flag, False) if asked is None else asked:
                raise ValueError(f"{flag}={asked or True} must not be set {self.reason}")


def _refuse_reentrant(module: nn.Module) -> None:
    """A transformers layer's reentrant checkpoint runs its forward again without its hooks."""
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    if checkpoint is None or not (module.training and module.gradient_checkpointing):
        return
    if getattr(checkpoint, "keywords", {}).get("use_reentrant", True):
        raise ValueError(
            "use_reentrant=True must be False in the gradient checkpointing of a "
            f"{type(module).__name__} that is cut: gradients would not be summed"
        )


def take_off_hooks(part: nn.Module, *kinds: type) -> None:
    """Remove the forward hooks of some kinds, and what torch keeps beside them."""
    for hooks in (part._forward_pre_hooks, part._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kinds)]:
            for table in (
                part._forward_pre_hooks,
                part._forward_pre_hooks_with_kwargs,
                part._forward_hooks,
                part._forward_hooks_with_kwargs,
                part._forward_hooks_always_called,
            ):
                table.pop(key, None)


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module below ``module`` that holds parameter or module ``name``, and its name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _listed(tensors: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tensors


def _with_hidden(
    args: Any, kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[Any, dict[str, Any]]:
    """Change the hidden states, wherever the caller put them."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    return (change(args[0]), *args[1:]), kwargs
