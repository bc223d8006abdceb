"""Dropout by counter in models of other code: in the place of their ``nn.Dropout``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.memory.replay import remember
from megablocks_core.parallel.random.dropout import Dropout, dropout
from megablocks_core.parallel.tensor.plan import Column, Style, Whole


def dropout_modules(model: nn.Module) -> tuple[str, ...]:
    """Let every ``nn.Dropout`` of ``model`` drop by counter from now on, in place.

    The model is then called with one keyword argument more, ``dropout_index``: the words of all
    its tokens, from ``DropoutKey.index`` [... T], which is needed in training alone. Each
    dropout takes its path in the model as its stream. Masks are then those of one process in
    any micro-batches, on data-parallel ranks, in regions of ``recompute``, and, if
    ``tensor_parallelize`` follows, on tensor-parallel ranks. Sends nothing.

    Args:
        model: Any model whose dropouts work on activations [... T F].

    Returns:
        The names of the dropouts.

    Raises:
        ValueError: The model drops in another way too, which cannot be replaced.
    """
    refuse_other_dropouts(model, allowed=nn.Dropout)
    words = _Words()
    names = []
    for name, _ in list(model.named_modules(remove_duplicate=False)):
        part = model.get_submodule(name)  # One parent of two names has been through already.
        if type(part) is nn.Dropout and part.p > 0:
            path, _, leaf = name.rpartition(".")
            own = DropoutOfModel(part.p, stream=name, words=words).train(part.training)
            setattr(model.get_submodule(path), leaf, own)
            names.append(name)
    if names:
        model.register_forward_pre_hook(_TakeWords(words), with_kwargs=True)
        model.register_forward_hook(_ForgetWords(words), always_call=True)
    return tuple(names)


def refuse_other_dropouts(model: nn.Module, *, allowed: type[nn.Module] | None = None) -> None:
    """Raise a ``ValueError`` that names a dropout which draws from torch's generators.

    These are torch's modules, but for ``allowed``, and rates that a module keeps for
    ``nn.functional.dropout``: numbers above zero with "dropout" in their name.
    """
    for name, part in model.named_modules():
        if isinstance(part, Dropout) or type(part) is allowed:
            continue
        torchs = isinstance(part, nn.modules.dropout._DropoutNd)
        rates = {"p": part.p} if torchs else _rates(part)
        for attribute, rate in rates.items():
            if rate > 0:
                raise ValueError(
                    f"{name}.{attribute}={rate} must be 0: ranks would draw different masks"
                    + (" (dropout_modules replaces an nn.Dropout)" if torchs else "")
                )


def place_dropouts(
    styles: Mapping[str, Style | None], *, beside_cuts: Callable[[str], bool], group: Group
) -> list[tuple[str, str, Any]]:
    """What each ``DropoutOfModel`` must know of the ranks, as (name, attribute, value).

    Args:
        styles: Those of a plan, by the names of all dropouts.
        beside_cuts: Whether a name lies beside projections whose outputs stay cut.
        group: The tensor-parallel ranks.

    Raises:
        ValueError: A dropout beside cut projections is not in the plan, or has another style
            than "column" or "whole".
    """
    attributes = []
    for name, style in styles.items():
        cut = isinstance(style, Column) and not style.gather and not style.segments
        if not (cut or isinstance(style, Whole) or (style is None and not beside_cuts(name))):
            raise ValueError(
                f"plan[{name!r}]={style} must say whose features this dropout sees, beside "
                'projections that are cut: "column" for this rank\'s, "whole" for all'
            )
        attributes += [(name, "group", group), (name, "cuts_features", cut)]
    return attributes


def _rates(part: nn.Module) -> dict[str, float]:
    return {
        name: value
        for name, value in vars(part).items()
        if "dropout" in name and isinstance(value, float | int)
    }


@dataclass
class _Words:
    """The words of the call that a model is in."""

    index: Tensor | None = None


class DropoutOfModel(Dropout):
    """Stands in for an ``nn.Dropout``: called as it is, it finds the words of the model's call.

    Attributes:
        group: Ranks that may hold a part of the tokens along dim -2.
        cuts_features: They hold slices of the features instead.
    """

    def __init__(self, p: float, *, stream: str, words: _Words) -> None:
        super().__init__(p, stream=stream)
        self.words = words
        self.group: Group = LOCAL
        self.cuts_features = False

    def forward(self, x_TF: Tensor) -> Tensor:
        """Drop."""
        if not self.drops:
            return x_TF
        index_T = remember(lambda: self.required(self.words.index))
        tokens, size, rank = x_TF.shape[-2], self.group.size, self.group.rank
        if size > 1 and index_T.shape[-1] == tokens * size:
            index_T = index_T.narrow(-1, rank * tokens, tokens)
        first = rank * x_TF.shape[-1] if self.cuts_features else 0
        return dropout(x_TF, self.p, stream=self.stream, index=index_T, first_feature=first)


@dataclass(frozen=True)
class _TakeWords:
    """Before the model: takes ``dropout_index`` out of the call."""

    words: _Words

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.words.index = kwargs.pop("dropout_index", None)
        return args, kwargs


@dataclass(frozen=True)
class _ForgetWords:
    """After the model, also if it raised."""

    words: _Words

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.words.index = None
