"""Data parallelism: the same weights on every rank, other tokens, gradients summed in backward.

PyTorch Distributed, https://arxiv.org/abs/2006.15704, section 3: flat buckets, sent while the
rest of backward runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megablocks_core.groups import LOCAL, Group, marks
from megablocks_core.parallel.checks import check_flags
from megablocks_core.parallel.data_parallel.buckets import check_bucket_bytes
from megablocks_core.parallel.data_parallel.gradient_buffers import set_gradient_dtype
from megablocks_core.parallel.data_parallel.options import check_arguments
from megablocks_core.parallel.data_parallel.parameter_watch import ParameterWatch
from megablocks_core.parallel.data_parallel.reducer import BUCKET_BYTES, Reducer
from megablocks_core.parallel.wrapping.agreement import words_of
from megablocks_core.parallel.wrapping.refusals import check_experts, refuse_wrapped
from megablocks_core.parallel.wrapping.replicas import check_replicas


class DataParallel(nn.Module):
    """``module`` whose gradients are reduced over the ranks when ``backward()`` returns.

    Forward, names, state and attributes are those of ``module``. Over a group of one it is the
    plain module: no hook, no copy, no message.

    A parameter with a gradient on any rank has one on every rank, zeros where it was idle; one
    without any keeps ``.grad`` as it was. Several backwards add up. ``.grad`` is a view of a
    flat buffer, or for 16-bit parameters a rounded copy of a float32 one: P elements of
    ``reduce_dtype`` on each rank, and the copy.

    Sends an all-reduce for each bucket, in backward; and a flag for each parameter, in one
    message over ``group`` and one over ``expert_group``. At construction, words to compare
    the parameters.

    Args:
        module: The same on every rank of ``group``, apart from experts.
        group: The ranks that see different tokens: data and context parallel.
        expert_group: The ranks that hold the same experts.
        reduction: "sum", or "mean": the sum divided by ``group.size``, experts too, because
            an expert's gradient already comes from all ranks' tokens.
        reduce_dtype: Sum gradients in this dtype, in this rank's buffer and over ranks;
            default float32 for 16-bit parameters, else their own.
        wire_dtype: Send in this 16-bit dtype, and sum what arrives in ``reduce_dtype``: an
            all-to-all and an all-gather in place of the all-reduce.
        bucket_bytes: The largest size of a bucket, in bytes of parameters.
        wide_gradients: ``.grad`` of 16-bit parameters stays in the dtype of the sums.

    Raises:
        ValueError: An argument is none of these; the module, or a part of it, is wrapped
            already; a parameter or an option differs between ranks; copies of an expert lie
            outside of ``expert_group``.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group,
        expert_group: Group = LOCAL,
        reduction: str = "mean",
        reduce_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        wide_gradients: bool = False,
    ) -> None:
        super().__init__()
        check_arguments(group, expert_group, LOCAL, reduction, reduce_dtype, wire_dtype)
        check_bucket_bytes(bucket_bytes)
        check_flags(wide_gradients=wide_gradients)
        refuse_wrapped(module)
        self.module = module
        self.group, self.expert_group, self.reduction = group, expert_group, reduction
        self._options: dict[str, Any] = {
            "reduction": reduction,
            "reduce_dtype": reduce_dtype,
            "wire_dtype": wire_dtype,
            "bucket_bytes": bucket_bytes,
            "wide_gradients": wide_gradients,
        }
        self._reducer: Reducer | None = None
        self._watch: ParameterWatch | None = None
        self._reduces = True
        self.register_state_dict_post_hook(_without_step)
        self.register_load_state_dict_pre_hook(_with_step)
        self._plan(values=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if not self._communicates or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if torch.compiler.is_compiling():  # what is hooked lies outside of any graph
            return torch.compiler.disable(self._hooked, recursive=False)(*args, **kwargs)
        return self._hooked(*args, **kwargs)

    def _hooked(self, *args: Any, **kwargs: Any) -> Any:
        if self._watch is None or self._watch.has_changed():
            self._plan(values=False)
        reducer = self._reducer
        assert reducer is not None
        reducer.check()
        outputs = self.module(*args, **kwargs)
        reducer.watch(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in it sends nothing: gradients gather until the next one outside.

        Meanwhile ``.grad`` shows this rank's own sum, scaled already.
        """
        before = self._reduces
        self._let_reduce(False)
        try:
            yield
        finally:
            self._let_reduce(before)

    # Names are those of the module, so that states, marks and rules do not know of the wrapper.

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As the module's, after the wrapper itself, which has the module's name."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As the module's."""
        return self.module.load_state_dict(state_dict, *args, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # A copy plans for itself at its first forward pass.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reducer": None, "_watch": None, "_reduces": True}

    @property
    def _communicates(self) -> bool:
        return self.group.size > 1 or self.expert_group.size > 1

    def _let_reduce(self, reduces: bool) -> None:
        self._reduces = reduces  # for a reducer that is made meanwhile
        if self._reducer is not None:
            self._reducer.reduces = reduces

    def _plan(self, *, values: bool) -> None:
        """Hook the parameters as they are now, on all ranks alike."""
        named = list(marks(self.module))
        if self._reducer is not None:
            if self._reducer.holds_own():
                raise ValueError(
                    "parameters, their dtypes or requires_grad must not change while gradients "
                    "of no_sync() wait for a backward that reduces them"
                )
            self._reducer.remove()
        groups = {"group": self.group, "expert_group": self.expert_group}
        check_experts(named, **groups)
        agreed = words_of(**self._options)
        check_replicas(named, **groups, values=values, agreed=agreed)
        if self._communicates:
            self._reducer = Reducer(named, **groups, **self._options)
            self._let_reduce(self._reduces)
        elif self._options["wide_gradients"]:
            for _, parameter, _ in named:
                if parameter.dtype.itemsize < 4:
                    set_gradient_dtype(parameter, torch.float32)
        self._watch = ParameterWatch(self.module)


def _without_step(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    step = f"{prefix}module."
    for key in [key for key in state if key.startswith(step)]:
        state[prefix + key[len(step) :]] = state.pop(key)
    versions = getattr(state, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(step)]:
        versions[f"{prefix}{key[len(step) :]}".removesuffix(".")] = versions[key]


def _with_step(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
