"""Kernels of other packages behind the signatures of ``layers.ssm``, each imported when called."""

from megablocks_core.layers.ssm.backends.capabilities import CAPABILITIES as CAPABILITIES
from megablocks_core.layers.ssm.backends.capabilities import Capabilities as Capabilities
from megablocks_core.layers.ssm.backends.choice import by_backend as by_backend
