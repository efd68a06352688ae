"""Three engines on one batch: Onward, eager PyTorch, and stock onnxruntime where installed.

With dropout off, each tensor's distance to an fp64 eager run may be at most twice eager's own
(`law.py`). One distance is one draw of rounding noise, and eager's is now and then small by luck:
a tensor that departs on the batch is looked at again over several draws (`draws.py`).

In mixed precision the same law holds for the step with its casts, and eager PyTorch runs under
`torch.autocast`. The step without casts is compared as well: rounding to fp32 hides less.

With dropout on, Onward's executor and onnxruntime run the same graph, masks and all. A bisection
(`bisection.py`) names the first stage, and in it the first node, that departs.
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
