"""Computations of attention: this library's, torch's, and packages imported when called."""

from megablocks_core.layers.attention.backends.capabilities import CAPABILITIES as CAPABILITIES
from megablocks_core.layers.attention.backends.capabilities import Capabilities as Capabilities
