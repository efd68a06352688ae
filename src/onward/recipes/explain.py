"""`onward explain`: explains the step of a model given by name, by a function or by a script."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import onward
from onward.errors import EagerWarning, OnwardError
from onward.explanation import StepExplanation, refused
from onward.explanation.page import page
from onward.mesh_sizes import AUTO
from onward.meshes import MeshChoice
from onward.module import accelerated
from onward.recipes.explain_options import (
    OF_A_BATCH,
    OF_A_FILE,
    OF_A_LOOP,
    ExplainConfig,
    check_explain,
    refuse_options,
)
from onward.recipes.options import InputError
from onward.training_session import TrainingSession

_WHERE = "as MODEL_OR_SCRIPT"


def explain(target: str, config: ExplainConfig, arguments: Sequence[str] = ()) -> int:
    """Explains a step, prints and writes the result. Returns 1 where the step runs in eager
    PyTorch. arguments: of a script.

    Raises InputError for invalid input; nothing is written then.
    """
    check_explain(config)
    if config.mesh is not None:
        choice = mesh_choice(target, config, arguments)
        print(json.dumps(choice.as_dict(), indent=2, allow_nan=False) if config.json else choice)
        return 0
    found = explanation(target, config, arguments)
    if config.html is not None:
        _write_new(Path(config.html), page(found))
    print(json.dumps(found.as_dict(), indent=2, allow_nan=False) if config.json else found)
    return 0 if found.captured else 1


def mesh_choice(target: str, config: ExplainConfig, arguments: Sequence[str] = ()) -> MeshChoice:
    """Predicts the meshes of the step that `target` names. Raises InputError for invalid input, and
    OnwardError for a step that ranks cannot share."""
    from onward.recipes.simulate import cluster_of

    place = None if config.cluster is None else cluster_of(config.cluster)
    if is_script(target):
        raise InputError(
            "--mesh does not go with a script", _WHERE,
            "name a function that returns a model and a batch: module.py:function",
        )  # fmt: skip
    if target.endswith(".onnx"):
        raise InputError("--mesh does not go with an ONNX model", _WHERE, "leave --mesh out")
    model, args, kwargs = _model_and_batch(target, config, arguments)
    if isinstance(model, onward.Trainer):
        refuse_options(config, (*OF_A_LOOP, "zero"), "the Trainer")
        trainer = model
    else:
        chosen = _of_loop(config)
        chosen |= {} if not config.zero else {"zero": config.zero, "mesh": AUTO}
        options = onward.TrainerOptions(**chosen)
        trainer = onward.Trainer(model, _example_optimizer(model), options=options)
    asked: dict[str, Any] = {"mesh": config.mesh, "ranks": config.ranks, "cluster": place}
    return trainer.explain_mesh(*args, **asked, **kwargs)


def explanation(
    target: str, config: ExplainConfig, arguments: Sequence[str] = ()
) -> StepExplanation:
    """Makes the explanation of what `target` names."""
    options = {
        "memory": config.memory, "batch_sizes": config.sizes, "profile": config.profile,
        "gpu": config.gpu,
    }  # fmt: skip
    if is_script(target):
        from onward.recipes.first_step import first_step

        refuse_options(config, (*OF_A_BATCH, *OF_A_LOOP), "the script")
        _refuse_options_of_a_file(config)
        found = first_step(Path(target), arguments)
        if found.reason is not None:
            return refused(found.owner, "module", found.reason)
        return onward.explain(found.owner, **options)
    if target.endswith(".onnx"):
        session, batch = _session_and_batch(target, config, arguments)
        return session.explain(batch, **options)
    model, args, kwargs = _model_and_batch(target, config, arguments)
    return _of_model(model, args, kwargs, config, options)


def is_script(target: str) -> bool:
    return target.endswith(".py") and ":" not in Path(target).name


def _model_and_batch(
    target: str, config: ExplainConfig, arguments: Sequence[str]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model or Trainer by a function or a name, and the arguments for its call."""
    _refuse_arguments(arguments)
    _refuse_options_of_a_file(config)
    if ":" in target:
        refuse_options(config, OF_A_BATCH, "the function")
        return made_by_function(target)
    from onward.recipes.example_models import example

    model, kwargs = example(target, config.batch_size, config.sequence_length)
    return model, (), kwargs


