"""Compilation of launches ahead of time, as Triton would do it on a GPU that is not here."""

from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# Bytes of shared memory that a program may have, and the products of tensor cores.
ARCHITECTURES = {
    80: (163 * 1024, "mma.sync"),
    90: (227 * 1024, "wgmma.mma_async"),
    100: (227 * 1024, "tcgen05.mma"),
}


def compiled(architecture, kernel, grid, arguments, named):
    """A launch as it is compiled for that architecture; ``driver._active`` stays changed."""
    target = GPUTarget("cuda", architecture, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: architecture,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    return kernel.run(*arguments, grid=grid, warmup=True, **named)
