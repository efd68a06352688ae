"""The trained model as an ONNX file for any engine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from onward.capture import capture
from onward.config import OnwardError
from onward.graph.file import save
from onward.graph.graph import Graph, Role
from onward.graph.names import distinct, user_name
from onward.rewrite import FORWARD, run
from onward.train.call import Call

_LABELS = ("labels", "next_sentence_label", "start_positions", "end_positions")


def export_onnx(model: torch.nn.Module, call: Call, path: Path) -> Path:
    """Writes the forward of `model` (as it stands: evaluation mode) with symbolic sizes.

    The file appears whole or not at all. Raises OnwardError where the folder does not exist.
    """
    if not path.parent.is_dir():
        raise OnwardError(f"{path.parent} is not a folder; fix: create it first")
    kwargs = {k: v for k, v in call.kwargs.items() if k not in _LABELS}
    captured = capture(model, call.args, kwargs, want_loss=False)
    graph, _ = run(captured.graph, FORWARD, disable=[p.name for p in FORWARD if p.needs])
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        save(graph, made, _plain_names(graph, captured.arrays()))
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the weights' file first
            file.replace(path.parent / file.name)
    return path


def _plain_names(graph: Graph, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Calls inputs, outputs and weights as the user does; the weights by their new names.

    A file has one space of names: where two meet, an input's stays, then an output's.
    """
    taken = {v.name or "" for node in graph for v in node.outputs} | set(graph.ir.initializers)

    def plain(name: str) -> str:
        found = distinct(user_name(name), taken)
        taken.add(found)
        return found

    for value in graph.inputs_with(Role.BATCH):
        value.name = plain(value.name or "")
    graph.outputs = {plain(name): value for name, value in graph.outputs.items()}
    weights: dict[str, np.ndarray] = {}
    for value in graph.inputs_with(Role.PARAM, Role.BUFFER):
        array = arrays[value.name or ""]
        value.name = plain(value.name or "")
        weights[value.name] = array
    return weights
