"""Initial weights: one seed gives one model, however it is cut.

Each value is a function of a key and of its index in the whole logical tensor, so a rank
computes its own slices and nothing else, and they have the same bits at any cut. The key of
a parameter is a hash of the seed and its logical name.

The 64 random bits of an index (``counter``) become a normal value by Box and Muller's
transform: 32 bits make the radius ``sqrt(-2 ln u)``, so values reach 6.66 standard
deviations, and 32 make the angle.
Logarithm and sine are polynomials made of single additions and products, which round alike
on every machine, whereas a vector library may round the end of a row differently.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megablocks_core.groups import ShardSpec, logical_shape, own_slices, specs_of
from megablocks_core.groups.cuts import Box
from megablocks_core.groups.marking import clean_name
from megablocks_core.groups.placements import local, placement_specs
from megablocks_core.parallel.counter import GOLDEN, key_of, mix_, shift, signed

# Temporary memory is a few blocks: one that fits a CPU's cache, or that fills a GPU.
_BLOCK_ON_CPU = 1 << 16
_BLOCK_ELSEWHERE = 1 << 22

# Layout of a float64: 11 bits of exponent over 52 of mantissa.
_MANTISSA_BITS = 52
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_ONE = 1023 << _MANTISSA_BITS

# Chebyshev fits in x^2, highest power first: sin(pi x) / x for |x| <= 1/2 (error 4e-16) and
# 4 atanh(x) / x for |x| <= (sqrt(2) - 1) / (sqrt(2) + 1) (error 7e-16).
_SINE = (
    -2.113362735205297e-05,
    0.0004659870158043378,
    -0.0073703643265304155,
    0.08214587881631043,
    -0.599264528825224,
    2.5501640398618677,
    -5.1677127800497855,
    3.1415926535897927,
)
_FOUR_ATANH = (
    0.33675319941360976,
    0.3624386886243043,
    0.4444686909503581,
    0.5714283204221534,
    0.8000000012348323,
    1.3333333333310584,
    4.000000000000001,
)


def key_for(tensor: Tensor, name: str, seed: int | None) -> int:
    """The key of ``tensor``: by seed and name, else drawn; nothing is drawn for one on ``meta``."""
    if seed is not None:
        return key_of(seed, name)
    return 0 if tensor.is_meta else draw_key()


def draw_key() -> int:
    """A key from torch's default generator: for a part that is built alone.

    Ranks that share a parameter must have seeded that generator alike (``torch.manual_seed``).
    """
    return int(torch.randint((1 << 63) - 1, (), dtype=torch.int64, device="cpu"))


def normal_(
    tensor: Tensor, *, key: int, std: float, specs: Sequence[ShardSpec] = (), mean: float = 0.0
) -> Tensor:
    """Fill ``tensor``, this rank's share of a whole cut by ``specs``, with normal values.

    Computed in float64 and cast last; ``tensor`` on ``meta`` is left alone. Sends nothing.
    """
    return _fill(tensor, lambda bits: _normal(bits).mul_(std).add_(mean), key, tuple(specs))


@torch.no_grad()
def normal_box(tensor: Tensor, box: Box, shape: tuple[int, ...], *, key: int, std: float) -> Tensor:
    """Fill ``tensor`` with what ``normal_`` gives ``box`` of a whole tensor of ``shape``."""
    everything = tuple(slice(0, length) for length in tensor.shape)
    if tensor.numel():
        for whole_block, own_block in _blocks(box, everything, tensor.device):
            bits = _bits(key, whole_block, shape, tensor.device)
            tensor[own_block].copy_(_normal(bits).mul_(std).add_(0.0))
    return tensor


def uniform_(
    tensor: Tensor, *, key: int, low: float, high: float, specs: Sequence[ShardSpec] = ()
) -> Tensor:
    """As ``normal_``, with values uniform between ``low`` and ``high``."""
    width = high - low
    return _fill(tensor, lambda bits: _uniform(bits).mul_(width).add_(low), key, tuple(specs))


def reset_parameters(module: nn.Module, *, seed: int) -> None:
    """Give every parameter of ``module`` its initial value in the model of ``seed``.

    Parts of this package key each parameter by its logical name. Other parts (``nn.Linear``,
    ``nn.LayerNorm``) run their own ``reset_parameters`` under a generator seeded by their
    name, a whole tensor at a time if ``fully_shard`` has cut it. A tied parameter ends with the
    values of its first name. Run it on a model that was built on ``meta`` after ``to_empty``.

    Raises:
        ValueError: A part has parameters but no ``reset_parameters``, or has one that knows no
            seed while its parameters are cut.
    """
    parts = list(module.named_modules())
    for path, part in parts:
        _check_part(path, part)
    for path, part in reversed(parts):
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            continue
        prefix = clean_name(f"{path}.") if path else ""
        if _takes_seed(reset):
            reset(seed=seed, prefix=prefix)
        else:
            _reset_by_generator(part, reset, key_of(seed, prefix))


def _check_part(path: str, part: nn.Module) -> None:
    own = [name for name, _ in part.named_parameters(recurse=False)]
    reset = getattr(part, "reset_parameters", None)
    what = f"module={path or type(part).__name__!r} ({type(part).__name__})"
    if own and reset is None:
        raise ValueError(f"{what} has parameters and must have a method reset_parameters")
    if reset is not None and not _takes_seed(reset) and any(specs_of(part, name) for name in own):
        raise ValueError(f"{what} has cut parameters and must have reset_parameters(seed, prefix)")


def _takes_seed(reset: Callable[..., None]) -> bool:
    return "seed" in inspect.signature(reset).parameters


def _reset_by_generator(part: nn.Module, reset: Callable[..., None], key: int) -> None:
    """Run a ``reset_parameters`` that draws from torch's default generators."""
    devices = {parameter.device for parameter in part.parameters(recurse=False)}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        torch.manual_seed(key)
        with _whole_shares(part):
            reset()


