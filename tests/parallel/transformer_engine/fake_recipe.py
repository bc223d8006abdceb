"""``transformer_engine.common.recipe`` in plain Python: fields and defaults of 2.20.2.

Compared with the real package by the tests that need the oracle transformer-engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Largest numbers, forward and backward."""

    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """Of a product."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Of a quantiser."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """The base of all."""

    @classmethod
    def nvfp4(cls):
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls):
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls):
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls):
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls):
        return issubclass(cls, Float8BlockScaling)


@dataclass
class DelayedScaling(Recipe):
    """Scales from a history of amaxes."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class Float8CurrentScaling(Recipe):
    """A scale for each tensor, from its own amax. The quantisers' parameters are set later."""

    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class MXFP8BlockScaling(Recipe):
    """A power of two for 32 values in a row."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    """A float32 scale for 1 x 128 values, or for 128 x 128."""

    fp8_quant_fwd_inp = QParams(power_2_scale=True)
    fp8_quant_fwd_weight = QParams(power_2_scale=True)
    fp8_quant_bwd_grad = QParams(power_2_scale=True)
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class NVFP4BlockScaling(Recipe):
    """E4M3 scales for 16 values in a row, and one float32 for a tensor."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp4_quant_fwd_inp: Any = field(init=False, default=None)
    fp4_quant_fwd_weight: Any = field(init=False, default=None)
    fp4_quant_bwd_grad: Any = field(init=False, default=None)

    def __post_init__(self):
        turned, chance = not self.disable_rht, not self.disable_stochastic_rounding
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=turned)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=turned, stochastic_rounding=chance
        )


NAMES = (
    "Format",
    "MMParams",
    "QParams",
    "Recipe",
    "DelayedScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
)
