"""Building blocks for training large models; each subpackage is imported alone."""

__version__ = "0.1.0"