def _session_and_batch(
    target: str, config: ExplainConfig, arguments: Sequence[str]
) -> tuple[TrainingSession, dict[str, Any]]:
    """The session of an ONNX model, and a batch: of a file, or an example."""
    from onward.recipes.onnx_subject import example_batch, first_rows, session_of

    _refuse_arguments(arguments)
    refuse_options(config, ("outputs",), "an ONNX model")
    if config.loop == "module":
        raise InputError("an ONNX model has no loop of your own", "in --loop", "leave it out")
    if config.loss is None:
        raise InputError(
            "an ONNX model has no loss", "in --loss", "such as --loss cross_entropy:logits"
        )
    session = session_of(target, config.loss, _of_loop(config))
    rows = config.batch_size or 4
    if config.data is None:
        return session, example_batch(session, rows, config.sequence_length or 128)
    from onward.recipes.array_files import read_arrays

    refuse_options(config, ("sequence_length",), "the file")
    data = read_arrays(Path(config.data), "data")
    return session, first_rows(session, data, rows)


def _refuse_options_of_a_file(config: ExplainConfig) -> None:
    for name in OF_A_FILE:
        if getattr(config, name) is not None:
            raise InputError(
                f"--{name} is only for ONNX models",
                f"in --{name}",
                f"leave it out, or name a .onnx {_WHERE}",
            )


def _refuse_arguments(arguments: Sequence[str]) -> None:
    if arguments:
        raise InputError(
            "arguments after --",
            "on the command line",
            "give them only where the first word is a script",
        )


def _of_loop(config: ExplainConfig) -> dict[str, Any]:
    """The options of the loop that are given."""
    names = ("memory_budget", "disable", "mixed_precision")
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def _example_optimizer(model: Any) -> torch.optim.Optimizer:
    """An AdamW of the parameters that are trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained or [torch.nn.Parameter(torch.zeros(1))])


def _of_model(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: ExplainConfig,
    options: dict[str, Any],
) -> StepExplanation:
    """Explains the step of a loop around the model, unless the model is a Trainer or accelerated
    already."""
    own: type = type(model)
    if issubclass(own, (onward.Trainer, onward.Module)) or accelerated(model) is not None:
        refuse_options(config, OF_A_LOOP, "what the function gives")
        return onward.explain(model, args, kwargs, **options)
    chosen, optimizer = _of_loop(config), _example_optimizer(model)
    with warnings.catch_warnings():
        # the explanation says which parts run in eager PyTorch
        warnings.simplefilter("ignore", EagerWarning)
        if config.loop == "module":
            onward.accelerate(model, outputs=config.outputs or "auto", **chosen)
            return onward.explain(model, args, kwargs, optimizer=optimizer, **options)
        trainer = onward.Trainer(model, optimizer, options=onward.TrainerOptions(**chosen))
        return onward.explain(trainer, args, kwargs, **options)


# ---- the user's functions


def made_by_function(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Calls `module.py:function`; returns the model or Trainer, and the arguments for its call.
    Raises InputError where it returns anything else."""
    from onward.recipes.first_step import failed

    place, _, name = target.rpartition(":")
    file = Path(place).name if place.endswith(".py") else f"{place.rpartition('.')[2]}.py"
    with _importing(place), contextlib.redirect_stdout(sys.stderr):
        try:
            function = _function(place, name)
            given = function()
        except OnwardError:
            raise
        except Exception as error:
            raise failed(error, file) from error
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise InputError(
            f"{name} returns a {type(given).__name__}",
            _WHERE,
            "return model, batch or model, args, kwargs",
        )
    model, args, *more = given
    kwargs = more[0] if more else {}
    if not isinstance(model, (torch.nn.Module, onward.Trainer)):
        raise InputError(
            f"{name} returns a {type(model).__name__} as the model", _WHERE,
            "return a torch.nn.Module, or an onward.Trainer",
        )  # fmt: skip
    if isinstance(args, Mapping) and not more:
        args, kwargs = (), args
    if not isinstance(args, (tuple, list)):
        args = (args,)
    return model, tuple(args), dict(kwargs)


def _function(place: str, name: str) -> Callable[[], Any]:
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise InputError(f"no such file {place!r}", _WHERE, "name one")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None, "a Python file has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise InputError(f"no module {place!r}", _WHERE, "name one, or a file") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"no function {name!r} in {place}", _WHERE, "name one that is there")
    return found


@contextlib.contextmanager
def _importing(place: str) -> Iterator[None]:
    """A context in which imports work as for a program in that folder, or one started here."""
    before = list(sys.path)
    folder = Path(place).absolute().parent if place.endswith(".py") else Path.cwd()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


# ---- the page


def _write_new(path: Path, content: str) -> None:
    """Writes a file that appears whole or not at all. Raises OnwardError if it exists by then."""
    try:
        handle, partial = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
            Path(partial).chmod(0o644)
            # fails if the name was taken meanwhile: nothing is overwritten
            path.hardlink_to(partial)
        finally:
            Path(partial).unlink()
    except OSError as error:
        raise OnwardError(
            f"cannot write {str(path)!r} ({error}); fix: name another --html"
        ) from error


__all__ = ["explain", "explanation", "is_script", "made_by_function"]
