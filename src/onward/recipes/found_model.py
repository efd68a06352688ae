"""A model by the folder of a run, of a checkpoint or of a model, or by a hub name: where its
weights and its tokenizer are, and what it was trained from."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.checkpoint import checkpoints, is_checkpoint
from onward.recipes.options import FinetuneConfig, InputError, is_run
from onward.recipes.run_folder import RESULTS, options_of, read_record
from onward.recipes.start_model import (
    build_model,
    check_model_name,
    from_scratch,
    load_model_config,
    load_tokenizer,
    require_hf,
    set_dropout,
)
from onward.recipes.weights_digest import weights_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class FoundModel:
    """Where a model is. weights: the folder or hub name that it is loaded from. where: the place of
    its name, for messages. run: the folder of its run, and record: that run's `run_config.json`;
    None for a model that is of no run."""

    weights: str
    where: str
    run: Path | None = None
    record: Mapping[str, Any] | None = None

    @property
    def config(self) -> FinetuneConfig:
        """The options that load the model."""
        return FinetuneConfig(model_name_or_path=self.weights)

    def run_options(self) -> FinetuneConfig:
        """The options of the model's run. Raises InputError where it is of none."""
        if self.record is None:
            raise InputError(
                f"{self.weights!r} is not from a run of onward finetune",
                self.where,
                "name the folder of a run",
            )
        return options_of(self.record)


def find_model(name: str, where: str) -> FoundModel:
    """Finds a model by its name: of a run that is not complete, the newest checkpoint. Raises
    InputError for a run without any, and for names of nothing."""
    path = Path(name)
    if path.is_dir() and is_run(path):
        record = read_record(path)
        if (path / RESULTS).is_file() or (path / "model.safetensors").is_file():
            return FoundModel(name, where, path, record)
        found = checkpoints(path)
        if not found:
            raise InputError(
                f"the run in {name!r} has neither a model nor a checkpoint",
                where,
                "let it train until one is written",
            )
        print(f"note: the run is not complete; {found[0].path} is taken", file=sys.stderr)
        return FoundModel(str(found[0].path), where, path, record)
    holder = path.absolute().parent
    if path.is_dir() and is_checkpoint(path) and is_run(holder):
        return FoundModel(name, where, holder, read_record(holder))
    _check_name(FoundModel(name, where))
    return FoundModel(name, where)


def _check_name(found: FoundModel) -> None:
    try:
        check_model_name(found.config)
    except InputError as error:
        raise _here(error, found) from error


def _here(error: InputError, found: FoundModel) -> InputError:
    """An error about the option of a model's name, as one about the word that names it here."""
    what, option, fix = str(error).rpartition(", in --model_name_or_path; fix: ")
    return InputError(what, found.where, fix) if option else error


def load_model(found: FoundModel) -> PreTrainedModel:
    """Loads a causal language model in fp32, in evaluation mode. Raises InputError where that
    cannot be."""
    require_hf()
    try:
        config = found.config
        return build_model(config, load_model_config(config)).eval()
    except InputError as error:
        raise _here(error, found) from error


def load_start_model(found: FoundModel, trained: PreTrainedModel) -> PreTrainedModel:
    """Builds the model that a run started from: loaded again, or drawn by the run's seed. trained:
    what became of it. Raises InputError where these are other weights than the run began with, as
    far as it has written that down."""
    options = found.run_options()
    if from_scratch(options):
        config = trained.config
    else:
        config = load_model_config(options)
        if options.dropout is not None:
            set_dropout(config, options.dropout)
    model = build_model(options, config).eval()
    began = _began_with(found)
    if began is not None and began != weights_sha256(model):
        raise InputError(
            f"the run in {str(found.run)!r} began with other weights than these",
            found.where,
            "leave --compare out; the run's start model, or a library's version, has changed",
        )
    return model


def _began_with(found: FoundModel) -> str | None:
    """The sha256 of the weights that a complete run began with; None where it is not known."""
    try:
        results = json.loads((found.run or Path()).joinpath(RESULTS).read_bytes())
    except (OSError, ValueError):
        return None
    return results.get("start_weights_sha256") if isinstance(results, dict) else None


def load_model_tokenizer(found: FoundModel) -> PreTrainedTokenizerBase:
    """Loads the tokenizer beside the weights; that of a checkpoint is beside its run's model, else
    where the run had it from; the run trains it again from its text where there is none yet.
    Raises InputError where it is nowhere."""
    require_hf()
    places = [Path(found.weights), *([found.run] if found.run else [])]
    for place in places:
        if (place / "tokenizer_config.json").is_file():
            loaded = load_tokenizer(FinetuneConfig(model_name_or_path=str(place)))
            assert loaded is not None, "the name is no preset's"
            return loaded
    config = found.config if found.record is None else found.run_options()
    try:
        loaded = load_tokenizer(config)
    except InputError as error:
        raise _here(error, found) from error
    if loaded is not None:
        return loaded
    from onward.recipes.describe import describe

    print("note: the tokenizer is trained again from the run's text", file=sys.stderr)
    return describe(dataclasses.replace(config, output_dir=None)).tokenizer


__all__ = ["FoundModel", "find_model", "load_model", "load_model_tokenizer", "load_start_model"]
