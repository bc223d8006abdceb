"""Recomputation of a model's modules, chosen by their names."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.patterns import matcher
from megablocks_core.parallel.memory.recompute import Kept, checked_kept, recompute


@dataclass(frozen=True)
class RecomputePolicy:
    """Which modules run again in backward, and what of them is kept.

    Attributes:
        modules: Names, or ends of names; ``*`` stands for one step, so "layers.*.mlp" is the
            feed-forward part of every layer and "layers.*" every layer. "" is the model itself.
        every: Of the modules that a name matches, take the first of each ``every``.
        keep: Operations whose results are kept; see ``recompute``.
        cut_over: Ranks that hold the modules' inputs alike and keep a slice each.

    Raises:
        ValueError: ``every`` is below one or not whole, ``modules`` is empty, or ``keep`` names
            no operation.
    """

    modules: str | Sequence[str]
    every: int = 1
    keep: Sequence[Kept] = ()
    cut_over: Group = LOCAL

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every={self.every} must be a whole number of at least 1")
        if not isinstance(self.modules, str) and not self.modules:
            raise ValueError(f"modules={self.modules!r} must hold a name; '' is the model itself")
        checked_kept(self.keep)


def recompute_modules(
    model: nn.Module, policy: str | Sequence[str] | RecomputePolicy
) -> tuple[str, ...]:
    """Let modules of ``model`` run through ``recompute`` from now on, in place.

    Names of parameters stay, and copies and pickles of the model recompute too. Hooks of a
    module run around it, once; those of the modules in it run again with it. Modules within
    modules may both be chosen: their regions nest.

    Args:
        model: Any model.
        policy: What to recompute; names alone mean ``RecomputePolicy(names)``.

    Returns:
        The names of the modules, in the model's order.

    Raises:
        ValueError: A name matches no module, or a module is recomputed already. Later, in a
            call: a transformers layer is handed a cache of keys and values.
    """
    if not isinstance(policy, RecomputePolicy):
        policy = RecomputePolicy(policy)
    names = _matched(model, policy)
    for name in names:
        part = model.get_submodule(name)
        if isinstance(part.__dict__.get("forward"), _Recomputed):
            raise ValueError(
                f"modules={policy.modules!r}: {name or 'the model'} is recomputed already"
            )
    for name in names:
        part = model.get_submodule(name)
        part.forward = _Recomputed(part, policy, part.__dict__.get("forward"))
        if policy.cut_over.size > 1:
            part.__dict__["recompute_group"] = policy.cut_over  # Where ``bind`` looks.
    return names


# What transformers calls keys and values of tokens that came before, which layers add to.
_CACHES = ("cache", "past_key_values", "layer_past")


class _Recomputed:
    """Stands in for the ``forward`` of one module."""

    def __init__(self, module: nn.Module, policy: RecomputePolicy, own: Any) -> None:
        # ``own`` is what stood in before.
        self.module, self.policy, self.own = module, policy, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; its arguments are the module's."""
        if torch.is_grad_enabled() and any(kwargs.get(name) is not None for name in _CACHES):
            raise ValueError(
                f"use_cache=True must be False where a {type(self.module).__name__} is "
                "recomputed: a second run would add its keys and values again"
            )
        options: dict[str, Any] = {"keep": self.policy.keep, "cut_over": self.policy.cut_over}
        if torch.compiler.is_compiling():
            return recompute(partial(self._forward, **kwargs), *args, **options)
        stand_ins = _stand_ins(self.module)

        def call(args: Any, kwargs: Any) -> Any:
            with _standing_in(self.module, stand_ins):
                return self._forward(*args, **kwargs)

        return recompute(call, args, kwargs, **options)

    @property
    def __wrapped__(self) -> Any:
        """What it stands in for, where ``inspect.signature`` looks for names of arguments."""
        return self.own or partial(type(self.module).forward, self.module)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def _matched(model: nn.Module, policy: RecomputePolicy) -> tuple[str, ...]:
    patterns = [policy.modules] if isinstance(policy.modules, str) else policy.modules
    chosen = set()
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        found = list(filter(matcher(pattern, ends=True), names))
        if not found:
            raise ValueError(f"modules={pattern!r} must name modules of the {type(model).__name__}")
        chosen.update(found[:: policy.every])
    return tuple(name for name in names if name in chosen)


# Tensors that take a parameter's place for the time of a call (copies whose gradients are
# summed, ``functional_call``) are gone when the call runs again.


def _stand_ins(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """(owner, name, tensor) of the parameters in whose place stands another tensor."""
    return [
        (part, leaf, seen)
        for part in module.modules()
        for leaf, parameter in part._parameters.items()
        if parameter is not None
        and not isinstance(seen := part.__dict__.get(leaf, parameter), nn.Parameter)
    ]


@contextmanager
def _standing_in(
    module: nn.Module, stand_ins: list[tuple[nn.Module, str, Tensor]]
) -> Iterator[None]:
    """Put the tensors there again, if they are not."""
    missing = [
        (part, leaf, tensor)
        for part, leaf, tensor in stand_ins
        if part.__dict__.get(leaf, part._parameters[leaf]) is not tensor
    ]
    for part, leaf, tensor in missing:
        part.__dict__[leaf] = tensor
    try:
        yield
    finally:
        for part, leaf, _ in missing:
            del part.__dict__[leaf]
