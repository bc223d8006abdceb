"""Published functions of other packages: their arguments, and stand-ins that have no others.

Recorded from mamba-ssm 2.3.2.post1, causal-conv1d 1.7.0 and fla-core 0.6.0; tests compare the
record where ``tools/oracles.sh mamba`` has installed them.
"""

import inspect
import sys
from types import ModuleType

ARGUMENTS = {
    "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": (
        "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, "
        "seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float('inf')), "
        "return_final_states=False, return_varlen_states=False"
    ),
    "mamba_ssm.ops.selective_scan_interface.selective_scan_fn": (
        "u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, "
        "return_last_state=False"
    ),
    "causal_conv1d.causal_conv1d_fn": (
        "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
        "final_states_out=None, activation=None"
    ),
    "causal_conv1d.causal_conv1d_update": (
        "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, "
        "conv_state_indices=None"
    ),
    "fla.ops.gated_delta_rule.chunk_gated_delta_rule": (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
        "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
        "chunk_indices=None, cp_context=None, **kwargs"
    ),
}


class _StandIn(ModuleType):
    """A module that is not there."""


def signature(name):
    """The recorded arguments."""
    return inspect.signature(eval(f"lambda {ARGUMENTS[name]}: None"))


def record_of(function):
    """A function's arguments and default values, as they are compared."""
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def stand_in(monkeypatch, name, compute):
    """Puts ``compute`` in place of a published function, for what its arguments take."""
    recorded = signature(name)

    def function(*arguments, **named):
        given = recorded.bind(*arguments, **named)
        assert given.arguments.get("kwargs", {}) == {}
        return compute(**given.arguments)

    place(monkeypatch, name, function)


def place(monkeypatch, name, function):
    """Puts a function in place of a published one, in modules that need not exist."""
    path, _, leaf = name.rpartition(".")
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        if not isinstance(sys.modules.get(module), _StandIn):
            monkeypatch.setitem(sys.modules, module, _StandIn(module))
    setattr(sys.modules[path], leaf, function)
