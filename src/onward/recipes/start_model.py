"""The model and its tokenizer: a preset, a local folder or a hub name; and checks against the
data."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.errors import MissingExtraError
from onward.recipes.lora import add_lora
from onward.recipes.model_folder import (
    INDEX,
    WEIGHTS,
    check_links,
    check_model_folder,
    check_requests,
    integer_tensors,
    shard_names,
)
from onward.recipes.model_size import check_block_size
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.presets import PRESETS, preset_config
from onward.recipes.tasks import TASKS, task_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Names of dropout probabilities in the configurations of model families.
DROPOUT_NAMES = (
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "hidden_dropout",
    "embed_dropout",
    "resid_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout_rate",
    "embedding_dropout",
    "mlp_dropout",
    "pooler_dropout",
    "classifier_dropout",
    "classifier_dropout_prob",
    "summary_first_dropout",
)


def require_hf() -> None:
    """Raises MissingExtraError unless the libraries of the `hf` extra are installed."""
    for package in ("transformers", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "hf")


def from_scratch(config: FinetuneConfig) -> bool:
    """Whether the start weights are random rather than loaded."""
    return config.model_name_or_path in PRESETS


def check_model_name(config: FinetuneConfig) -> None:
    """Raises InputError for a path that is not a model folder, for a folder that cannot or must not
    be loaded, and for a name that nearly is a preset's."""
    name = config.model_name_or_path
    where = "in --model_name_or_path"
    if from_scratch(config):
        return
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"model folder {name!r} has no config.json",
                where,
                "name a folder that save_pretrained wrote",
            )
        check_model_folder(path, where, config.allow_pickle)
    elif path.exists():
        raise InputError(f"{name!r} is a file", where, "name the model's folder")
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name:
        raise InputError(f"no such model folder {name!r}", where, "name an existing folder")
    elif close := get_close_matches(name, PRESETS, n=1, cutoff=0.85):
        raise InputError(f"no model {name!r}", where, f"did you mean {close[0]}?")


def load_model_config(config: FinetuneConfig) -> PreTrainedConfig:
    """Loads the model's configuration. Raises InputError unless transformers has a model for the
    task with it, and for one that asks for more than weights."""
    from transformers import AutoConfig

    name = config.model_name_or_path
    try:
        model_config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # any, for values that a configuration class does not expect
        raise InputError(
            f"cannot load the configuration of model {name!r} ({_first_line(error)})",
            "in --model_name_or_path",
            f"name a local folder, a hub name you can reach, or one of {', '.join(PRESETS)}",
        ) from error
    asked = ("_attn_implementation", "quantization_config", "transformers_weights")
    check_requests(
        {key: getattr(model_config, key, None) for key in asked},
        f"{name}/config.json",
        "in --model_name_or_path",
    )
    check_task(config, model_config)
    return model_config


def check_task(config: FinetuneConfig, model_config: PreTrainedConfig) -> None:
    """Raises InputError where transformers has no model for the task with a configuration."""
    task = task_of(config)
    if task.fits(model_config):
        return
    others = [other.name for other in TASKS.values() if other.fits(model_config)]
    hint = f", or give --task {' or '.join(others)}" if others else ""
    kind = "causal language model" if config.task == "causal-lm" else f"model for {config.task}"
    raise InputError(
        f"model {config.model_name_or_path!r} ({model_config.model_type}) is not a {kind}",
        "in --model_name_or_path",
        f"name a model that {task.auto_class} can load, such as {task.preset}{hint}",
    )


def load_tokenizer(config: FinetuneConfig) -> PreTrainedTokenizerBase | None:
    """Loads the named tokenizer, else the loaded model's; None where one is to be trained. Raises
    InputError where it cannot be loaded."""
    from transformers import AutoTokenizer

    if config.tokenizer_name is None and from_scratch(config):
        return None
    name = config.tokenizer_name or config.model_name_or_path
    where = "in --tokenizer_name" if config.tokenizer_name else "in --model_name_or_path"
    fix = "name a tokenizer's folder or hub name with --tokenizer_name"
    if Path(name).is_dir():
        check_links(Path(name), where)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokens = tokenizer("a", add_special_tokens=False)["input_ids"]
    except Exception as error:  # the tokenizers library has none of its own
        raise InputError(
            f"cannot load a tokenizer from {name!r} ({_first_line(error)})", where, fix
        ) from error
    # If files are missing, transformers returns a tokenizer without words.
    if not tokens:
        raise InputError(f"the tokenizer in {name!r} has no vocabulary", where, fix)
    return tokenizer


