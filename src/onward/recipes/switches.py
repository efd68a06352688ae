"""Command-line switches of other trainers: Hugging Face's language-modelling examples and the ONNX
Runtime training example for GPT-2. `RENAMED` maps those that Onward has under another name. Each of
the others is either accepted, with a note that it changes nothing, or refused, with what to do
instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onward.recipes.options import InputError
from onward.recipes.presets import PRESETS

RENAMED = {
    "model": "model_name_or_path",
    "eval_file": "validation_file",
    "train_data_file": "train_file",
    "eval_data_file": "validation_file",
    "evaluation_strategy": "eval_strategy",
    "max_source_length": "max_seq_length",
    "summary_column": "label_column",
    "num_beams": "generation_num_beams",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}


@dataclass(frozen=True)
class Switch:
    """A switch without an option of Onward's.

    told: the reason in the message. fix: what to do instead; "" where the switch changes nothing
    and is accepted. asks_nothing: values that are accepted even so. flag: it may stand without a
    value. off: what to do if a flag is given as false; "" where that is accepted.
    """

    told: str
    fix: str = ""
    asks_nothing: tuple[str, ...] = ()
    flag: bool = False
    off: str = ""


def _flag(told: str, fix: str = "", off: str = "") -> Switch:
    return Switch(told, fix, (), True, off)


_EVALUATED = "the model is evaluated at the end, and where --eval_strategy says"
_METRICS = Switch("progress goes to stderr and to metrics.jsonl")
_STARTED = Switch(
    "torchrun starts the processes and says their numbers",
    "torchrun --nproc-per-node=2 -m onward finetune ...",
    ("-1", "0", "1"),
)
_TEXT_FILES = Switch("training text comes from files", "give --train_file")

SWITCHES: dict[str, Switch] = {
    # accepted: they ask for what is done anyway, or what does not matter here
    "do_train": _flag("finetune always trains", off="onward verify compares without training"),
    "do_eval": _flag("finetune always evaluates at the end"),
    "overwrite_cache": _flag("tokens that are cached are found by the text itself"),
    "ort_trainer": _flag("Onward computes the step by default", off="--engine torch"),
    "should_continue": _flag(
        "a run goes on from the newest checkpoint in --output_dir", off="--overwrite_output_dir"
    ),
    "logging_first_step": _flag("the first line comes after --logging_steps updates"),
    "disable_tqdm": _flag("there is a bar on a terminal only"),
    "evaluate_during_training": _flag(_EVALUATED),
    "eval_all_checkpoints": _flag(_EVALUATED),
    "group_by_length": _flag("rows of padding are not computed"),
    "version_2_with_negative": _flag("a file with a question without an answer says so itself"),
    "pad_to_max_length": _flag("a batch is padded to its longest sample"),
    "dataloader_drop_last": _flag("blocks that fill no whole update are left out of an epoch"),
    "model_type": Switch("the model's own configuration says it"),
    "logging_strategy": _METRICS,
    "fp16_opt_level": Switch("it belongs to --fp16"),
    "preprocessing_num_workers": Switch("tokenising uses all cores"),
    "local_rank": _STARTED,
    "world_rank": _STARTED,
    "world_size": _STARTED,
    # refused: ignoring them would change the run
    "mlm": _flag("what is learnt is a task", "--task masked-lm"),
    "streaming": _flag(
        "a text is read and cut before the run; onward.data.ResumableDataLoader takes streams",
        "leave it out",
    ),
    "task_name": Switch("labelled examples come from files", "give --train_file"),
    "line_by_line": _flag("text is cut into blocks, not at line ends", "give --block_size"),
    "do_predict": _flag("finetune trains and evaluates only", "leave it out"),
    "deepspeed": Switch(
        "Onward exchanges gradients itself, and cuts state by ZeRO", "--zero 1", ("-1", "0", "1")
    ),
    "tpu_num_cores": Switch("training is on a CPU or a GPU", "leave it out", ("-1", "0", "1")),
    "dataset_name": _TEXT_FILES,
    "dataset_config_name": _TEXT_FILES,
    "cache_dir": Switch(
        "downloads go to the cache folder of the Hugging Face libraries (HF_HOME)", "set HF_HOME"
    ),
    "null_score_diff_threshold": Switch(
        "no answer is told where it scores above every span", "leave it out", ("0", "0.0")
    ),
    "label_smoothing_factor": Switch(
        "the loss is plain cross-entropy", "leave it out", ("0", "0.0")
    ),
}  # fmt: skip


class Foreign:
    """The foreign switches that a run is given, and notes about them. taken: their names.

    switches, renamed: those that are understood; by default all.
    """

    def __init__(
        self,
        switches: Mapping[str, Switch] = SWITCHES,
        renamed: Mapping[str, str] = RENAMED,
    ) -> None:
        self.renamed = renamed
        self.notes: list[str] = []
        self.taken: set[str] = set()
        self._switches = switches
        self._config_name: str | None = None

    def takes(self, name: str) -> bool:
        """Whether a name is a foreign switch's."""
        return name in self._switches or (name == "config_name" and bool(self._switches))

    def may_stand_alone(self, name: str) -> bool:
        """Whether the switch of this name needs no value."""
        return name in self._switches and self._switches[name].flag

    def take(self, spelled: str, name: str, value: str, where: str = "on the command line") -> None:
        """Accepts a switch with a note, or raises InputError with what to do instead. where: it
        stands."""
        self.taken.add(name)
        if name == "config_name":
            self._config_name = value
            return
        switch = self._switches[name]
        off = switch.flag and value.lower() in ("false", "0", "no")
        if off and switch.off:
            raise InputError(f"--{spelled} {value}: {switch.told}", where, switch.off)
        if switch.fix and not off and value not in switch.asks_nothing:
            raise InputError(f"--{spelled} is not supported: {switch.told}", where, switch.fix)
        self.notes.append(f"--{spelled} changes nothing: {switch.told}")

    def settle(self, given: dict[str, str]) -> None:
        """Resolves the switch config_name, which must be the model's own name or a preset. Raises
        InputError otherwise."""
        name = self._config_name
        if name is None:
            return
        model = given.setdefault("model_name_or_path", name) if name in PRESETS else (
            given.get("model_name_or_path")
        )  # fmt: skip
        if model != name:
            raise InputError(
                f"config_name is {name!r}",
                "in --config_name",
                f"for random start weights give --model {', '.join(PRESETS)}, else leave it out",
            )
        self.notes.append(f"--config_name means --model_name_or_path {name}")
