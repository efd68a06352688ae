"""The table ATen -> ONNX: its names are torch's, and no overload is translated twice."""

from __future__ import annotations

import pytest
import torch

from onward.capture import attention_op as attention_op  # registers onward::attention
from onward.capture.aten import TABLE
from onward.capture.aten.call import joined, table


@pytest.mark.parametrize("name", TABLE)
def test_names_are_overloads_that_torch_has(name: str) -> None:
    *space, op, overload = name.split(".")
    packet = getattr(getattr(torch.ops, space[0] if space else "aten"), op)
    assert overload in packet.overloads()


def _one() -> None: ...
def _other() -> None: ...


def test_an_overload_that_two_files_translate_is_refused_with_both_places() -> None:
    with pytest.raises(ValueError, match=r"add\.Tensor .*_one and by .*_other; fix"):
        joined([table({_one: "add.Tensor"}), table({_other: "sub.Tensor add.Tensor"})])


def test_an_overload_that_one_file_translates_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"add\.Tensor"):
        table({_one: "add.Tensor", _other: "add.Tensor"})
