"""Muon: momentum whose matrices are orthogonalised, and AdamW for all that is no hidden matrix.

Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al.,
https://arxiv.org/abs/2502.16982. The matrices are the logical ones, however they are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_update

from megablocks_core.groups import LOCAL, Group, check_group, gradient_shard, logical_shape, marks
from megablocks_core.groups.placements import is_dtensor, local
from megablocks_core.groups.shares import gradient_part, share_of
from megablocks_core.parallel.checks import check_choice, check_mapping, check_module
from megablocks_core.parallel.muon.groups import (
    ADAMW,
    ADJUSTMENTS,
    MUON,
    Member,
    check_numbers,
    muon_groups,
)
from megablocks_core.parallel.muon.matrix_updates import MODES, Unit, orthogonal_updates, scaled
from megablocks_core.parallel.muon.newton_schulz import NewtonSchulz
from megablocks_core.parallel.muon.owners import owners_of, send_from_owners
from megablocks_core.parallel.published import Field, Published, cut_alike
from megablocks_core.parallel.wrapping.agreement import check_agreed, words_of

_FIELDS = {MUON: ("momentum_buffer",), ADAMW: ("exp_avg", "exp_avg_sq")}
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_MASTER = "master"


class Muon(torch.optim.Optimizer):
    """Train the hidden matrices of ``module`` by Muon and all else by AdamW.

        optimizer = Muon(model, lr=0.02, adamw={"lr": 3e-4}, group=mesh.group("dp", "cp"))
        ...
        optimizer.step()  # gradients were reduced before

    For each logical matrix, with gradient ``g`` and ``B`` from zero:

        B <- momentum B + (1 - momentum) g
        u <- (1 - momentum) g + momentum B   (nesterov; else B)
        w <- (1 - lr weight_decay) w - lr adjust(rows, columns) NewtonSchulz(u)

    A matrix is what one process has: the segments of a packed weight and the experts of a stack
    are each one. Weights equal those of one process whatever is cut: by tensor-parallel marks,
    by FSDP2 (DTensors), by both, by expert parallelism. Embeddings, heads, norms and vectors, and
    what has no two dimensions, are AdamW's (torch's own arithmetic), unless ``groups`` say else.
    A parameter without a gradient is left alone.

    Gradients must be whole and reduced: by ``DataParallel``, ``fully_shard`` or
    ``reduce_gradients``. Over ``group``, work and state are dealt out by whole parameters: each
    rank updates its own and sends the new weights. A rank then keeps its parameters' state only.
    Experts are dealt out over ``expert_group``. DTensors are cut already, and not dealt out.

    State for a parameter of n elements on this rank: n numbers by Muon, 2 n by AdamW, float32 or
    float64; n more for a float32 master of a 16-bit parameter.

    Sent by ``step``, in elements of the products' dtype: "gather", each cut matrix once to its
    owner and back; "duplicated", an all-gather of each; "distributed", for a matrix that is cut
    along its longer dimension, its smaller Gram matrix in each iteration. Over ``group`` an
    all-gather of the weights. Beside that, a flag for each cut matrix over each group that cuts.
    At construction, words to compare the options.

    Args:
        module: The model; its marks say how parameters are cut.
        lr: Muon's learning rate.
        weight_decay: Muon's decoupled weight decay.
        momentum: Of Muon.
        nesterov: Whether the update looks one step ahead.
        adjust_lr: "original" (sqrt(max(1, rows / columns))), "match_rms_adamw" (0.2
            sqrt(max(rows, columns)), rates are AdamW's then) or "none".
        newton_schulz: How matrices are orthogonalised.
        adamw: AdamW's hyperparameters: lr, betas, eps, weight_decay.
        groups: Parameter groups, as ``train.parameter_groups`` makes them. Their options go
            before those above; "algorithm" chooses "muon" or "adamw".
        mode: How a cut matrix is served: "gather", "duplicated" or "distributed".
        group: The ranks that hold the same parameters, and among which they are dealt out.
        expert_group: The ranks that hold the same experts.

    Raises:
        ValueError: An argument is out of range or unknown, or differs between ranks that step
            together; a parameter is on meta.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr: str = "original",
        newton_schulz: NewtonSchulz = NewtonSchulz(),  # noqa: B008 (frozen)
        adamw: Mapping[str, Any] | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
        mode: str = "gather",
        group: Group = LOCAL,
        expert_group: Group = LOCAL,
    ) -> None:
        check_group(group)
        check_group(expert_group, "expert_group")
        check_module(module)
        check_choice("mode", mode, MODES)
        if not isinstance(newton_schulz, NewtonSchulz):
            raise ValueError(f"newton_schulz={newton_schulz!r} must be a NewtonSchulz")
        if adamw is not None:
            check_mapping("adamw", adamw)
        if unknown := sorted(set(adamw or {}) - set(_ADAMW)):
            raise ValueError(f"adamw has {unknown}, which must be of {sorted(_ADAMW)}")
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr": adjust_lr,
        }
        options = {MUON: muon, ADAMW: {**_ADAMW, **(adamw or {})}}
        made, self._members = muon_groups(module, groups, options)
        for one in made:
            check_numbers(one)
        super().__init__(made, {})
        self.mode, self.newton_schulz = mode, newton_schulz
        self._check_agreed(group, expert_group)
        self._frozen = [(n, p) for n, p, _ in marks(module) if id(p) not in self._members]
        # From the other end, so that the dearest of both kinds do not meet on one rank.
        self._dealt = {False: _Dealt(group), True: _Dealt(expert_group, from_last=True)}
        for expert, dealt in self._dealt.items():
            dealt.deal(*([m for m in self._of(a) if m.specs.expert == expert] for a in _FIELDS))
        for member in self._members.values():
            if self._is_mine(member):
                self.state[member.parameter] = _fresh_state(member)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; every rank must call it.

        Raises:
            ValueError: A gradient is a shard of a sharded optimizer, or a parameter is trained
                that was frozen at construction.
        """
        if thawed := [name for name, parameter in self._frozen if parameter.requires_grad]:
            raise ValueError(f"{thawed} must be trained when the optimizer is made")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param_group in self.param_groups:
            members = [self._members[id(parameter)] for parameter in param_group["params"]]
            mine = [member for member in members if self._is_mine(member)]
            gradients = [_gradient(member) for member in mine]
            if param_group["algorithm"] == MUON:
                self._muon(param_group, mine, gradients)
            else:
                self._adamw(param_group, mine, gradients)
        for dealt in self._dealt.values():
            dealt.send()
        return loss

    def logical_state(self) -> Published:
        """All state of this rank by parameter; ``ckpt.save`` and ``load`` call it."""
        fields: list[Field] = [
            (parameter, name, cut_alike(tensor, parameter), None)
            for parameter, state in self.state.items()
            for name, tensor in state.items()
        ]
        return Published(fields, {"param_groups": [_options(one) for one in self.param_groups]})

    def load_logical_values(self, values: Mapping[str, Any]) -> None:
        """Take over saved hyperparameters; the state was filled before.

        Raises:
            ValueError: There are more or fewer groups than here, or of another algorithm.
        """
        check_mapping("values", values, ("param_groups",))
        given = values["param_groups"]
        here = [one["algorithm"] for one in self.param_groups]
        if [one["algorithm"] for one in given] != here:
            raise ValueError(f"param_groups={given} must be of the algorithms {here}")
        for one, saved in zip(self.param_groups, given, strict=True):
            _take_options(one, saved)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill this rank's state from ``state_dict()`` of the same layout.

        Raises:
            ValueError: It has other parameters or fields; nothing was changed.
        """
        check_mapping("state_dict", state_dict, ("state", "param_groups"))
        here = self.state_dict()
        outline = {
            key: {name: tuple(tensor.shape) for name, tensor in state.items()}
            for key, state in here["state"].items()
        }
        given = {
            key: {name: tuple(tensor.shape) for name, tensor in state.items()}
            for key, state in state_dict["state"].items()
        }
        if given != outline:
            raise ValueError(f"state_dict of {given} must have the fields {outline}")
        self.load_logical_values(state_dict)
        for key, state in here["state"].items():
            for name, tensor in state.items():
                tensor.copy_(state_dict["state"][key][name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups after construction: what is dealt out is settled then.

        Raises:
            ValueError: Always, once constructed.
        """
        if hasattr(self, "_dealt"):
            raise ValueError("param_group must be given at construction, in groups")
        super().add_param_group(param_group)

    def _check_agreed(self, group: Group, expert_group: Group) -> None:
        """Over the ranks that step together: those that share, and those that hold other slices."""
        words = words_of(mode=self.mode, newton_schulz=self.newton_schulz)
        for number, one in enumerate(self.param_groups):
            options = {f"{key} of parameter group {number}": v for key, v in _options(one).items()}
            words |= words_of(**options)
        cutters = (
            cutter
            for member in self._members.values()
            for cutter in share_of(member.parameter, member.specs).groups
        )
        check_agreed(words, groups=(group, expert_group, *cutters))

    def _muon(
        self, options: dict[str, Any], members: list[Member], gradients: list[Tensor | None]
    ) -> None:
        used = _used_anywhere(members, gradients)
        members, gradients = _where(used, members), _where(used, gradients)
        units: list[Unit] = []
        for member, gradient in zip(members, gradients, strict=True):
            assert member.layout is not None
            buffer = self.state[member.parameter]["momentum_buffer"]
            gradient = torch.zeros_like(buffer) if gradient is None else gradient.to(buffer.dtype)
            buffer.lerp_(gradient, 1 - options["momentum"])
            update = gradient.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer
            update = update.to(self.newton_schulz.dtype_for(update.dtype))
            units += (Unit(share, member.layout) for share in member.layout.units(update))
        scale = ADJUSTMENTS[options["adjust_lr"]]
        updates = iter(orthogonal_updates(units, self.newton_schulz, mode=self.mode))
        for member in members:
            assert member.layout is not None
            weight = self._weight(member)
            weight.mul_(1 - options["lr"] * options["weight_decay"])
            for share in member.layout.units(weight):
                update = scaled(next(updates).to(share.dtype), member.layout, scale)
                share.sub_(update * options["lr"])
            self._round(member)

    def _adamw(
        self, options: dict[str, Any], members: list[Member], gradients: list[Tensor | None]
    ) -> None:
        found = [(m, g) for m, g in zip(members, gradients, strict=True) if g is not None]
        if not found:
            return
        weights = [self._weight(member) for member, _ in found]
        states = [self.state[member.parameter] for member, _ in found]
        adamw_update(
            weights,
            [
                gradient.to(weight.dtype)
                for (_, gradient), weight in zip(found, weights, strict=True)
            ],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=False,
        )
        for member, _ in found:
            self._round(member)

    def _of(self, algorithm: str) -> Iterable[Member]:
        """The members of an algorithm, in the order of the parameter groups."""
        for group in self.param_groups:
            if group["algorithm"] == algorithm:
                yield from (self._members[id(parameter)] for parameter in group["params"])

    def _is_mine(self, member: Member) -> bool:
        return self._dealt[member.specs.expert].is_mine(member)

    def _weight(self, member: Member) -> Tensor:
        """What is updated: the master, or the memory of the parameter itself."""
        master = self.state[member.parameter].get(_MASTER)
        return local(member.parameter).detach() if master is None else master

    def _round(self, member: Member) -> None:
        master = self.state[member.parameter].get(_MASTER)
        if master is not None:
            local(member.parameter).copy_(master)


class _Dealt:
    """Whole parameters dealt out to the ranks of a group."""

    def __init__(self, group: Group, *, from_last: bool = False) -> None:
        self.group, self._from_last = group, from_last
        self._owners: dict[int, int] = {}
        self._parameters: list[Tensor] = []

    def deal(self, matrices: Sequence[Member], others: Sequence[Member]) -> None:
        """Give each an owner: matrices so that ranks work alike, others so that they hold alike."""
        if self.group.size == 1:
            return
        loads = [0] * self.group.size
        for members, cost in ((matrices, _work), (others, _memory)):
            plain = [member for member in members if not is_dtensor(member.parameter)]
            begun = loads if cost is _memory else None
            owners = owners_of([cost(member) for member in plain], self.group.size, loads=begun)
            for member, owner in zip(plain, owners, strict=True):
                loads[owner] += _memory(member)
                rank = self.group.size - 1 - owner if self._from_last else owner
                self._owners[id(member.parameter)] = rank
                self._parameters.append(member.parameter)

    def is_mine(self, member: Member) -> bool:
        return self._owners.get(id(member.parameter), self.group.rank) == self.group.rank

    def send(self) -> None:
        """Fill every parameter from its owner."""
        owners = [self._owners[id(parameter)] for parameter in self._parameters]
        send_from_owners(self._parameters, owners, group=self.group)


def _memory(member: Member) -> int:
    """Elements of the whole state, so that ranks which hold other slices deal alike."""
    algorithm = ADAMW if member.layout is None else MUON
    return len(_FIELDS[algorithm]) * math.prod(logical_shape(member.parameter, member.specs))


def _work(member: Member) -> int:
    assert member.layout is not None
    stack = logical_shape(member.parameter, member.specs)[0] if member.layout.stacked else 1
    return member.layout.cost * stack


def _fresh_state(member: Member) -> dict[str, Tensor]:
    weight = local(member.parameter).detach()
    if weight.is_meta:
        raise ValueError(f"{member.name} is on meta; it must hold its values")
    wide = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
    algorithm = ADAMW if member.layout is None else MUON
    state = {name: torch.zeros_like(weight, dtype=wide) for name in _FIELDS[algorithm]}
    if algorithm == ADAMW:
        state["step"] = torch.zeros(())
    if wide != weight.dtype:
        state[_MASTER] = weight.to(wide)
    return state


def _gradient(member: Member) -> Tensor | None:
    if gradient_shard(member.parameter) is not None:
        raise ValueError(f"{member.name} must have a whole gradient, and has a shard of one")
    return gradient_part(member.parameter, member.specs).held


def _used_anywhere(members: Sequence[Member], gradients: Sequence[Tensor | None]) -> list[bool]:
    """Which have a gradient on any rank that holds a part of a matrix."""
    flags = [gradient is not None for gradient in gradients]
    cutters = [member.layout.groups if member.layout is not None else () for member in members]
    for group in dict.fromkeys(group for groups in cutters for group in groups):
        asked = [index for index, groups in enumerate(cutters) if group in groups]
        device = local(members[asked[0]].parameter).device
        mine = torch.tensor([flags[index] for index in asked], dtype=torch.int32, device=device)
        for index, flag in zip(asked, group.all_reduce(mine, "max").tolist(), strict=True):
            flags[index] = bool(flag)
    return flags


def _where(flags: Sequence[bool], things: Sequence[Any]) -> list[Any]:
    return [thing for flag, thing in zip(flags, things, strict=True) if flag]


def _options(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, as JSON."""
    return {
        key: value.item() if isinstance(value, Tensor) else list(value) if key == "betas" else value
        for key, value in param_group.items()
        if key not in ("params", "param_names")
    }


def _take_options(param_group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(param_group.get(key), Tensor):
            param_group[key].fill_(value)
        else:
            param_group[key] = tuple(value) if key == "betas" else value
