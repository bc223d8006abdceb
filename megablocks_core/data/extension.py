"""The compiled extension; ``None`` where the package was installed without a compiler.

Each function of it has a NumPy twin, next to where it is called, that gives the same bits.
"""

try:
    import megablocks_core._native as native
except ModuleNotFoundError:  # a pure wheel; an extension that is there and broken still raises
    native = None

__all__ = ["native"]