def scratch_config(config: FinetuneConfig, tokenizer: Any) -> PreTrainedConfig:
    """The preset's configuration with the tokenizer's vocabulary (or --vocab_size), where it has
    one."""
    given = config.vocab_size if config.tokenizer_name else None
    own = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    return overridden(config, given or own, tokenizer)


def overridden(config: FinetuneConfig, vocab_size: int, tokenizer: Any = None) -> PreTrainedConfig:
    """The preset's configuration with the values that the options give. Raises InputError for
    values that it does not have, and for blocks that are longer than its positions."""
    made = preset_config(config.model_name_or_path, vocab_size, tokenizer)
    if config.config_overrides is None:
        return made
    try:
        for part in config.config_overrides.split(","):
            if part.count("=") != 1:
                raise ValueError(f"{part!r} is no name=value")
        made.update_from_string(config.config_overrides)
        _check_sizes(made, config.config_overrides)
    except (ValueError, AttributeError) as error:
        raise InputError(
            f"config_overrides is {config.config_overrides!r} ({_first_line(error)})",
            "in --config_overrides",
            "name values of the configuration, such as n_layer=4,n_embd=128",
        ) from error
    if task_of(config).unit == "blocks":
        check_block_size(made, config.block_size)
    return made


_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


def _check_sizes(made: Any, overrides: str) -> None:
    """Raises ValueError for sizes that no layer can have; T5's decoder follows its encoder."""
    given = {part.partition("=")[0].strip() for part in overrides.split(",")}
    both = "num_layers" in given and hasattr(made, "num_decoder_layers")
    if both and "num_decoder_layers" not in given:
        made.num_decoder_layers = made.num_layers
    for name in _SIZES:
        value = getattr(made, name, None)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{name} is {value}")


def set_dropout(model_config: PreTrainedConfig, probability: float) -> None:
    """Sets every dropout probability in the configuration."""
    text_config = model_config.get_text_config()
    for name in DROPOUT_NAMES:
        if isinstance(getattr(text_config, name, None), int | float):
            setattr(text_config, name, probability)


def has_dropout(model_config: PreTrainedConfig) -> bool:
    """Whether training draws dropout masks."""
    text_config = model_config.get_text_config()
    values = (getattr(text_config, name, None) for name in DROPOUT_NAMES)
    return any(isinstance(value, int | float) and value > 0 for value in values)


def check_vocabulary(model_config: PreTrainedConfig, ids: Sequence[Any], tokenizer: Any) -> None:
    """Raises InputError where an id in the arrays `ids` is outside of the model's embedding."""
    if not ids:  # there are no tokens
        return
    vocab_size = model_config.get_text_config().vocab_size
    largest = max(int(array.max()) for array in ids if array.size)
    if largest >= vocab_size:
        raise InputError(
            f"token id {largest} is over the model's vocabulary of {vocab_size} "
            f"(the tokenizer has {len(tokenizer)} tokens)",
            "in the tokenized text",
            "use the model's own tokenizer, or a model with a larger vocabulary",
        )


