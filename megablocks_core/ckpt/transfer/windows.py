"""Memory of each rank that the other ranks on its host see, so that nothing there is sent.

The memory is a file without a name. Others open it through the process that made it, and map it.
It is gone with the last process that maps it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import Group
from megablocks_core.groups.swaps import on_any


class Address(NamedTuple):
    """Where others find a window.

    Attributes:
        host: Running system and its table of processes.
        process: Number of the process there.
        descriptor: Number of the file there.
        token: The first bytes of the file, until it is filled.
    """

    host: str
    process: int
    descriptor: int
    token: bytes

    @property
    def path(self) -> str:
        """The file, as any process on the host can open it."""
        return f"/proc/{self.process}/fd/{self.descriptor}"


class Windows:
    """This rank's window and those of the ranks on its host; files close with the context."""

    def __init__(self) -> None:
        self._file = -1
        self._files: dict[int, int] = {}
        self._memory: dict[int, Tensor] = {}

    def __enter__(self) -> Windows:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._file, *self._files.values()):
            if descriptor >= 0:
                os.close(descriptor)
        self._file, self._files, self._memory = -1, {}, {}

    def create(self) -> Address | None:
        """Make this rank's window, still empty; ``None`` if the system has no such memory."""
        token = secrets.token_bytes(16)
        try:
            host = _host()
            self._file = os.memfd_create("checkpoint-window", os.MFD_CLOEXEC)
            os.pwrite(self._file, token, 0)
        except (AttributeError, OSError):
            return None
        return Address(host, os.getpid(), self._file, token)

    def open(self, addresses: Sequence[Address | None], *, group: Group) -> list[int]:
        """Open the windows of the other ranks on this host. None may be filled before.

        Every rank calls it. One word is sent if ranks are on one host.

        Args:
            addresses: Those of all ranks.
            group: The ranks.

        Returns:
            For each rank the number of its host. If one that should see a window does not, each
            rank counts as alone on its own.
        """
        names = [rank if one is None else one.host for rank, one in enumerate(addresses)]
        hosts = [names.index(name) for name in names]
        if len(set(hosts)) < group.size:
            peers = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
            fails = not all(
                self._opens(rank, addresses[rank]) for rank in peers if rank != group.rank
            )
            if on_any(fails, group=group):
                return list(range(group.size))
        return hosts

    def _opens(self, rank: int, address: Address | None) -> bool:
        """Open one window; whether it is there and is the one that is meant."""
        if address is None:
            return True
        try:
            self._files[rank] = os.open(address.path, os.O_RDONLY | os.O_CLOEXEC)
            # Another process of this number has other files.
            return os.pread(self._files[rank], len(address.token), 0) == address.token
        except OSError:
            return False

    def resize(self, nbytes: int) -> None:
        """Give this rank's window its size, before anyone looks at it."""
        if nbytes:
            os.ftruncate(self._file, nbytes)

    def own(self) -> Tensor:
        """The bytes of this rank's window."""
        return self._mapped(-1, self._file, mmap.ACCESS_WRITE)

    def of(self, rank: int) -> Tensor:
        """The bytes of another rank's window, only to be read."""
        return self._mapped(rank, self._files[rank], mmap.ACCESS_READ)

    def _mapped(self, key: int, file: int, access: int) -> Tensor:
        if key not in self._memory:
            with warnings.catch_warnings():
                # torch has no tensors that may only be read.
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                memory = mmap.mmap(file, 0, access=access)
                self._memory[key] = torch.frombuffer(memory, dtype=torch.uint8)
        return self._memory[key]


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
