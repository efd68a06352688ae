"""`onward export`: a run's or a folder's model as ONNX for stock onnxruntime, or its training
step."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import onward
from onward.checkpoint import StagedFiles
from onward.errors import OnwardError, one_line
from onward.recipes.example_models import Batch, described, example_batch, task_of
from onward.recipes.export_options import ExportConfig, check_export, data_of
from onward.recipes.found_model import FoundModel, find_model, load_model
from onward.recipes.options import FinetuneConfig, InputError

_WHERE = "as MODEL_OR_RUN"


def export(name: str, out: str, config: ExportConfig) -> int:
    """Writes the export and says what it is; returns the exit status. Raises OnwardError for what
    cannot be exported; nothing is written or replaced then."""
    path = check_export(config, out)
    found = find_model(name, _WHERE)
    model, batch = _loaded(found)
    if config.attention_mask:
        batch["attention_mask"] = _mask(batch)
    model.config.use_cache = False
    trainer = _trainer(model, found)
    if config.training:
        trainer.export_training(path, batch, config.opset, config.overwrite)
        print(_said(config, path, sorted(path.glob("*.onnx"))))
        return 0
    _write(trainer, path, batch, config)
    print(_said(config, path, [path]))
    return 0


def _loaded(found: FoundModel) -> tuple[Any, Batch]:
    """The model, of the class that its configuration names, with an example batch."""
    if not Path(found.weights).is_dir():
        model: Any = load_model(found)
        return model, example_batch(type(model), model.config)
    kind, config = described(found.weights)
    model = load_model(found) if task_of(kind) == "causal" else _of_class(kind, config, found)
    return model, example_batch(kind, model.config)


def _of_class(kind: Any, config: Any, found: FoundModel) -> Any:
    """A model other than a causal one from its folder, whose files were looked at. Raises
    InputError where a weight is missing."""
    try:
        model, info = kind.from_pretrained(
            found.weights, config=config, dtype=torch.float32, output_loading_info=True,
            use_safetensors=True, weights_only=True, trust_remote_code=False,
            local_files_only=True,
        )  # fmt: skip
    except Exception as error:  # any, for values that a configuration class does not expect
        raise InputError(
            f"cannot load the weights of {found.weights!r} ({one_line(str(error), 160)})",
            found.where,
            "name a folder with config.json and model.safetensors, as save_pretrained writes it",
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{found.weights!r} lacks {len(missing)} weights of {kind.__name__}: {missing[0]}",
            found.where,
            "name a folder whose config.json belongs to its weights",
        )
    return model.eval()


def _mask(batch: Batch) -> torch.Tensor:
    """An attention mask of the example, in which a row has padding: none of its numbers is taken
    for granted then. Raises InputError for a model without tokens."""
    if "input_ids" not in batch:
        raise InputError("the model takes no tokens", "in --attention_mask", "leave it out")
    mask = torch.ones_like(batch["input_ids"])
    mask[0, mask.shape[1] // 2 :] = 0
    return mask


def _trainer(model: Any, found: FoundModel) -> onward.Trainer:
    """A Trainer of the model, with the optimizer and the windows of its run, if it is of one."""
    from onward.recipes.optimizers import optimizer_of

    run = FinetuneConfig(learning_rate=5e-5) if found.record is None else found.run_options()
    options = onward.TrainerOptions(
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        max_grad_norm=run.max_grad_norm or None,
    )
    return onward.Trainer(model, optimizer_of(model, run), options=options)


def _write(trainer: onward.Trainer, path: Path, batch: Batch, config: ExportConfig) -> None:
    """Writes the file, and the one with large weights beside it, whole or not at all."""
    made = not path.parent.is_dir()
    try:
        path.parent.mkdir(exist_ok=True)
        with StagedFiles(path.parent) as staged:
            trainer.export_onnx(staged.path / path.name, batch, config.dtype, config.opset)
            has_data = data_of(staged.path / path.name).exists()
            staged.publish()
        if not has_data:  # of the export that was replaced
            data_of(path).unlink(missing_ok=True)
    except OSError as error:
        raise OnwardError(f"cannot write {str(path)!r} ({error}); fix: name another") from error
    finally:
        if made:
            with suppress(OSError):  # it holds the file
                path.parent.rmdir()


def _said(config: ExportConfig, path: Path, files: list[Path]) -> str:
    """What was written, in words or as JSON."""
    import onnx

    graphs: dict[str, Any] = {}
    for file in files:
        graph = onnx.load(str(file), load_external_data=False).graph
        weights = {each.name for each in graph.initializer}
        graphs[file.name] = {
            "inputs": {i.name: _shape(i) for i in graph.input if i.name not in weights},
            "outputs": {o.name: _shape(o) for o in graph.output},
        }
    if config.json:
        facts = {"path": str(path), "dtype": config.dtype, "opset": config.opset, "graphs": graphs}
        return json.dumps(facts, indent=1)
    lines = [f"{path}: opset {config.opset}, {config.dtype}"]
    for name, sides in () if config.training else graphs.items():
        for side, values in sides.items():
            shown = [f"{n}[{', '.join(map(str, dims))}]" for n, dims in values.items()]
            more = f", and {len(shown) - 8} more" if len(shown) > 8 else ""
            lines.append(f"  {name} {side}: {', '.join(shown[:8])}{more}")
    if config.training:
        lines.append(f"  {', '.join(graphs)}")
        lines.append(f"{path / 'run.py'} goes on training with onnxruntime and numpy alone")
    return "\n".join(lines)


def _shape(value: Any) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


__all__ = ["export"]
