"""Random bits as a function of a key and an index: what initial values and dropout rest on.

Index ``i`` of key ``k`` becomes 64 bits by the finaliser of splitmix64 on
``k + (i + 1) * GOLDEN`` (Steele, Lea, Flood, https://doi.org/10.1145/2714064.2660195).
Words of 64 bits are int64 tensors, whose sums and products wrap around.
"""

import hashlib
from numbers import Integral

import torch
from torch import Tensor

_WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9 - _WORD
_MIX_2 = 0x94D049BB133111EB - _WORD


def key_of(seed: int, name: str) -> int:
    """The key of what has the logical name ``name`` in the model of ``seed``: 63 bits.

    Raises:
        ValueError: ``seed`` is no whole number, or ``name`` no string.
    """
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise ValueError(f"seed={seed!r} must be a whole number")
    if not isinstance(name, str):
        raise ValueError(f"name={name!r} must be a string")
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def bits_of(key: Tensor, index: Tensor | int) -> Tensor:
    """The 64 random bits at each ``index`` of each ``key``, which broadcast.

    The bits are good keys again: indices of several levels follow one another.
    """
    if isinstance(index, int):
        return mix_(key + signed((index + 1) * GOLDEN))
    return mix_(key + (index + 1) * signed(GOLDEN))


def mix_(word: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place."""
    word.bitwise_xor_(shift(word, 30)).mul_(_MIX_1)
    word.bitwise_xor_(shift(word, 27)).mul_(_MIX_2)
    return word.bitwise_xor_(shift(word, 31))


def shift(word: Tensor, by: int) -> Tensor:
    """``word`` shifted right, zeros coming in (torch's own shift copies the sign)."""
    return (word >> by).bitwise_and_((1 << (64 - by)) - 1)


def signed(word: int) -> int:
    """The low 64 bits of ``word`` as an int64."""
    word %= _WORD
    return word - _WORD if word >> 63 else word


def as_word(number: int | Tensor, device: torch.device) -> Tensor:
    """An integer as a word; one that a compiler follows wraps only as a tensor."""
    if isinstance(number, Tensor):
        return number.to(device, torch.int64)
    return torch.full((), number, dtype=torch.int64, device=device)