@contextmanager
def _whole_shares(part: nn.Module) -> Iterator[None]:
    """Parameters that placements cut are whole inside; afterwards each rank has its slices."""
    cut = [
        (owner, name, parameter)
        for owner in part.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and placement_specs(parameter)
    ]
    wholes = {
        id(parameter): nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        )
        for _, _, parameter in cut
    }
    for owner, name, parameter in cut:
        owner._parameters[name] = wholes[id(parameter)]
    try:
        yield
    finally:
        for owner, name, parameter in cut:
            owner._parameters[name] = parameter
    for _, _, parameter in cut:
        slices = own_slices(placement_specs(parameter), tuple(parameter.shape))
        for theirs, mine in slices:
            local(parameter).detach()[mine].copy_(wholes[id(parameter)].detach()[theirs])


@torch.no_grad()
def _fill(
    tensor: Tensor, values: Callable[[Tensor], Tensor], key: int, specs: tuple[ShardSpec, ...]
) -> Tensor:
    if tensor.is_meta:
        return tensor
    shape, held = logical_shape(tensor, specs), local(tensor)
    for whole, mine in own_slices((*specs, *placement_specs(tensor)), shape):
        for whole_block, own_block in _blocks(whole, mine, tensor.device):
            bits = _bits(key, whole_block, shape, tensor.device)
            held[own_block].copy_(values(bits))
    return tensor


def _blocks(whole: Box, mine: Box, device: torch.device) -> Iterator[tuple[Box, Box]]:
    """A box in pieces of bounded size, as pairs of places in the whole and the local tensor."""
    limit = _BLOCK_ON_CPU if device.type == "cpu" else _BLOCK_ELSEWHERE
    lengths = [part.stop - part.start for part in whole]
    count = math.prod(lengths)
    if count <= limit:
        yield whole, mine
        return
    dim = next(dim for dim, length in enumerate(lengths) if length > 1)
    step = max(1, limit * lengths[dim] // count)
    for start in range(0, lengths[dim], step):
        stop = min(start + step, lengths[dim])
        yield from _blocks(
            _narrow(whole, dim, start, stop), _narrow(mine, dim, start, stop), device
        )


def _narrow(box: Box, dim: int, start: int, stop: int) -> Box:
    first = box[dim].start
    return (*box[:dim], slice(first + start, first + stop), *box[dim + 1 :])


def _bits(key: int, box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """64 random bits for every index in ``box`` of a whole tensor of ``shape``."""
    state = torch.full((), signed(key + GOLDEN), device=device)
    stride = math.prod(shape)
    for part, length in zip(box, shape, strict=True):
        stride //= length
        places = torch.arange(part.start, part.stop, device=device)
        state = state.unsqueeze(-1) + places.mul_(signed(stride * GOLDEN))
    return mix_(state)


def _uniform(bits: Tensor) -> Tensor:
    """The upper 53 bits as a value of [0, 1)."""
    return shift(bits, 11).double().mul_(2.0**-53)


def _normal(bits: Tensor) -> Tensor:
    """Box and Muller: radius from the upper half of the bits, sine of the angle from the lower."""
    radius = _minus_two_log(shift(bits, 32).double().add_(0.5)).sqrt_()
    half_turns = ((bits << 32) >> 32).double().add_(0.5).mul_(2.0**-32)
    return _odd(_SINE, half_turns).mul_(radius)


def _minus_two_log(scaled: Tensor) -> Tensor:
    """``-2 ln u`` for ``u = scaled / 2**32`` below 1.

    With ``scaled = m * 2**e`` and ``m`` in [1, 2), ``ln m`` is ``ln sqrt(2)`` plus
    ``2 atanh((m - sqrt(2)) / (m + sqrt(2)))``.
    """
    word = scaled.view(torch.int64)
    exponent = (word >> _MANTISSA_BITS).double()
    mantissa = word.bitwise_and(_MANTISSA).bitwise_or_(_ONE).view(torch.float64)
    ratio = (mantissa - math.sqrt(2)).div_(mantissa + math.sqrt(2))
    return exponent.sub_(1054.5).mul_(-2 * math.log(2)).sub_(_odd(_FOUR_ATANH, ratio))


def _odd(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """``x`` times the polynomial in ``x * x``, one rounding an operation."""
    square = x * x
    total = square * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total.add_(coefficient).mul_(square)
    return total.add_(coefficients[-1]).mul_(x)
