"""The table ATen -> ONNX: its names are torch's, and no overload is translated twice."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from onward.capture.aten import TABLE, register
from onward.capture.aten.call import table

# Names that transformers registers are left out: they exist only once it is imported, and only in
# the versions that define them.
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


def _plain(default: Any) -> Any:
    """One number for a list of the same, as torch takes either; how it spells no padding, no start
    and no list."""
    if isinstance(default, (list, tuple)):
        return _plain(default[0] if default and len(set(default)) == 1 else None)
    return {"valid": 0, None: 0}.get(default, default)


@pytest.mark.parametrize("name", TORCHS)
def test_what_a_call_leaves_out_is_what_torch_takes_for_it(name: str) -> None:
    """A trace leaves out arguments that are torch's defaults."""
    *space, op, overload = name.split(".")
    packet = getattr(getattr(torch.ops, space[0] if space else "aten"), op)
    arguments = getattr(packet, overload)._schema.arguments
    taken = list(inspect.signature(TABLE[name]).parameters.values())[1:]
    by_place = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
    places = dict(zip([a.name for a in arguments if not a.kwarg_only], by_place, strict=False))
    by_name = {p.name: p for p in taken if p.kind is not p.POSITIONAL_OR_KEYWORD} | places
    for argument in arguments:
        if argument.has_default_value() and argument.name in by_name:
            ours = by_name[argument.name].default
            assert ours is not inspect.Parameter.empty, f"{argument.name} may be left out"
            assert _plain(ours) == _plain(argument.default_value), argument.name
