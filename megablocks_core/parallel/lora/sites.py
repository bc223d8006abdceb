"""Where an adapter can sit: beside the weight of a layer, or beside a stack of matrices.

A stack is a parameter marked with ``each``, whose tensors are the weights of layers that are no
modules of their own, such as the experts of a mixture. Its adapter has the factors of all of
them, stacked too, as children of the module that holds the stack.

Dimensions: E matrices of a stack, I input features, O output features, R rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import nn

from megablocks_core.groups import Group, Segment, ShardSpec, logical_shape, specs_of
from megablocks_core.groups.cuts import Specs
from megablocks_core.groups.stacks import separate_name, separate_names
from megablocks_core.parallel.lora.layers import (
    Place,
    attach,
    clean_module_name,
    detach,
    kind_of,
    place_of,
)
from megablocks_core.parallel.tensor.adapters import (
    Adapter,
    LoraFactor,
    adapter_of,
    stack_adapters_of,
)


class Site(ABC):
    """A weight that can have an adapter.

    Attributes:
        name: The layer's; of a stack the name of its layers, with ``*`` for their number.
        owner: The module that holds the weight.
        leaf: The weight's name there.
    """

    name: str
    owner: nn.Module
    leaf: str

    @property
    def weight(self) -> nn.Parameter:
        """The weight, or this rank's share of it."""
        return self.owner.get_parameter(self.leaf)

    @property
    @abstractmethod
    def adapter(self) -> Adapter | None:
        """The adapter, merged or not."""

    def factors(self) -> list[tuple[str, LoraFactor]]:
        """The adapter's factors, by their names below a layer."""
        if self.adapter is None:
            return []
        kind = "lora_embedding" if self.adapter.embeds else "lora"
        return [(f"{kind}_A", self.adapter.a), (f"{kind}_B", self.adapter.b)]

    @abstractmethod
    def path(self, leaf: str) -> str:
        """The name in the model of the factor with this name below a layer."""

    @abstractmethod
    def layers(self) -> list[str]:
        """The names of the layers whose weights these are."""

    @abstractmethod
    def place(self) -> Place:
        """How an adapter is to be cut.

        Raises:
            ValueError: The weight cannot have one.
        """

    @abstractmethod
    def attach(
        self, place: Place, factors: tuple[nn.Parameter, nn.Parameter], alpha: float, rslora: bool
    ) -> None:
        """Put an adapter here, from this rank's shares of the factors."""

    @abstractmethod
    def detach(self) -> None:
        """Take the adapter off."""


