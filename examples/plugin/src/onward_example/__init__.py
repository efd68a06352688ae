"""A plugin of Onward: squared ReLU with kernels of its own, and the Signum optimizer.

`register` is the entry point of the group `onward.plugins` (pyproject.toml). Onward calls it before
it makes its first Trainer; nobody has to import this package.
"""

from __future__ import annotations

from onward import extend
from onward_example.kernels import SQUARED_RELU as KERNEL
from onward_example.kernels import SQUARED_RELU_GRAD as GRADIENT_KERNEL
from onward_example.signum import SIGNUM
from onward_example.squared_relu import SQUARED_RELU, SQUARED_RELU_GRAD, gradient, squared_relu


def register() -> None:
    """All that this package adds."""
    extend.op(SQUARED_RELU, gradient=gradient)
    extend.op(SQUARED_RELU_GRAD)
    extend.kernel("SquaredRelu", KERNEL)
    extend.kernel("SquaredReluGrad", GRADIENT_KERNEL)
    extend.rewrite_pass(
        extend.FusionPass(squared_relu),
        before="bias_activation",
        reason="that pass would join the Relu with its product, and leave the square alone",
    )
    extend.optimizer(SIGNUM)