def build_model(config: FinetuneConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    """Builds the fp32 model with its start weights, and LoRA's adapters where the options ask for
    them; seeds torch, so that every call gives the same weights."""
    import torch

    model = _plain_model(config, model_config)
    if config.lora_r is not None:
        add_lora(model, config)

    def load(folder: str) -> PreTrainedModel:
        named = dataclasses.replace(config, model_name_or_path=folder)
        check_model_name(named)
        return _plain_model(named, load_model_config(named))

    with torch.no_grad():
        return task_of(config).assembled(model, config, load)


def _plain_model(config: FinetuneConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    import torch

    model_class = task_of(config).model_class()
    torch.manual_seed(config.seed)
    if from_scratch(config):
        return model_class.from_config(model_config, dtype=torch.float32)
    files = weight_files(config)
    # the folder whose files were looked at, also where they come from the hub
    source = str(files[0].parent) if files else config.model_name_or_path
    try:
        loaded: Any = model_class.from_pretrained(
            source,
            config=model_config,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=None if config.allow_pickle else True,
            weights_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # `_check_shapes` refuses them, by name
        )
        model, info = loaded
    except Exception as error:
        # torch's error of a module that is not imported here, or its advice to read all the same
        pickled = type(error).__name__ == "UnpicklingError" or "weights_only" in str(error)
        if pickled:
            raise InputError(
                f"the weights of model {config.model_name_or_path!r} are a pickle that holds more "
                "than tensors",
                "in --model_name_or_path",
                "store them with save_pretrained",
            ) from error
        raise InputError(
            f"cannot load the weights of model {config.model_name_or_path!r} "
            f"({_first_line(error)})",
            "in --model_name_or_path",
            "name a folder with config.json and model.safetensors, as save_pretrained writes it"
            + ("" if config.allow_pickle else ", or add --allow_pickle for trusted .bin files"),
        ) from error
    _check_loaded(config, model, info, integer_tensors(Path(source)))
    return model


def _check_loaded(
    config: FinetuneConfig, model: PreTrainedModel, info: Mapping[str, Any], odd: frozenset[str]
) -> None:
    """Says which weights were missing in the model's folder, and which were not used. Raises
    InputError where none of them is the model's, or one has another shape or holds integers.

    info: what `from_pretrained` tells of its loading. odd: the tensors that hold no floats.
    """
    name, where = config.model_name_or_path, "in --model_name_or_path"
    _check_shapes(config, model, sorted(info["mismatched_keys"]))
    weights = {key for key, _ in model.named_parameters()}
    weights |= {key.removeprefix(f"{model.base_model_prefix}.") for key in weights}
    if integers := sorted(weights & odd):
        raise InputError(
            f"cannot load the weights of model {name!r} ({integers[0]} "
            "holds integers or complex numbers)",
            where,
            "name a folder with weights in fp32, bf16 or fp16",
        )
    missing, unexpected = (sorted(info[f"{kind}_keys"]) for kind in ("missing", "unexpected"))
    if len(missing) >= len(list(model.parameters())):
        raise InputError(
            f"none of the weights of model {name!r} has a name of its configuration's",
            where,
            "name a folder whose config.json belongs to its weights",
        )
    for keys, what in (
        (missing, "are not in the model folder and start at random"),
        (unexpected, "in the model folder are not the model's, and are left out"),
    ):
        if keys:
            shown = f"{', '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}"
            print(f"note: {len(keys)} weights {what}: {shown}", file=sys.stderr)


def _check_shapes(
    config: FinetuneConfig, model: PreTrainedModel, mismatched: Sequence[tuple[str, Any, Any]]
) -> None:
    """Says which weights have another shape in the model's folder and start at random. Raises
    InputError for those, unless all are of the head and the options ask for a new one.

    mismatched: the name of each, its shape in the file and that by the configuration.
    """
    if not mismatched:
        return
    name, where = config.model_name_or_path, "in --model_name_or_path"
    has_head = model.base_model is not model
    base = f"{model.base_model_prefix}."
    is_head = has_head and not any(key.startswith(base) for key, _, _ in mismatched)
    if is_head and config.ignore_mismatched_sizes:
        keys = ", ".join(key for key, _, _ in mismatched[:3]) + (" ..." * (len(mismatched) > 3))
        print(
            f"note: {len(mismatched)} weights of the head have other shapes in the model folder "
            f"and start at random: {keys}",
            file=sys.stderr,
        )
        return
    key, stored, expected = mismatched[0]
    more = f", and {len(mismatched) - 1} more" if len(mismatched) > 1 else ""
    shapes = f"{key} is {list(stored)} in the file and {list(expected)}"
    if not is_head:
        raise InputError(
            f"cannot load the weights of model {name!r} ({shapes} by config.json{more})",
            where,
            "name a folder whose config.json belongs to its weights",
        )
    what = f"the head of model {name!r} has other sizes than it needs here"
    if list(stored[:1]) != list(expected[:1]) == [model.config.num_labels]:
        what = f"model {name!r} has a head for {stored[0]} labels, and the data have {expected[0]}"
    raise InputError(
        f"{what} ({shapes} here{more})",
        where,
        "start its head at random with --ignore_mismatched_sizes, or name another model",
    )


def weight_files(config: FinetuneConfig) -> tuple[Path, ...]:
    """The files of the model's weights, checked: those of a local folder, or those of the hub,
    which are downloaded first. None for a model from scratch, and where transformers itself has to
    find or convert them."""
    name, where = config.model_name_or_path, "in --model_name_or_path"
    if from_scratch(config):
        return ()
    if Path(name).is_dir():
        return check_model_folder(Path(name), where, config.allow_pickle)
    from transformers.utils.hub import cached_file, cached_files

    kinds = ("missing_entries", "gated_repo", "connection_errors")
    # from_pretrained says why a file is not there
    quietly: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    found = cached_file(name, WEIGHTS, **quietly)
    if found is None:
        found = cached_file(name, INDEX, **quietly)
        if found is not None:
            cached_files(name, shard_names(Path(found), ".safetensors", where), **quietly)
    return () if found is None else check_model_folder(Path(found).parent, where, False)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160].rstrip(". ")
