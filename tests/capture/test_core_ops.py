"""The ops that PyTorch tags as core: each has a translation, is expanded into ops that have one, or
is refused with the written reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import aten_page
import op_db
import pytest
import tiny
import torch
from torch import nn

from onward.capture.aten import TABLE
from onward.capture.aten.reasons import REASONS, reason
from onward.capture.translate.decompose import functional
from onward.errors import CaptureError

ATEN: Any = torch.ops.aten
X = torch.linspace(-2.0, 2.0, 120).reshape(2, 3, 4, 5).sin()
ROW, PAIR = X[0, 0, 0, :3].contiguous(), X[0, 0, 0, :2].contiguous()
ONES = [1, 1]

# Calls on one floating tensor, one for each core overload that has no translation of its own.
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "_adaptive_avg_pool2d.default": lambda x: ATEN._adaptive_avg_pool2d(x, [2, 3]),
    "_adaptive_avg_pool2d_backward.default": lambda x: ATEN._adaptive_avg_pool2d_backward(
        x[..., :2, :2], x
    ),
    "_fft_c2r.default": lambda x: ATEN._fft_c2r(torch.complex(x, x), [3], 0, 5),
    "_fft_r2c.default": lambda x: ATEN._fft_r2c(x, [3], 0, True).abs(),
    "_local_scalar_dense.default": lambda x: x * ATEN._local_scalar_dense(x.sum().long()),
    "any.default": lambda x: ATEN.any(x > 0.9),
    "any.dim": lambda x: ATEN.any(x > 0.9, -1),
    "any.dims": lambda x: ATEN.any(x > 0.9, [0, -1], True),
    "atan2.out": lambda x: ATEN.atan2.out(x, x, out=torch.zeros_like(x)),
    "avg_pool2d_backward.default": lambda x: ATEN.avg_pool2d_backward(
        x[..., :2, :2], x[..., :4], [2, 2], [2, 2], [0, 0], False, True, None
    ),
    "col2im.default": lambda x: ATEN.col2im(
        x.reshape(2, 20, 3), [2, 4], [2, 2], ONES, [0, 0], ONES
    ),
    "convolution_backward.default": lambda x: ATEN.convolution_backward(
        x[:, :1, :3, :4], x, x[:1, :, :2, :2], [1], ONES, [0, 0], ONES, False, [0, 0], 1,
        [True, True, True],
    ),
    "embedding_dense_backward.default": lambda x: ATEN.embedding_dense_backward(
        x[0, 0], torch.tensor([0, 2, 2, 1]), 4, -1, False
    ),
    "fill.Scalar": lambda x: ATEN.fill(x, 2.0),
    "leaky_relu.default": lambda x: ATEN.leaky_relu(x, 0.1),
    "max_pool2d_with_indices_backward.default": lambda x: ATEN.max_pool2d_with_indices_backward(
        x[..., :2, :2], x, [2, 2], [2, 2], [0, 0], ONES, False,
        torch.zeros(2, 3, 2, 2, dtype=torch.int64),
    ),
    "native_group_norm_backward.default": lambda x: ATEN.native_group_norm_backward(
        x, x, x[:, :1, 0, 0], x[:, :1, 0, 0], ROW, 2, 3, 20, 1, [True, True, True]
    ),
    "native_layer_norm_backward.default": lambda x: ATEN.native_layer_norm_backward(
        x, x, [5], x[..., :1], x[..., :1], x[0, 0, 0], x[0, 0, 0], [True, True, True]
    ),
    "nonzero.default": lambda x: ATEN.nonzero(x),
    "reflection_pad1d.default": lambda x: ATEN.reflection_pad1d(x[0], [2, 1]),
    "reflection_pad2d.default": lambda x: ATEN.reflection_pad2d(x, [2, 1, 0, 3]),
    "reflection_pad3d.default": lambda x: ATEN.reflection_pad3d(x, [2, 1, 0, 3, 1, 2]),
    "replication_pad2d.default": lambda x: ATEN.replication_pad2d(x, [2, 1, 0, 3]),
    "replication_pad3d.default": lambda x: ATEN.replication_pad3d(x, [2, 1, 0, 3, 1, 2]),
    "sym_numel.default": lambda x: x * ATEN.sym_numel(x),
    "sym_size.int": lambda x: x * ATEN.sym_size(x, 0),
    "sym_storage_offset.default": lambda x: x * (ATEN.sym_storage_offset(x) + 1),
    "sym_stride.int": lambda x: x * ATEN.sym_stride(x, 0),
    "var.dim": lambda x: ATEN.var(x, [0, 2], False, keepdim=True),
}  # fmt: skip
# Overloads whose calls give no gradient, or none here: the test compares their results alone.
DETACHED = {
    "atan2.out", "convolution_backward.default", "native_layer_norm_backward.default",
    "native_group_norm_backward.default",
}  # fmt: skip

# Overloads that are refused before the trace records an op of aten, with the message they get.
CHOSEN = {"nonzero.default": "rows that a boolean mask chooses: they have no places; fix: keep"}


def core() -> list[str]:
    """The overloads of aten that torch tags as core."""
    found = []
    for name in dir(ATEN):
        packet = getattr(ATEN, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                if torch.Tag.core in getattr(packet, overload).tags:
                    found.append(f"{name}.{overload}")
    return found


CORE = core()


def test_every_core_op_without_a_translation_has_a_call_here() -> None:
    assert len(CORE) > 150
    assert set(CALLS) == {name for name in CORE if name not in TABLE}


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.w = name, nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x * self.w
        made = CALLS[self.name](given.detach() if self.name in DETACHED else given)
        loss = self.w * 0.5
        for y in made if isinstance(made, (list, tuple)) else [made]:
            flat = y.to(torch.float32).reshape(-1)
            loss = loss + (flat * torch.cos(torch.arange(flat.numel()) * 0.7 + 0.3)).sum()
        return loss


@pytest.mark.parametrize("name", CALLS)
def test_a_core_op_is_eagers_or_refused_with_its_reason(name: str) -> None:
    why = reason(name)
    if why is not None:
        with pytest.raises(CaptureError, match=re.escape(CHOSEN.get(name, why))):
            tiny.gradients(Net(name), {"x": X})
        return
    have, want = tiny.gradients(Net(name), {"x": X}), tiny.eager(Net(name), {"x": X}, X.dtype)
    for key, y in want.items():
        torch.testing.assert_close(have[key], y, rtol=2e-5, atol=2e-5, msg=key)


def test_no_op_with_a_reason_has_a_translation() -> None:
    stems = {name.split(".")[0] for name in TABLE} | {n.split(".")[0].rstrip("_") for n in TABLE}
    assert not stems & set(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_an_op_with_a_reason_is_torchs_and_the_reason_says_how_to_go_on(name: str) -> None:
    assert hasattr(ATEN, name) or hasattr(ATEN, f"{name}_")
    assert "; fix: " in REASONS[name]


def test_no_operator_of_op_db_with_a_reason_is_captured() -> None:
    written = json.loads(op_db.TABLE.read_text())["operators"]
    captured = {op.aten_name for op in op_db.operators() if written[op_db.called(op)] == "equal"}
    assert not captured & set(REASONS)


def test_an_op_made_of_one_that_is_refused_names_it_and_its_reason() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_norm(x * self.w, "nuc").sum()

    said = r"linalg_matrix_norm.str_ord at \(top\) \(by _linalg_svd.default\): it factorises.*; fix"
    with pytest.raises(CaptureError, match=said):
        tiny.gradients(Norm(), {"x": torch.ones(3, 3)})


def test_a_refused_op_that_writes_in_place_has_the_reason_of_the_one_that_does_not() -> None:
    assert reason("cauchy_.default") == REASONS["cauchy"]
    assert reason("add.Tensor") is None
    assert functional(ATEN.add_.Tensor) is ATEN.add.Tensor


def test_the_page_is_of_these_tables() -> None:
    assert aten_page.PAGE.read_text() == aten_page.page(), "fix: python tests/capture/aten_page.py"
