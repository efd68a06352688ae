"""Exports the training step itself: ONNX files, state, a description and a runner, in one folder.

    train.onnx         loss, and the next state from this one: the whole step
    accumulate.onnx    a micro-batch that only adds to the window's gradients, where there are any
    eval.onnx          loss and outputs in evaluation mode
    state.safetensors  weights, optimizer state, counters: what goes in and comes out
    training.json      names of inputs and outputs, and which output becomes which input
    run.py             all of this from Python, with numpy and onnxruntime alone

The files hold ops of the ONNX standard, and functions made of them (`graph/file.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from onward.capture import CapturedModule, CaptureRequest, LossFunction
from onward.checkpoint.disk import StagedFolder
from onward.checkpoint.tensor_file import tensor_chunks
from onward.compile import Compiler
from onward.differentiate import Recipe
from onward.errors import OnwardError
from onward.graph.file import save
from onward.graph.graph import Graph, Role, Value, role_of, type_of
from onward.graph.names import user_name
from onward.graph.signature import Signature
from onward.kernels import host, torch_dtype
from onward.model_state.device import computing_device
from onward.options import TrainerOptions
from onward.prepare.batch import Batch, batch_of
from onward.train.closed_graph import (
    WINDOW,
    ClosedGraph,
    closed_evaluation,
    closed_micro_step,
    closed_step,
)
from onward.train.export import called, refuse_regions, without_ones
from onward.train.precision import policy_of
from onward.train.size_limits import limits
from onward.train.torch_optimizer import TorchOptimizer
from onward.train.training_mode import training_mode
from onward.train.window import AccumulationWindow

DESCRIPTION, STATE, RUNNER = "training.json", "state.safetensors", "run.py"
FORMAT = 1  # of the description; grows when a runner of an earlier one would be wrong


@dataclass(frozen=True)
class TrainingSource:
    """What an export of the training step is made from: a Trainer's parts, and an example batch.

    recipe: gives the update of a captured call (`PreparedSteps.recipe`).
    """

    model: torch.nn.Module
    loss_fn: LossFunction | None
    batch: Batch
    options: TrainerOptions
    optimizer: TorchOptimizer
    window: AccumulationWindow
    recipe: Callable[[CapturedModule], Recipe]


def export_training(source: TrainingSource, folder: Path, opset: int, overwrite: bool) -> Path:
    """Writes the folder of this module's docstring. opset: one of `graph.opset.OPSETS`. overwrite:
    whether to replace an earlier export.

    Raises OnwardError where the folder is in the way, or the step cannot be exported; nothing is
    changed on the disk then.
    """
    _refuse_place(folder, overwrite)
    size = source.options.gradient_accumulation_steps
    if not source.window.is_first:
        raise OnwardError(
            "export_training within an accumulation window; fix: export after a step that updates"
        )
    if size > 1 and source.options.gradient_accumulation_average != "micro_batches":
        raise OnwardError(
            "export_training has no windows whose loss is a mean over their labels; fix: a Trainer "
            'with gradient_accumulation_average="micro_batches"'
        )
    policy = policy_of(source.options, host(computing_device(source.model)))
    if policy is not None:
        raise OnwardError(
            f"a step in {policy.low.name.lower()} cannot be exported, since onnxruntime has no CPU "
            'kernels for it; fix: a Trainer with mixed_precision="no"'
        )
    batch = _without_ones(source)
    compiler = Compiler(host(computing_device(source.model)), source.options.disable)
    captured = _captured(compiler, source, batch, training=True)
    recipe = source.recipe(captured)
    if not recipe.groups:
        raise OnwardError(
            "export_training finds nothing to train: the loss depends on no parameter that "
            "requires grad and is in the optimizer; fix: requires_grad_(True) on those to train"
        )
    step = compiler.portable_step(captured, recipe)
    evaluated = compiler.evaluation(captured) or _captured(compiler, source, batch, training=False)
    graphs = {"train": closed_step(step, size)}
    if size > 1:
        graphs["accumulate"] = closed_micro_step(step, size, _counted(captured, batch))
    graphs["eval"] = closed_evaluation(compiler.portable(evaluated))
    for closed in graphs.values():
        _refuse_low(closed.graph)
    owned = {**captured.owned, **evaluated.owned}
    state = _state(source, recipe, step.signature, graphs, owned)
    said = _description(source, step, graphs, opset)
    said["conditions"] = limits(
        [*captured.size_conditions, *evaluated.size_conditions], [captured.graph, evaluated.graph]
    )
    said["presumes"] = list(dict.fromkeys([*captured.presumes, *evaluated.presumes]))
    with StagedFolder(folder) as staged:
        for name, closed in graphs.items():
            save(closed.graph, staged.path / f"{name}.onnx", opset=opset)
        with (staged.path / STATE).open("wb") as file:
            for chunk in tensor_chunks(state):
                file.write(chunk)
        text = json.dumps(said, indent=1) + "\n"
        (staged.path / DESCRIPTION).write_text(text, encoding="ascii", newline="\n")
        runner = resources.files("onward.train").joinpath("portable_runner.py")
        (staged.path / RUNNER).write_bytes(runner.read_bytes())
        staged.publish()
    return folder


# ---- the graphs


def _without_ones(source: TrainingSource) -> Batch:
    """The example batch with sizes of 2 for those of 1 that may vary."""

    def run(given: Any) -> None:
        args, kwargs, target = given
        outputs = called(source.model, args, kwargs, want_loss=True)
        if source.loss_fn is not None:
            source.loss_fn(outputs, *target)

    with training_mode(source.model, training=False):
        return batch_of(*without_ones(run, source.batch.given))


def _captured(
    compiler: Compiler, source: TrainingSource, batch: Batch, training: bool
) -> CapturedModule:
    """Captures the call for batches of any numbers. Raises OnwardError where there is no such
    graph, and for parts that run in PyTorch."""
    with training_mode(source.model, training):
        captured = compiler.capture(
            CaptureRequest(source.model, *batch.given, source.loss_fn, presumes=False, regions=True)
        )
    refuse_regions(captured)
    if captured.branches:
        raise OnwardError(
            "the model cannot be exported, since its forward branches on the numbers of a batch "
            f"({captured.branches} times), which a file cannot follow; fix: compute both sides and "
            "choose with torch.where"
        )
    return captured


def _counted(captured: CapturedModule, batch: Batch) -> str | None:
    """The graph input whose dim 0 is `Batch.batch_size`; None where no tensor has dims."""
    first = next((i for i, t in enumerate(batch.tensors) if t.dim()), None)
    return None if first is None else captured.leaves[first]


def _refuse_low(graph: Graph) -> None:
    """Raises OnwardError for 16-bit floats, which onnxruntime has few CPU kernels for, and numpy no
    type for bf16."""
    values = [*graph.inputs, *(y for node in graph for y in node.outputs)]
    low = next((v for v in values if type_of(v).is_low), None)
    if low is not None:
        raise OnwardError(
            f"{low.name} is {type_of(low).dtype.name.lower()}, which cannot be exported, since "
            "onnxruntime has no CPU kernels for it; fix: parameters, batch and optimizer state in "
            "float32"
        )


# ---- state and description


def _state(
    source: TrainingSource,
    recipe: Recipe,
    signature: Signature,
    graphs: Mapping[str, ClosedGraph],
    owned: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Every tensor that the graphs read besides batch, rates and seed, by input. signature: of the
    step."""
    updates = source.optimizer.updates
    made: dict[str, torch.Tensor] = dict(owned)
    for slot, name in signature.slots.items():
        parameter = owned[slot.parameter]
        held = updates.state.tensors.get(parameter, {})
        fresh = slot.name not in held
        made[name] = updates.state.fresh(parameter, slot.name) if fresh else held[slot.name]
    for group in recipe.groups:
        count = updates.counts.get(owned[group.parameters[0]], 0)
        made[signature.clocks[group.clock]] = torch.tensor(count + 1)
    made[WINDOW] = torch.tensor(source.window.number(updates.done))
    inputs = {value.name or "": value for g in graphs.values() for value in g.graph.inputs}
    others = {signature.seed, *signature.hyperparameters.values()}
    others |= {v.name for v in inputs.values() if role_of(v) is Role.BATCH}
    return {
        name: made[name].detach() if name in made else _zeros(value)
        for name, value in sorted(inputs.items())
        if name not in others
    }


