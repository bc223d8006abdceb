"""A torch optimizer cut over the ranks of a group (ZeRO, https://arxiv.org/abs/1910.02054).

Each rank keeps the state of a part of all weights, steps that part, and sends it to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.checks import check_flags, check_mapping
from megablocks_core.parallel.counter import key_of
from megablocks_core.parallel.data_parallel.buckets import check_bucket_bytes, plan_buckets
from megablocks_core.parallel.data_parallel.data_parallel import DataParallel
from megablocks_core.parallel.data_parallel.options import check_arguments
from megablocks_core.parallel.data_parallel.reducer import BUCKET_BYTES, Reducer
from megablocks_core.parallel.gradients.clip import clip_grad_norm_
from megablocks_core.parallel.published import Field, Published
from megablocks_core.parallel.sharded_optimizer.buckets import OptimizerBucket
from megablocks_core.parallel.sharded_optimizer.elementwise import (
    OptimizerMaker,
    check_optimizer_class,
)
from megablocks_core.parallel.sharded_optimizer.flat_parameters import FlatParameters
from megablocks_core.parallel.sharded_optimizer.gradients import ReducedGradients, WholeGradients
from megablocks_core.parallel.sharded_optimizer.host_states import HostStates
from megablocks_core.parallel.sharded_optimizer.members import (
    check_complete,
    described,
    find_members,
)
from megablocks_core.parallel.sharded_optimizer.parameter_gathers import ParameterGathers
from megablocks_core.parallel.sharded_optimizer.pieces import StochasticRounding
from megablocks_core.parallel.sharded_optimizer.state import (
    PieceState,
    check_options,
    load_states,
    plain_options,
    set_options,
    without_members,
    words_of_groups,
)
from megablocks_core.parallel.wrapping.agreement import words_of
from megablocks_core.parallel.wrapping.refusals import check_experts, refuse_wrapped
from megablocks_core.parallel.wrapping.replicas import check_replicas


class ShardedOptimizer(torch.optim.Optimizer):
    """``optimizer_class`` whose state, and work, are divided over the ranks of ``group``.

        optimizer = ShardedOptimizer(model, torch.optim.AdamW, group=dp, lr=3e-4)
        ...
        loss.backward()  # gradients are summed over the ranks, bucket by bucket
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Weights after a step are those of ``optimizer_class`` in one process that saw all tokens. A
    parameter without a gradient on any rank is skipped. Parameters keep their identity, names
    and shapes, and become views of flat buckets. Over groups of one nothing is copied or sent.

    Rank r owns elements [r L / N, (r + 1) L / N) of each bucket of L elements, padded, and N
    ranks. With P elements of b bytes in all, gradients summed in g bytes (4, or 8 of float64)
    and an optimizer that keeps k values for each element, a rank holds

    ================  ==========================================================
    weights           P b
    gradients         P g + P g / N; with ``zero=2`` P g / N between backwards
    state             P k g / N; with masters of 16-bit weights P (k + 1) g / N
    ================  ==========================================================

    and sends (N - 1) / N of P g in each backward (a reduce-scatter a bucket) and of P b in each
    step (an all-gather a bucket), P being experts and N the size of ``expert_group`` for those;
    with ``replicate`` also an all-reduce of P g / N in backward. Padding adds less than N
    elements a bucket.

    With a ``DataParallel`` module its whole gradients are used, and nothing is reduced again;
    16-bit parameters' are exact sums if it has ``wide_gradients=True``.

    Args:
        module_or_parameters: A module, the same on every rank of ``group`` apart from experts; or
            parameters, names with parameters, or parameter groups, as torch's optimizers take
            them. Without a module no mark is known: they count as dense, and none as an expert.
        optimizer_class: Any torch optimizer that works element by element.
        group: The ranks that see different tokens, and over which dense parameters are cut.
        expert_group: The ranks that hold the same experts, and over which those are cut.
        replicate: The ranks that hold copies of a dense shard (hybrid sharding).
        zero: 1 keeps the memory of whole gradients between backwards; 2 frees each bucket's
            once it is reduced.
        reduction: "sum", or "mean": divided by ``group.size * replicate.size``, experts too.
        masters: For 16-bit weights ``True`` keeps a float32 copy. ``False`` updates in float32
            and rounds to the nearest, a ``StochasticRounding`` by chance.
        reduce_dtype: Sum gradients in this dtype; default float32 for 16-bit parameters, else
            their own.
        wire_dtype: Send gradients in this 16-bit dtype, and sum what arrives in ``reduce_dtype``.
        overlap: Let updated weights arrive while forward has begun. Whoever reads one through
            the module waits for its bucket; a parameter held otherwise needs ``wait()``.
        offload: Keep the state, and masters, in host memory.
        bucket_bytes: The largest size of a bucket, in bytes of parameters.
        groups: Parameter groups of the module's parameters, such as ``parameter_groups`` gives.
        hyperparameters: Of ``optimizer_class``.

    Raises:
        ValueError: An argument is none of these; the optimizer works on whole tensors; a
            parameter is sharded already, differs between ranks, or is in no or two parameter
            groups; options or hyperparameters differ between ranks; the module's gradients are
            reduced by another wrapper.
    """

    def __init__(  # noqa: PLR0913 (each is an option of its own)
        self,
        module_or_parameters: nn.Module | Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: Group,
        expert_group: Group = LOCAL,
        replicate: Group = LOCAL,
        zero: int = 1,
        reduction: str = "mean",
        masters: bool | StochasticRounding = True,
        reduce_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        overlap: bool = False,
        offload: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        groups: Iterable[Mapping[str, Any]] | None = None,
        **hyperparameters: Any,
    ) -> None:
        check_arguments(group, expert_group, replicate, reduction, reduce_dtype, wire_dtype)
        module = module_or_parameters if isinstance(module_or_parameters, nn.Module) else None
        check_bucket_bytes(bucket_bytes)
        check_flags(overlap=overlap, offload=offload)
        check_optimizer_class(optimizer_class)
        _check_options(module, zero=zero, masters=masters, overlap=overlap)
        self._module, self._overlap, self._sealed = module, overlap, False
        self._members, wanted = find_members(module_or_parameters, groups)
        maker = OptimizerMaker(optimizer_class, hyperparameters)
        super().__init__(wanted, maker.check(wanted))
        self._sealed = True
        named = [(member.name, member.parameter, member.specs) for member in self._members]
        _check_crossing(group, replicate)
        check_experts(named, group=group, expert_group=expert_group, replicate=replicate)
        agreed = {
            **words_of_groups(self.param_groups),
            **words_of(
                optimizer_class=optimizer_class.__qualname__,
                zero=zero,
                reduction=reduction,
                masters=masters,
                reduce_dtype=reduce_dtype,
                wire_dtype=wire_dtype,
                overlap=overlap,
                offload=offload,
                bucket_bytes=bucket_bytes,
            ),
        }
        check_replicas(named, group=group, expert_group=expert_group, agreed=agreed)
        check_replicas(named, group=replicate, expert_group=LOCAL, agreed=agreed)
        reducer = None
        if isinstance(module, DataParallel):
            _check_data_parallel(module, group, expert_group, replicate, zero, reduction)
        elif max(group.size, expert_group.size, replicate.size) > 1:
            reducer = Reducer(
                named,
                group=group,
                expert_group=expert_group,
                replicate=replicate,
                reduction=reduction,
                reduce_dtype=reduce_dtype,
                wire_dtype=wire_dtype,
                bucket_bytes=bucket_bytes,
                shards=True,
                keep_full=zero == 1,
            )
        plan = plan_buckets(
            described(self._members),
            bucket_bytes=bucket_bytes,
            shares=group.size,
            expert_shares=expert_group.size,
        )
        self._host = HostStates() if offload else None
        self._buckets: list[OptimizerBucket] = []
        # In the order of forward, which needs the first parameters first.
        for bucket in reversed(reducer.buckets if reducer else plan):
            ranks = expert_group if bucket.expert else group
            flat = FlatParameters(bucket, [one.parameter for one in self._members], group=ranks)
            self._buckets.append(
                OptimizerBucket(
                    flat, self._members, maker=maker, options=self._options(), masters=masters
                )
            )
            if self._host is not None:
                self._host.send(self._buckets[-1])
        flats = [bucket.flat for bucket in self._buckets]
        self._gradients = ReducedGradients(reducer, flats, module) if reducer else WholeGradients()
        self._gathers = ParameterGathers(flats)
        self._steps = 0
        self._publishing: list[PieceState] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's part of the weights by their gradients, and share the result.

        Parameters without a gradient on any rank are skipped. Returns what ``closure`` gives.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.wait()
        self._check_unchanged()
        self._gradients.check()
        self._steps += 1
        options = self._options()
        for bucket in self._host.in_turn(self._buckets) if self._host else self._buckets:
            gradients = self._gradients.of(bucket.flat)
            if gradients:
                bucket.step(gradients, options, number=self._steps)
                self._gathers.start(bucket.flat)
                self._show_state(bucket, gradients)
        self._gradients.used()
        if self._overlap and self._module is not None:
            self._gathers.hide(self._module)
        else:
            self.wait()
        return loss

    def wait(self) -> None:
        """Return when all weights have arrived; with ``overlap`` reading one waits by itself."""
        self._gathers.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, reduced ones too."""
        self._gradients.drop()
        super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward in it sends nothing; the next one outside reduces what has gathered."""
        if isinstance(self._module, DataParallel):
            return self._module.no_sync()
        return self._gradients.no_sync()

    def clip_grad_norm_(
        self, max_norm: float, *, norm_type: float = 2.0, pp: Group = LOCAL
    ) -> Tensor:
        """``clip_grad_norm_`` of what is trained."""
        whole = self._module or [member.parameter for member in self._members]
        return clip_grad_norm_(whole, max_norm, norm_type=norm_type, pp=pp)

    def logical_state(self) -> Published:
        """All that this rank keeps, by parameter and range, under a torch optimizer's names.

        ``ckpt`` saves it so that a torch optimizer can load it, and this one a torch optimizer's.
        "master" is the copy of 16-bit weights.
        """
        self._settle()
        fields = [field for state in self._states().values() for field in state.fields()]
        groups = [(group["params"], plain_options(group)) for group in self.param_groups]
        return Published(fields, {"steps": self._steps}, groups)

    def logical_targets(self) -> list[Field]:
        """Memory for all fields that there may be, also before the first step."""
        self._settle()
        self._publishing = list(self._states().values())
        return [field for state in self._publishing for field in state.targets()]

    def load_logical_groups(
        self, options: Sequence[Mapping[str, Any] | None], filled: Sequence[bool]
    ) -> None:
        """Take over the options of each parameter group, and the targets that were filled."""
        set_options(self.param_groups, options)
        flags = iter(filled)
        for state in self._publishing:
            state.take_over([name for _, name, _, _ in state.targets() if next(flags)])
        self._publishing = []
        self._loaded()

    def load_logical_values(self, values: Mapping[str, Any] | None) -> None:
        """Take over the count of steps, which stochastic rounding goes by."""
        if values is not None:
            self._steps = values["steps"]

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for the same rank in the same layout.

        ``state`` and ``param_groups`` are torch's, but that tensors are the ranges ``ranges``
        of flattened parameters.
        """
        self._settle()
        states = self._states()
        order = iter(range(len(self._members)))
        groups = [
            {**options, "params": [next(order) for _ in group["params"]]}
            for group, options in zip(self.param_groups, self._options(), strict=True)
        ]
        return {
            "state": {index: state.tensors for index, state in states.items()},
            "param_groups": groups,
            "ranges": {index: [s.piece.start, s.piece.stop] for index, s in states.items()},
            "steps": self._steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy what ``state_dict`` gave on this rank.

        Raises:
            ValueError: It is of another layout, or has other fields or parameter groups.
        """
        check_mapping("state_dict", state_dict, ("state", "param_groups", "ranges", "steps"))
        self._settle()
        saved = [without_members(group) for group in state_dict["param_groups"]]
        check_options(self.param_groups, saved)
        load_states(self._states(), state_dict["state"], state_dict["ranges"])
        set_options(self.param_groups, saved)
        self._steps = state_dict["steps"]
        self._loaded()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only torch's own constructor may.

        Raises:
            ValueError: Buckets are planned already.
        """
        if self._sealed:
            raise ValueError(
                "param_group must be given when the optimizer is made: its buckets are planned; "
                "make another ShardedOptimizer"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            "a ShardedOptimizer must not be copied or pickled: its weights lie in buffers that "
            "the module shares; use state_dict() or logical_state()"
        )

    def _options(self) -> list[dict[str, Any]]:
        return [without_members(group) for group in self.param_groups]

    def _states(self) -> dict[int, PieceState]:
        found = (pair for bucket in self._buckets for pair in bucket.states())
        return dict(sorted(found, key=lambda pair: pair[0]))

    def _settle(self) -> None:
        """Let the host read what is kept there."""
        if self._host is not None:
            self._host.settle()
            for device in {
                bucket.device for bucket in self._buckets if bucket.device.type == "cuda"
            }:
                torch.cuda.current_stream(device).synchronize()

    def _loaded(self) -> None:
        for bucket in self._buckets:
            self._show_state(bucket, bucket.flat.parameters)
            if self._host is not None:
                self._host.send(bucket)

    def _show_state(self, bucket: OptimizerBucket, indices: Iterable[int]) -> None:
        """``self.state`` is torch's: filled once a parameter was stepped."""
        for index in indices:
            self.state[self._members[index].parameter] = bucket.state_of(index)

    def _check_unchanged(self) -> None:
        """Raise if the module's weights are no longer those that are stepped."""
        for bucket in self._buckets:
            moved = bucket.flat.moved()
            if moved is not None:
                raise ValueError(
                    f"parameter {self._members[moved].name!r} must keep its memory: it was moved, "
                    "or its data replaced, after the ShardedOptimizer was made"
                )
        if self._module is not None:
            check_complete(self._module, self._members)


def _check_options(
    module: nn.Module | None, *, zero: int, masters: bool | StochasticRounding, overlap: bool
) -> None:
    if not isinstance(zero, int) or isinstance(zero, bool) or zero not in (1, 2):
        raise ValueError(f"zero={zero!r} must be 1 or 2; fully_shard cuts the weights too")
    if not isinstance(masters, bool | StochasticRounding):
        raise ValueError(f"masters={masters!r} must be True, False or a StochasticRounding")
    if isinstance(masters, StochasticRounding):
        key_of(masters.seed, "masters")
    if overlap and module is None:
        raise ValueError("overlap=True must have a module, through which weights are read")
    if module is not None and not isinstance(module, DataParallel):
        refuse_wrapped(module)


def _check_crossing(group: Group, replicate: Group) -> None:
    if min(group.size, replicate.size) > 1 and len({*group.ranks} & {*replicate.ranks}) != 1:
        raise ValueError(
            f"replicate={replicate} must cross group={group} in this rank alone; take both from "
            "mesh.split(...)"
        )


def _check_data_parallel(
    module: DataParallel,
    group: Group,
    expert_group: Group,
    replicate: Group,
    zero: int,
    reduction: str,
) -> None:
    """Raise unless the gradients of ``module`` are those that the optimizer needs."""
    if zero != 1 or replicate.size > 1:
        raise ValueError(
            f"zero={zero} and replicate={replicate} must be 1 and LOCAL with a DataParallel "
            "module, which keeps whole gradients; give the module inside it"
        )
    for name, mine, theirs in (
        ("group", group, module.group),
        ("expert_group", expert_group, module.expert_group),
        ("reduction", reduction, module.reduction),
    ):
        if mine != theirs:
            raise ValueError(f"{name}={mine!r} must be {theirs!r}, as of the DataParallel module")
