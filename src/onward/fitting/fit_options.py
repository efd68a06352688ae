"""FitOptions: how long a loop trains, and when it logs, evaluates and saves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from onward.errors import OnwardError, refused
from onward.memory_amounts import whole_number
from onward.option_fields import documented, option, options_of, read_options
from onward.option_readers import read_count, read_limit, read_one_of, read_switch


def _epochs(name: str, value: object) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else 0.0
    if not 0 < number < float("inf"):
        raise refused(name, value, "a number above 0")
    return number


def _updates(name: str, value: object) -> int | None:
    if value is None or value == -1:  # transformers' word for none
        return None
    return read_count(name, value)


def _warmup(name: str, value: object) -> int:
    number = whole_number(value)
    if number is None or number < 0:
        raise refused(name, value, "a whole number, 0 or more")
    return number


def _path(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value):
        raise refused(name, value, "a path, or None")
    return str(value)


def _resume(name: str, value: object) -> str | bool:
    return bool(value) if value is None or isinstance(value, bool) else _path(name, value) or False


def _name(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise refused(name, value, "a name, or None")
    return value


def _direction(name: str, value: object) -> bool | None:
    return None if value is None else read_switch(name, value)


@documented
@dataclass(frozen=True)
class FitOptions:
    """Options of `onward.fit`, by the names of transformers' TrainingArguments; callbacks get them
    as `args`. Raises OnwardError for an invalid value."""

    num_train_epochs: float = option(3.0, _epochs, "is the number of passes over the data", "3")
    max_steps: int | None = option(
        None, _updates, "trains for so many updates, whatever `num_train_epochs` says", "1000"
    )
    lr_scheduler_type: str | None = option(
        None,
        _name,
        "makes a schedule of transformers for the optimizer; None: its learning rate stays, "
        "unless a scheduler is given",
        '"cosine"',
    )
    warmup_steps: int = option(
        0, _warmup, "is the number of updates over which that schedule rises from 0", "100"
    )
    logging_strategy: str = option(
        "steps",
        read_one_of("no", "steps", "epoch"),
        "logs after every `logging_steps` updates, after each epoch, or never",
        '"epoch"',
    )
    logging_steps: int = option(500, read_count, "is the number of updates between logs", "50")
    logging_first_step: bool = option(False, read_switch, "logs the first update too", "True")
    logging_nan_inf_filter: bool = option(
        True,
        read_switch,
        "leaves infinite and NaN losses out of the logged mean, as transformers does, which counts "
        "the mean of the losses before in their place; false: the mean has them",
        "False",
    )
    eval_strategy: str = option(
        "no",
        read_one_of("no", "steps", "epoch"),
        "evaluates after every `eval_steps` updates, after each epoch, or never",
        '"epoch"',
    )
    eval_steps: int | None = option(
        None,
        _updates,
        "is the number of updates between evaluations; None: as `logging_steps`",
        "100",
    )
    eval_delay: int = option(0, _warmup, "is the number of updates before evaluations begin", "100")
    save_strategy: str = option(
        "no",
        read_one_of("no", "steps", "epoch", "best"),
        "saves a checkpoint into `output_dir` after every `save_steps` updates, after each epoch, "
        "after an evaluation that is the best so far, or never",
        '"epoch"',
    )
    save_steps: int = option(500, read_count, "is the number of updates between checkpoints", "100")
    save_total_limit: int | None = option(
        None, read_limit, "keeps so many checkpoints; the best one is kept besides", "2"
    )
    output_dir: str | None = option(None, _path, "is the folder of the checkpoints", '"runs/a"')
    resume_from_checkpoint: str | bool = option(
        False,
        _resume,
        "goes on from the newest checkpoint in `output_dir` (True), or from the named one",
        "True",
    )
    load_best_model_at_end: bool = option(
        False,
        read_switch,
        "saves the model of each evaluation that is the best so far, and loads the best weights "
        "at the end",
        "True",
    )
    metric_for_best_model: str | None = option(
        None,
        _name,
        "says which metric of the evaluation is compared; None: the loss",
        '"accuracy"',
    )
    greater_is_better: bool | None = option(
        None,
        _direction,
        "says whether a larger metric is better; None: yes, unless its name ends in loss",
        "True",
    )

    def __post_init__(self) -> None:
        read_options(self)
        name = self.metric_for_best_model or "loss"
        better = self.greater_is_better
        changed = {
            "metric_for_best_model": name,
            "greater_is_better": not name.endswith("loss") if better is None else better,
            "eval_steps": self.eval_steps or self.logging_steps,
        }
        for key, value in changed.items():
            object.__setattr__(self, key, value)
        self._check()

    def _check(self) -> None:
        for asked, name in (
            (self.save_strategy != "no", f"save_strategy={self.save_strategy!r}"),
            (self.load_best_model_at_end, "load_best_model_at_end=True"),
            (self.resume_from_checkpoint is True, "resume_from_checkpoint=True"),
        ):
            if asked and self.output_dir is None:
                raise OnwardError(f"{name} needs a folder of checkpoints; fix: give output_dir")
        for asked, name in (
            (self.save_strategy == "best", 'save_strategy="best"'),
            (self.load_best_model_at_end, "load_best_model_at_end=True"),
        ):
            if asked and self.eval_strategy == "no":
                raise OnwardError(
                    f'{name} compares evaluations; fix: eval_strategy="epoch" or "steps"'
                )
        if self.warmup_steps and self.lr_scheduler_type is None:
            raise OnwardError(
                f"warmup_steps={self.warmup_steps} has no effect without lr_scheduler_type; fix: "
                'add lr_scheduler_type="linear", or pass fit a scheduler that warms up by itself'
            )

    @classmethod
    def of(cls, options: FitOptions | Mapping[str, Any] | None) -> FitOptions:
        """Converts options given as FitOptions, a mapping, or None (the defaults)."""
        return options_of(cls, options)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options by name, for callbacks that record them."""
        return dataclasses.asdict(self)

    def to_json_string(self) -> str:
        """Returns the options as JSON, for callbacks that record them."""
        return json.dumps(self.to_dict(), indent=2)


__all__ = ["FitOptions"]
