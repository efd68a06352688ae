"""Kernels in Triton, for CUDA devices, where PyTorch's operators would take many passes."""

from onward.kernels.kernel import Kernel
from onward.kernels.triton import (
    attention,
    bias_activation,
    cross_entropy,
    depthwise_conv,
    finite,
    gated,
    group_norm,
    linear_cross_entropy,
    low_moments,
    norm,
    random,
    rms_norm,
    rotary,
    rows,
    tensor_norms,
    update,
    wide_sum,
)

TABLE: dict[str, tuple[Kernel, ...]] = {
    op: (kernel,)
    for module in (
        attention,
        bias_activation,
        cross_entropy,
        depthwise_conv,
        finite,
        gated,
        group_norm,
        linear_cross_entropy,
        low_moments,
        norm,
        random,
        rms_norm,
        rotary,
        rows,
        tensor_norms,
        update,
        wide_sum,
    )
    for op, kernel in module.KERNELS.items()
}

__all__ = ["TABLE"]
