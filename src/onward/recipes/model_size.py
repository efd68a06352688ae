"""The size of the model that a configuration asks for, and the most that its weights can fill."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.errors import one_line
from onward.recipes.model_folder import tensor_names
from onward.recipes.options import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# A model has at most this many modules for each tensor in its files, and these beside.
_MODULES, _MODULES_BESIDE = 8, 1000
_MODULES_OF_PICKLES = 100_000  # their tensors are not counted before they are read
# In fp32 it takes at most this many times the bytes of its files, and these beside: weights in
# fewer bits, tied ones that are stored once, weights that are new, buffers that are not stored.
_TIMES, _BESIDE = 16, 256 << 20
# families whose positions count from the id of the padding token
BEHIND_PADDING = (
    "camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


def parameter_count(
    name: str,
    model_config: PreTrainedConfig,
    files: Sequence[Path],
    auto_class: Any = None,
    assembled: Callable[[Any], Any] | None = None,
    overrides: str | None = None,
) -> int:
    """The number of weights of a configuration's model, shared ones counted once; allocates none.

    name: the model's. files: of its weights; with none, no size is too large. auto_class: makes the
    model; None: transformers' AutoModelForCausalLM. assembled: makes what is trained of that model.
    overrides: what the user has changed in the configuration. Raises InputError for a configuration
    that no model can be made of, and for one that asks for much more than its files can fill.
    """
    import torch
    from transformers import AutoModelForCausalLM

    where = "in --model_name_or_path"
    try:
        with torch.device("meta"), _few_modules(_most_modules(files)):
            model = (auto_class or AutoModelForCausalLM).from_config(model_config)
            model = model if assembled is None else assembled(model)
        count = sum(parameter.numel() for parameter in model.parameters())
        asked = 4 * count + sum(b.numel() * b.element_size() for b in model.buffers())
    except Exception as error:  # what a library raises for sizes that it does not expect
        told = one_line(repr(error), 160)
        if overrides is not None:
            raise InputError(
                f"no {name} can be made with {overrides!r} ({told})",
                "in --config_overrides",
                "give other sizes",
            ) from error
        raise InputError(
            f"no model can be made of config.json of {name!r} ({told})",
            where,
            "name a folder that save_pretrained wrote",
        ) from error
    stored = sum(path.stat().st_size for path in files)
    if files and asked > _TIMES * stored + _BESIDE:
        raise InputError(
            f"config.json of {name!r} asks for a model of {asked:,} bytes, and its weights have "
            f"{stored:,}",
            where,
            "name a folder whose config.json belongs to its weights",
        )
    return count


def _most_modules(files: Sequence[Path]) -> float:
    """The most modules of a model with these weights."""
    if not files:
        return float("inf")
    if files[0].suffix != ".safetensors":
        return _MODULES_OF_PICKLES
    return _MODULES_BESIDE + _MODULES * sum(len(tensor_names(path)) for path in files)


@contextmanager
def _few_modules(most: float) -> Generator[None]:
    """Within it, a module that takes more than so many others into it and into its parts raises
    ValueError."""
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(*registered: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ValueError(f"more than {most} modules, for the tensors in its files")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def positions_of(model_config: PreTrainedConfig) -> int | None:
    """Tokens of the longest input; None where the model has no limit. Families like RoBERTa keep
    the positions up to that of the padding token for padding."""
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    if model_config.model_type in BEHIND_PADDING:
        return positions - (model_config.pad_token_id or 0) - 1
    return positions


def target_positions(model_config: PreTrainedConfig) -> int | None:
    """Tokens of the longest text that a decoder behind an encoder writes; None where it has no
    limit, as T5's."""
    decoder = model_config.get_text_config(decoder=True)
    for name in ("max_target_positions", "max_decoder_position_embeddings"):
        positions = getattr(decoder, name, None)
        if isinstance(positions, int):
            return positions
    return positions_of(decoder)


def check_block_size(model_config: PreTrainedConfig, block_size: int) -> None:
    """Raises InputError for a block longer than the model's positions."""
    positions = positions_of(model_config)
    if positions is not None:
        check_positions(positions, block_size)


def check_positions(positions: int, block_size: int) -> None:
    """Raises InputError for a block longer than so many positions."""
    if block_size > positions:
        raise InputError(
            f"block_size {block_size} is over the model's {positions} positions",
            "in --block_size",
            f"give at most {positions}",
        )


__all__ = [
    "BEHIND_PADDING",
    "check_block_size",
    "check_positions",
    "parameter_count",
    "positions_of",
    "target_positions",
]
