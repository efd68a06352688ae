"""A state comes back from JSON and safetensors as it went in: values, types, order, bits."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from onward.checkpoint.state_tree import decoded, encoded
from onward.checkpoint.tensor_file import _NAMES, read_tensors, tensor_chunks
from onward.errors import CheckpointError

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.floats(width=32).map(np.float32), st.integers(0, 255).map(np.uint8),
    st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.device("meta")]),
    st.frozensets(st.integers()).map(set),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$tensor", "$", "a"]), inner, max_size=2),
    ),
    max_leaves=12,
)


def returned(value: Any) -> Any:
    """The value, written to text and tensors and read."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encoded(value, "state", tensors), allow_nan=False)
    return decoded(json.loads(text), "state", tensors)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes() or bool(a != a and b != b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(TREES)
def test_trees_come_back(value: Any) -> None:
    assert same(returned(value), value)


def test_tensors_and_arrays_come_back() -> None:
    state = {
        "a": torch.arange(3), "b": [torch.tensor(0.5), (torch.zeros(0, 2),)],
        1: torch.ones(2), "1": torch.zeros(2), "array": np.arange(4, dtype=np.uint32),
        "scalar": np.array(2.5),
    }  # fmt: skip
    found = returned(state)
    assert list(found) == list(state)
    for value, own in ((found["a"], state["a"]), (found["b"][0], state["b"][0])):
        assert value.dtype == own.dtype
        assert torch.equal(value, own)
    assert found["b"][1][0].shape == (0, 2)
    assert torch.equal(found[1], torch.ones(2))
    assert torch.equal(found["1"], torch.zeros(2))
    assert found["array"].dtype == np.uint32
    assert found["array"].tolist() == [0, 1, 2, 3]
    assert found["scalar"].shape == ()


def test_kinds_of_dicts() -> None:
    assert returned(Counter({3: 2})) == Counter({3: 2})
    assert type(returned(Counter())) is Counter
    assert returned(OrderedDict(a=1)) == {"a": 1}


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, 1j, defaultdict(int), np.array(["text"]), np.datetime64("2026-01-01")],
    ids=lambda v: type(v).__name__,
)
def test_what_no_checkpoint_holds(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"state\.a\.0 is a .* and a checkpoint holds"):
        returned({"a": [value]})


@pytest.mark.parametrize(
    "said",
    [
        {"$set": [1, 1]}, {"$dict": [[1, 2], [1, 3]]}, {"$dict": [[[], 1]]}, {"$tuple": "ab"},
        {"$counter": [["a"]]}, {"$number": ["int8", 1000]},
        {"$number": ["V9", 0]}, {"$device": "x"},
        {"$number": []}, {"$bytes": "A"}, {"$bytes": 5}, {"$float": 1}, {"$float": "nan", "b": 1},
        {"$tensor": []}, {"$tensor": "state.b"}, {"$dtype": "float"}, {"a": float("nan")}, {"$": 1},
        {"$dict": [["a", 1]]}, {"$array": "state.low"}, 1e400, [float("inf")],
    ],
    ids=str,
)  # fmt: skip
def test_what_no_save_writes(said: Any) -> None:
    """A state that is read is one that `encoded` writes, to the letter: nothing is dropped, no
    tensor stands in another's place, and no error of another kind escapes."""
    tensors = {"state.b": torch.zeros(2), "state.low": torch.zeros(2, dtype=torch.bfloat16)}
    for value in (said, {"a": said}, [said]):
        with pytest.raises(CheckpointError, match="the state is malformed"):
            decoded(value, "state", tensors)


def test_a_state_that_leads_to_itself() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
        returned(state)


# ---- files of tensors


@pytest.mark.parametrize("dtype", _NAMES, ids=str)
def test_files_are_those_of_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    """The library's own reader finds each dtype, shape, stride and offset as the tensor had it."""
    base = torch.randn(4, 6).mul(3).abs().to(dtype)
    tensors = {
        "whole": base, "turned": base.t(), "part": base[1:, ::2], "scalar": base[0, 0],
        "empty": base[:0], "expanded": base[:1].expand(3, 6), "é/\"\\": base[0],
        "other width": torch.arange(3, dtype=torch.uint8),
    }  # fmt: skip
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(map(bytes, tensor_chunks(tensors, {"format": "pt"}))))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*raw)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert read_tensors(path).keys() == tensors.keys()


def test_tensors_that_no_file_holds(tmp_path: Path) -> None:
    double = torch.zeros(2, dtype=torch.complex128)
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(2, device="meta"), double):
        with pytest.raises(CheckpointError, match=r"x is .* which a safetensors file cannot hold"):
            list(tensor_chunks({"x": tensor}))


NO_TENSORS: dict[str, bytes] = {
    "is empty": b"",
    "is a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "is a web page": b"<html>",
    "is not a safetensors file": b"\xff" * 64,
    "header": (2**40).to_bytes(8, "little") + b"{}",
    "has extra bytes": b"\x02\0\0\0\0\0\0\0{}" + b"\0" * 8,
}


@pytest.mark.parametrize("said", NO_TENSORS)
def test_files_that_are_none(said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(NO_TENSORS[said])
    with pytest.raises(CheckpointError, match=rf"x\.safetensors .*{said}|{said}.*x\.safetensors"):
        read_tensors(path)
