"""The memory of eager PyTorch's step on a GPU, without one: torch's tracker under fake tensors.

Fake tensors are on the CPU, since a CPU build of PyTorch has no fake CUDA tensors. A mode makes the
operators keep what CUDA's keep: a mask of dropout of a byte per number, no scores of attention, and
fp32 where CUDA's autocast computes in fp32 (https://docs.pytorch.org/docs/stable/amp.html).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from suite.batches import Batch
from suite.cases import Case
from suite.engines import LEARNING_RATE
from suite.workloads import make_batches, make_model

# Operators that CUDA's autocast runs in fp32, by their names as functions and methods.
FP32 = frozenset((
    "__rpow__", "__pow__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
    "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist",
    "erfinv", "exp", "expm1", "group_norm", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "log_softmax", "logsumexp", "mse_loss", "nll_loss", "norm",
    "normalize", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss",
    "softmax", "softmin", "softplus", "sum", "tan",
))  # fmt: skip


class AsOnCuda(TorchFunctionMode):
    """Operators keep for their backward what those of CUDA keep."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is dropout:
            return self._dropout(*args, **given)
        if func is scaled_dot_product_attention:
            args, given = args[:4], {**given, "dropout_p": 0.0}
        elif name == "__bool__":
            return True  # whether a mask is causal: the content of a fake tensor is unknown
        elif name in FP32 and torch.is_autocast_enabled("cpu"):
            args, given = tree_map_only(torch.Tensor, _widened, (args, given))
        return func(*args, **given)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@dataclass(frozen=True)
class EagerMemory:
    """held: bytes of the model and the batch. peak: of a step after the first, in all."""

    held: int
    peak: int

    @property
    def step(self) -> int:
        """The bytes of a step above the model and the batch."""
        return self.peak - self.held


def eager_memory(case: Case) -> EagerMemory:
    """The memory of steps of a case in eager PyTorch."""
    batch = make_batches(case, 1)[0]
    return step_memory(lambda: make_model(case), batch, bf16=case.precision == "bf16")


def step_memory(
    build: Callable[[], torch.nn.Module], batch: Batch, bf16: bool = False
) -> EagerMemory:
    """The memory of steps on such a batch with fused AdamW. build: makes the model, whose call
    gives the loss or a mapping with one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        fake = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in batch.items()}
    held = [*{id(t): t for t in (*model.parameters(), *model.buffers())}.values(), *fake.values()]
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *fake.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mode, tracker, AsOnCuda():
            for _ in range(2):
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    output = model(**fake)
                loss = output if isinstance(output, torch.Tensor) else output["loss"]
                loss.backward()
                optimizer.step()
                del output, loss
                tracker.reset_mod_stats()
            peaks = tracker.get_tracker_snapshot("peak")
    peak = max(int(kinds["Total"]) for kinds in peaks.values())
    return EagerMemory(sum(t.nbytes for t in held), peak)
