"""Draws the graphs of docs/stages.md: one training step before and after each stage.

    python docs/images/stages.py

The graphs are those that the compiler writes with ONWARD_DUMP, read by onnx.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import onward

HERE = Path(__file__).resolve().parent
# picture -> the end of the dump's name
STAGES = {
    "capture": "capture",
    "forward": "forward-bias_activation",
    "differentiate": "updates",
    "rewrite": "step-cast_again",
    "plan": "specialize",
}
FORWARD, BACKWARD, UPDATE = "#dbe9fb", "#fde5c8", "#d9efd9"


def compiled() -> tuple[dict[str, onnx.ModelProto], onward.Trainer]:
    """The graphs of a step by picture, and the Trainer that has made one step of it."""
    torch.manual_seed(0)
    trainer = onward.Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.GELU()),
        onward.optim.SGD(lr=0.1),
        loss_fn=nn.functional.mse_loss,
    )
    settings = {"ONWARD_GRAPH_CACHE": "0"}
    before = {name: os.environ.get(name) for name in (*settings, "ONWARD_DUMP")}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(settings, ONWARD_DUMP=folder)
        try:
            trainer.train_step(torch.randn(3, 4), torch.randn(3, 8))
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        found = {}
        for stage, end in STAGES.items():
            [path] = Path(folder).glob(f"[0-9][0-9]-{end}.onnx")
            found[stage] = onnx.load(path)
    return found, trainer


def op(node: onnx.NodeProto) -> str:
    """The op's name; that of an own op has a digest of its attributes in a file."""
    return node.op_type.partition("_")[0]


def places(nodes: list[onnx.NodeProto]) -> list[tuple[float, int]]:
    """The place of each node: across, and its depth, the longest way from an input."""
    depth_of: dict[str, int] = {}
    depths = []
    for node in nodes:
        depths.append(1 + max((depth_of.get(name, -1) for name in node.input), default=-1))
        depth_of |= dict.fromkeys(node.output, depths[-1])
    taken: dict[int, int] = {}
    found = []
    for depth in depths:
        beside = taken[depth] = taken.get(depth, -1) + 1
        found.append((beside - (depths.count(depth) - 1) / 2, depth))
    return found


def part_of(node: onnx.NodeProto, forward: set[str]) -> str:
    """The colour of a node: forward, backward or update."""
    if op(node) in ("AllFinite", "SGDUpdate"):
        return UPDATE
    return FORWARD if forward & set(node.output) else BACKWARD


def draw(name: str, model: onnx.ModelProto, path: Path) -> None:
    """Draws one graph: a box for each node, arrows for the values between them."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9})
    from matplotlib import pyplot

    nodes = list(model.graph.node)
    at = places(nodes)
    producer = {value: i for i, node in enumerate(nodes) for value in node.output}
    forward = before_loss(nodes)
    rows = max(depth for _, depth in at) + 1
    figure, axes = pyplot.subplots(figsize=(6.4, 0.5 * rows + 0.2))
    axes.set_xlim(-2.2, 2.2)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.axis("off")
    for i, node in enumerate(nodes):
        for value in node.input:
            if value in producer:
                start, end = at[producer[value]], at[i]
                bend = 0.0 if end[1] - start[1] == 1 else (0.25 if end[0] >= 0 else -0.25)
                axes.annotate(
                    "", (end[0], end[1] - 0.26), (start[0], start[1] + 0.26),
                    arrowprops={
                        "arrowstyle": "-|>", "color": "#8a8f98", "lw": 0.8, "shrinkA": 0,
                        "shrinkB": 0, "connectionstyle": f"arc3,rad={bend}",
                    },
                )  # fmt: skip
    for i, node in enumerate(nodes):
        x, y = at[i]
        box: Any = {"boxstyle": "round,pad=0.35", "fc": part_of(node, forward), "ec": "#5b6470"}
        shown = axes.text(x, y, op(node), ha="center", va="center", color="#1b1f24", bbox=box)
        shown.set_gid(f"node-{i}")
    figure.savefig(path, metadata={"Date": None}, facecolor="white", bbox_inches="tight")
    pyplot.close(figure)


def before_loss(nodes: list[onnx.NodeProto]) -> set[str]:
    """The values that the loss is computed from, the loss among them."""
    [loss] = [node.output[0] for node in nodes if op(node) == "ReduceMean"]
    wanted = {loss}
    for node in reversed(nodes):
        if wanted & set(node.output):
            wanted |= set(node.input)
    return wanted


def main() -> None:
    for name, model in compiled()[0].items():
        draw(name, model, HERE / f"stages-{name}.svg")


if __name__ == "__main__":
    main()
