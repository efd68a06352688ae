"""CapturedModule <-> bytes, which another process reads for an equal model.

    bytes = length of the JSON (8 bytes, little endian), JSON, graph

Parameters and buffers are stored as paths, and bound to the tensors of the reader's model. Reading
runs no code from the file: output classes are looked up by name among loaded ones, conditions on
sizes have to match a grammar, and presumptions about a batch use listed operators alone. A capture
that does not fit this form raises ArchiveError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from onward.capture.archive.presumed import read_shown, written_shown
from onward.capture.archive.shape_guards import is_condition
from onward.capture.archive.tree import read_tree, written_tree
from onward.capture.captured_module import CapturedModule
from onward.graph.archive import ArchiveError, from_bytes, plain_size, size_of, to_bytes
from onward.graph.graph import Role, type_of
from onward.model_state import Reads

_HEAD = 8
_GIVEN = (Role.PARAM, Role.BUFFER, Role.BATCH)  # others, such as a seed, are a step's own
_DTYPES = {str(d): d for d in (torch.bfloat16, torch.float16)}


def written(captured: CapturedModule, live: Mapping[str, torch.Tensor]) -> bytes:
    """Returns a capture as bytes. live: the model's tensors by path. Raises ArchiveError for a
    capture that cannot be stored."""
    _require_plain(captured)
    paths = {id(t): path for path, t in reversed(list(live.items()))}
    said = {
        "parameters": [[n, _path(paths, t)] for n, t in captured.parameters.items()],
        "buffers": [[n, _path(paths, t)] for n, t in captured.buffers.items()],
        "leaves": [[i, n] for i, n in captured.leaves.items()],
        "notes": captured.notes,
        "reached": sorted(captured.reached),
        "frozen": sorted(captured.frozen),
        "reaches": [[n, sorted(found)] for n, found in captured.reaches.items()],
        "parts": list(captured.parts_reached),
        "tree": None if captured.tree is None else written_tree(captured.tree),
        "autocast": None if captured.autocast is None else str(captured.autocast),
        "asks": captured.asks,
        "conditions": captured._conditions,
        "sizes": [[leaf, dim, plain_size(size)] for leaf, dim, size in captured._sizes],
        "presumed": [written_shown(fact) for fact in captured._presumed],
        "layouts": captured._layouts,
    }
    try:
        head = json.dumps(said, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ArchiveError(str(error)) from error
    return b"".join((len(head).to_bytes(_HEAD, "little"), head, to_bytes(captured.graph)))


def read(data: bytes, live: Mapping[str, torch.Tensor], reads: Reads) -> CapturedModule:
    """Returns the capture in bytes that `written` made. live: the model's tensors by path, which it
    is bound to. reads: what the capture has read of plain objects. Raises ArchiveError for bytes of
    anything else."""
    length = int.from_bytes(data[:_HEAD], "little")
    try:
        said = json.loads(data[_HEAD : _HEAD + length].decode())
        graph = from_bytes(data[_HEAD + length :])
        tree = None if said["tree"] is None else read_tree(said["tree"])
        result = CapturedModule(
            graph,
            {n: live[path] for n, path in said["parameters"]},  # type: ignore[misc]
            {n: live[path] for n, path in said["buffers"]},
            {int(i): n for i, n in said["leaves"]},
            notes=list(said["notes"]),
            reached=set(said["reached"]),
            frozen=set(said["frozen"]),
            reaches={n: set(found) for n, found in said["reaches"]},
            parts_reached={n: set() for n in said["parts"]},
            tree=tree,
            autocast=None if said["autocast"] is None else _DTYPES[said["autocast"]],
            reads=reads,
            asks=str(said["asks"]),
        )
        if not all(map(is_condition, said["conditions"])):
            raise ArchiveError("a guard is no condition on sizes")
        result.guard(said["conditions"])
        result._sizes = [(int(leaf), int(dim), size_of(size)) for leaf, dim, size in said["sizes"]]
        result._presumed = [read_shown(fact) for fact in said["presumed"]]
        layouts = said["layouts"]
        result._layouts = layouts and [(x if x is True else tuple(x), at) for x, at in layouts]
        _require_inputs(result)
    except Exception as error:  # any, since a value of any type may stand anywhere
        raise ArchiveError(f"these bytes are no capture: {error}") from error
    return result


def _require_plain(captured: CapturedModule) -> None:
    """Raises ArchiveError for a capture that another process could not use."""
    effects = captured.effects
    doubts = {
        "parts of it run in PyTorch": captured.regions,
        "a tensor is baked in": len(captured.constants) > captured.literals,
        "it holds for some numbers of a batch alone": captured._pinned,
        "the side effects of the forward are not known": effects is None,
        "the forward draws random numbers of Python's": effects is not None and effects.drawn,
        "the forward sets tensors": effects is not None and effects.tensors,
        "what the forward sets is put back": effects and effects.written and not effects.left,
        "a part that runs in PyTorch": any(captured.parts_reached.values()),
        "a guard is no condition on sizes": not all(map(is_condition, captured._conditions)),
    }
    for doubt, holds in doubts.items():
        if holds:
            raise ArchiveError(doubt)


def _require_inputs(captured: CapturedModule) -> None:
    """Raises ArchiveError unless the graph's inputs are the capture's tensors and leaves."""
    owned = captured.owned
    inputs = {v.name: v for v in captured.graph.inputs if v.meta["role"] in _GIVEN}
    if {*owned, *captured.leaves.values()} != inputs.keys():
        raise ArchiveError("its tensors and leaves are not the graph's inputs")
    for name, tensor in owned.items():
        if tuple(tensor.shape) != type_of(inputs[name]).shape:
            raise ArchiveError(f"{name} has another shape")


def _path(paths: Mapping[int, str], tensor: torch.Tensor) -> str:
    path = paths.get(id(tensor))
    if path is None:
        raise ArchiveError("a tensor that no module has")
    return path


__all__ = ["read", "written"]
