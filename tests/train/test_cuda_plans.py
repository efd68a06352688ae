"""Plans for a CUDA device, run on the CPU: Triton's interpreter runs the kernels.

It shows that the kernels fit together in whole steps; test_gpu_training.py runs them on a device.
bf16 is left out, since the interpreter computes it wrongly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import CASES

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_training.py runs them"),
]

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def outcome(name: str) -> dict[str, Any]:
    """What the program says of one case."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "cuda_plan_program.py", name],
        capture_output=True, text=True, check=False, timeout=280, cwd=SUPPORT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_families_train_as_eager(name: str) -> None:
    found = outcome(name)
    assert found["wrong"] == []
    assert found["kernels"]["triton.all_finite"] == 1
    if "FNet" not in name:
        assert found["kernels"]["triton.attention_grad"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T5", "T5 with both masks", "Llama", "BERT, mask added"])
def test_low_precision_is_as_near_to_fp64_as_autocasts(name: str) -> None:
    """Three products of one value send back gradients of fp16, which are added in one launch; and
    T5's attention multiplies fp16 beside its bias of f32."""
    found = outcome(f"fp16 {name}")
    assert found["wrong"] == []
    assert found["kernels"]["triton.wide_sum"] > 0
    beside = {"T5": 3, "T5 with both masks": 3, "BERT, mask added": 1}
    assert found["beside_f32"] == beside.get(name, 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_dropout_is_that_of_this_processor(precision: str, windows: int) -> None:
    found = outcome(f"dropout {precision} {windows}")
    assert found["wrong"] == []
    assert found["kernels"]["triton.adam"] > 1
    assert found["kernels"]["triton.attention"] > 0