def _zeros(value: Value) -> torch.Tensor:
    """State that no step has made yet, and what an update has cleared."""
    kind = type_of(value)
    shape = [size for size in kind.shape if isinstance(size, int)]
    assert len(shape) == kind.rank, f"{value.name} is state, which has no size of a batch"
    return torch.zeros(shape, dtype=torch_dtype(kind.dtype), device="cpu")


def _description(
    source: TrainingSource, step: Graph, graphs: Mapping[str, ClosedGraph], opset: int
) -> dict[str, Any]:
    """The content of `training.json`, but for conditions on sizes."""
    signature, key = step.signature, source.window.seed_key()
    given = source.optimizer.hyperparameters(signature)
    return {
        "format": FORMAT,
        "opset": opset,
        "state": STATE,
        "micro_batches": source.options.gradient_accumulation_steps,
        "rates": {name: float(given[name]) for name in sorted(given)},
        "lr": [name for h, name in signature.hyperparameters.items() if h.name == "lr"],
        "seed": {"input": signature.seed, "key": key[0], "as_trainer": key[1]},
        "graphs": {name: _described(name, closed) for name, closed in graphs.items()},
    }


def _described(name: str, closed: ClosedGraph) -> dict[str, Any]:
    signature = closed.graph.signature
    return {
        "file": f"{name}.onnx",
        "batch": {
            user_name(value.name or ""): {
                "input": value.name,
                "dtype": type_of(value).dtype.numpy().name,
                "shape": [n if isinstance(n, int) else str(n) for n in type_of(value).shape],
            }
            for value in closed.graph.inputs_with(Role.BATCH)
        },
        "loss": signature.loss,
        "grad_norm": signature.grad_norm,
        "finite": signature.finite,
        "outputs": dict(signature.results),
        "state": closed.state,
    }


# ---- the disk


def _refuse_place(folder: Path, overwrite: bool) -> None:
    """Raises OnwardError where the folder cannot be made, or is there and may not be replaced."""
    if not folder.parent.is_dir():
        raise OnwardError(f"{folder.parent} is not a folder; fix: create it first")
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise OnwardError(f"{folder} is there already; fix: another folder, or overwrite=True")
    if folder.is_symlink() or not (folder / DESCRIPTION).is_file():
        raise OnwardError(
            f"{folder} is no export of a training step, so that it is not overwritten; fix: "
            "another folder"
        )


__all__ = ["TrainingSource", "export_training"]
