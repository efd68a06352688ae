"""Every Triton kernel beside its op's body, on the CPU by Triton's interpreter: fp32 and fp16.

One process of its own runs the checks (`support/triton_checks.py`). bf16 is left out: the
interpreter computes it wrongly. test_gpu_kernels.py runs the kernels on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import triton_checks
from answers import asked
from triton_checks import CHECKS

from onward.graph.types import DType
from onward.kernels import TRITON

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
Answer = Callable[[str], str | None]


@pytest.fixture(scope="module")
def answer() -> Iterator[Answer]:
    """Asks the process of the interpreter for one check: what it raised, or None."""
    with asked("triton_checks.py", TRITON_INTERPRET="1") as ask:
        yield ask


@NEEDS_TRITON
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_compute_what_the_op_means(name: str, answer: Answer) -> None:
    raised = answer(name)
    assert raised is None, raised


@NEEDS_TRITON
def test_a_check_that_fails_says_so(answer: Answer) -> None:
    assert "KeyError" in str(answer("no check"))


def test_every_kernel_has_checks_in_both_dtypes() -> None:
    """An op whose sample calls are of one low type throughout, which its kernel refuses, has checks
    of its own."""
    assert triton_checks.DTYPES == (DType.FLOAT, DType.FLOAT16)
    assert not [name for name in CHECKS if "bfloat16" in name]
    missing = {
        (op, dtype)
        for op in TRITON
        for dtype in ("float", "float16")
        if not any(op in name.replace("-", " ").split() and name.endswith(f" {dtype}")
                   for name in CHECKS)
    }  # fmt: skip
    # norms and Adam take f32 operands beside x and dy, or g
    beside = {"AdamUpdate", "AddLayerNormalization", "AddLayerNormalizationGrad",
              "LayerNormalization", "LayerNormalizationGrad"}  # fmt: skip
    assert missing <= {(op, "float16") for op in beside}
