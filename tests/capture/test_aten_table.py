"""The table ATen -> ONNX: its names are torch's, and no overload is translated twice."""

from __future__ import annotations

import pytest
import torch

from onward.capture import attention_op as attention_op  # registers onward::attention
from onward.capture.aten import TABLE, register
from onward.capture.aten.call import table

# Those of transformers are there once it is imported, in the versions that have them.
TORCHS = [name for name in TABLE if not name.startswith("transformers.")]


@pytest.mark.parametrize("name", TORCHS)
def test_names_are_overloads_that_torch_has(name: str) -> None:
    *space, op, overload = name.split(".")
    packet = getattr(getattr(torch.ops, space[0] if space else "aten"), op)
    assert overload in packet.overloads()


def _one() -> None: ...
def _other() -> None: ...


def test_an_overload_that_two_files_translate_is_refused_with_both_places() -> None:
    held = TABLE["add.Tensor"]
    with pytest.raises(ValueError, match=r"add\.Tensor .*aten\.elementwise.* and by .*_other; fix"):
        register("add.Tensor", _other)
    assert TABLE["add.Tensor"] is held


def test_an_overload_that_one_file_translates_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"add\.Tensor .*_one and by .*_other; fix"):
        table({_one: "add.Tensor", _other: "add.Tensor"})
