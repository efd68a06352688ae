"""Verification: compares Onward on one batch with eager PyTorch, and with onnxruntime if installed.

With dropout off, each tensor may be at most twice as far from an fp64 eager run as eager's own
result is (`law.py`). One such distance is one draw of rounding noise, and eager's is sometimes
small by chance: a tensor that fails on the batch is compared again over several draws (`draws.py`).

In mixed precision the same law applies to the step with its casts, and eager PyTorch runs under
`torch.autocast`. The step without casts is compared as well, since fp32 rounding hides less.

With dropout on, Onward's executor and onnxruntime run the same graph with the same masks. Bisection
(`bisection.py`) names the first stage whose results differ, and the first such node.
"""

from onward.train.verify.eager_modes import InDouble, NoDropout
from onward.train.verify.graphs import without_dropout
from onward.train.verify.law import allowed_difference
from onward.train.verify.report import ComparedTensor, Verification
from onward.train.verify.step import verify_step

__all__ = [
    "ComparedTensor",
    "InDouble",
    "NoDropout",
    "Verification",
    "allowed_difference",
    "verify_step",
    "without_dropout",
]  # fmt: skip