class LayerSite(Site):
    """A layer."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name, self.owner, self.leaf = name, layer, "weight"

    @property
    def adapter(self) -> Adapter | None:
        """The adapter, merged or not."""
        return adapter_of(self.owner)

    def path(self, leaf: str) -> str:
        """The name of a factor, which is a child of the layer."""
        return f"{self.name}.{leaf}".lstrip(".")

    def layers(self) -> list[str]:
        """Its own name."""
        return [self.name]

    def place(self) -> Place:
        """How an adapter is to be cut."""
        return place_of(self.name, self.owner)

    def attach(
        self, place: Place, factors: tuple[nn.Parameter, nn.Parameter], alpha: float, rslora: bool
    ) -> None:
        """Put an adapter here."""
        attach(self.owner, place, factors, alpha, rslora)

    def detach(self) -> None:
        """Take the adapter off."""
        detach(self.owner)


class StackSite(Site):
    """A stack.

    Args:
        path: The name of the module that holds it.
        owner: That module.
        leaf: The parameter's name there.
        each: Names of the layers' weights, as its mark has them.
    """

    def __init__(self, path: str, owner: nn.Module, leaf: str, each: str) -> None:
        self.owner, self.leaf, self._path = owner, leaf, path
        self._each = each.removesuffix(".weight")
        self._logical = f"{path}.{leaf}".lstrip(".")
        self.name = separate_name(self._logical, self._each, "*")

    @property
    def adapter(self) -> Adapter | None:
        """The adapter, merged or not."""
        return (stack_adapters_of(self.owner) or {}).get(self.leaf)

    def path(self, leaf: str) -> str:
        """The name of a factor, which is a child of the module that holds the stack."""
        return f"{self._path}.{self._child(leaf)}".lstrip(".")

    def layers(self) -> list[str]:
        """The name of the layer of each matrix."""
        length, *_ = logical_shape(self.weight, self._specs)
        return separate_names(self._logical, self._each, length)

    def place(self) -> Place:
        """How an adapter is to be cut: as the stack is; the whole factor's gradient is summed.

        Raises:
            ValueError: The module computes without adapters, or adapters do not serve the cut.
        """
        if stack_adapters_of(self.owner) is None:
            raise ValueError(f"{self.name} are held by a {kind_of(self.owner)} without adapters")
        over, inside = self._cuts()
        length, outputs, inputs = logical_shape(self.weight, self._specs)
        shape, stack = (outputs, inputs), (length,)
        if not inside:
            return Place(shape, over, over, stack=stack)
        (spec,) = inside
        group, several = spec.group, spec.group.size > 1
        if spec.dim == 1:
            a_specs = (*over, _held_by_all(2, inputs, group))
            return Place(shape, a_specs, (*over, spec), group, (several, False), stack=stack)
        b_specs = (*over, _held_by_all(1, outputs, group))
        return Place(shape, (*over, spec), b_specs, group, (False, several), stack=stack)

    def attach(
        self, place: Place, factors: tuple[nn.Parameter, nn.Parameter], alpha: float, rslora: bool
    ) -> None:
        """Put an adapter here."""
        adapters = stack_adapters_of(self.owner)
        assert adapters is not None
        a, b = (
            self._factor("lora_A", factors[0], place.a_specs),
            self._factor("lora_B", factors[1], place.b_specs),
        )
        adapters[self.leaf] = Adapter(a, b, alpha, rslora, False, place.group, place.summed)

    def detach(self) -> None:
        """Take the adapter off."""
        for leaf, _ in self.factors():
            delattr(self.owner, self._child(leaf))
        del (stack_adapters_of(self.owner) or {})[self.leaf]

    @property
    def _specs(self) -> Specs:
        return specs_of(self.owner, self.leaf)

    def _child(self, leaf: str) -> str:
        return f"{self.leaf}_{leaf}"

    def _cuts(self) -> tuple[tuple[ShardSpec, ...], list[ShardSpec]]:
        """Those that choose matrices, and the one that cuts each of them."""
        over = tuple(spec for spec in self._specs if spec.dim == 0)
        inside = [spec for spec in self._specs if spec.dim > 0]
        if len(inside) > 1 or any(spec.has_copies for spec in self._specs):
            cuts = tuple(self._specs)
            raise ValueError(f"{self.name} are cut by {cuts}, which adapters do not serve")
        return over, inside

    def _factor(self, leaf: str, share: nn.Parameter, specs: tuple[ShardSpec, ...]) -> LoraFactor:
        # A mark counts names from the parent of its module, here from the module of the stack.
        _, _, inside = self._each.partition(".")
        factor = LoraFactor(
            share,
            specs,
            start="uniform" if leaf == "lora_A" else "zero",
            each=f"{inside}.{leaf}.weight",
            expert=self._specs.expert,
        )
        self.owner.add_module(self._child(leaf), factor.train(self.owner.training))
        return factor


def _held_by_all(dim: int, length: int, group: Group) -> ShardSpec:
    """Says of what is not cut that its copies lie on these ranks, which see the same tokens.

    Without it, these ranks would be taken for others, whose gradients are to be summed still.
    """
    return ShardSpec(dim, group, (Segment(length, parts=1),))


def stacks_of(module: nn.Module) -> Iterator[StackSite]:
    """All stacks of layers' weights, with adapters or not."""
    for path, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            each = specs_of(owner, leaf).each
            is_factor = isinstance(owner, LoraFactor)
            if each is None or is_factor or parameter is None or parameter.dim() != 3:
                continue
            # Names of what lies below the module, such as experts.{}.up_proj.weight.
            if each.endswith(".weight") and not each.startswith("{}"):
                yield StackSite(clean_module_name(path), owner, leaf, each)


def sites_of(module: nn.Module) -> dict[str, Site]:
    """Every module as a layer, served or not, and every stack, by name."""
    sites: dict[str, Site] = {}
    for name, part in module.named_modules():
        name = clean_module_name(name)
        sites[name] = LayerSite(name, part)
    return sites | {stack.name: stack for stack in stacks_of(module)}


def adapted_sites(module: nn.Module) -> list[Site]:
    """The sites that have an adapter, merged or not."""
    return [site for site in sites_of(module).values() if site.adapter is not None]
