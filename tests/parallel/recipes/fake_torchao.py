"""What is used of ``torchao.float8.float8_training_tensor`` 0.18.0, in plain torch."""

import sys
from collections import namedtuple
from contextlib import contextmanager
from enum import Enum
from types import ModuleType

import torch

LinearMMConfig = namedtuple(
    "LinearMMConfig", ["output", "grad_input", "grad_weight"], defaults=[None] * 3
)
ScaledMMConfig = namedtuple(
    "ScaledMMConfig",
    ["emulate", "use_fast_accum", "fp8_output", "pad_inner_dim"],
    defaults=[False, False, False, False],
)


class GemmInputRole(Enum):
    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Float8TrainingTensor:
    """Numbers of 8 bits and a factor; only what a product needs of a tensor."""

    def __init__(self, data, factor, dtype, options, role):
        assert data.dtype.itemsize == 1
        self.data, self.factor, self.dtype, self.options = data, factor, dtype, options
        self.role, self.shape, self.device = role, data.shape, data.device

    def t(self):
        return Float8TrainingTensor(self.data.t(), self.factor, self.dtype, self.options, self.role)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function is torch.mm
        a, b = args
        assert not (a.role is b.role or a.data.dtype == b.data.dtype == torch.float8_e5m2)
        assert b.shape[1] % 16 == 0
        product = (a.data.float() * a.factor) @ (b.data.float() * b.factor)
        return product.to(a.dtype)


def hp_tensor_and_scale_to_float8(
    hp_tensor,
    s,
    float8_dtype,
    linear_mm_config,
    gemm_input_role=GemmInputRole.INPUT,
    axiswise_dim=None,
):
    assert linear_mm_config.output.use_fast_accum and axiswise_dim is None
    most = torch.finfo(float8_dtype).max
    data = (hp_tensor.float() * s).clamp(-most, most).to(float8_dtype)
    return Float8TrainingTensor(data, 1 / s, hp_tensor.dtype, linear_mm_config, gemm_input_role)


NAMES = {
    "LinearMMConfig": LinearMMConfig,
    "ScaledMMConfig": ScaledMMConfig,
    "GemmInputRole": GemmInputRole,
    "Float8TrainingTensor": Float8TrainingTensor,
    "hp_tensor_and_scale_to_float8": hp_tensor_and_scale_to_float8,
}


@contextmanager
def installed():
    """The fake in place of the real package, for bodies of ``@ranks`` too."""
    names = ("torchao", "torchao.float8", "torchao.float8.float8_training_tensor")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    vars(sys.modules[names[-1]]).update(NAMES)
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
