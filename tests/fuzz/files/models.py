"""Model folders that a stranger may have made: weights, an index of shards, configurations,
tokenizers; loaded as `onward finetune --model_name_or_path` does."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fuzz.files.json_trees import changed_text
from fuzz.files.judge import Format
from fuzz.files.places import changed_place, lures_of
from fuzz.files.tensor_files import changed_file, reference
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file

from onward.checkpoint.tensor_file import read_tensors
from onward.errors import OnwardError
from onward.recipes import start_model
from onward.recipes.model_folder import check_model_folder, integer_tensors
from onward.recipes.model_size import parameter_count
from onward.recipes.options import FinetuneConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WHERE = "in --model_name_or_path"


def _tiny(family: str = "gpt2") -> Any:
    """A model of one layer of a few families."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    if family == "gpt_neo":
        sizes = {**sizes, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            del sizes[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


# ---- weights alone


def make_weights(folder: Path) -> None:
    _tiny().save_pretrained(folder)


def change_weights(folder: Path, draw: random.Random, outside: Path) -> str:
    if draw.random() < 0.08:
        return changed_place(folder, [WEIGHTS], draw, outside)
    path = folder / WEIGHTS
    path.write_bytes(changed_file(path.read_bytes(), draw, lures_of(outside, WEIGHTS)))
    return "changed weights"


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's file, once the folder was looked at; the two ways must agree."""
    path = folder / WEIGHTS
    try:
        check_model_folder(folder, WHERE, allow_pickle=False)
    except OnwardError as error:
        if path.is_symlink():  # a law of folders
            raise
        try:
            read_tensors(path)
        except OnwardError:
            raise error from None
        raise AssertionError("weights are read that are refused") from error
    integer_tensors(folder)
    return read_tensors(folder / WEIGHTS)


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as a file has them."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_tensors(content: bytes, found: Mapping[str, torch.Tensor]) -> str | None:
    """What of tensors is not as two independent readers find it in a file's bytes."""
    try:
        want = reference(content)
    except (ValueError, KeyError, TypeError, RecursionError, IndexError) as error:
        return f"a file is loaded that breaks the format's rules: {error!r}"
    if want.keys() != found.keys():
        return "other names"
    library = load_bytes(content)
    for name, tensor in found.items():
        theirs = library[name]
        if tensor.dtype != theirs.dtype or tuple(tensor.shape) != want[name].shape:
            return "another dtype or shape"
        if raw(tensor) != want[name].data:
            return "other bytes"
    return None


def check_weights(folder: Path, found: dict[str, torch.Tensor]) -> str | None:
    return check_tensors((folder / WEIGHTS).read_bytes(), found)


# ---- whole models


def load_model(folder: Path) -> Any:
    config = FinetuneConfig(model_name_or_path=str(folder))
    start_model.check_model_name(config)
    model_config = start_model.load_model_config(config)
    parameter_count(str(folder), model_config, start_model.weight_files(config))
    return start_model.build_model(config, model_config)


def check_model(folder: Path, model: Any) -> str | None:
    """Each of the model's tensors is that of a file, in fp32, where one has its name."""
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).is_file():
        named = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        files = [path for path in files if path.name in named]
    elif named := json.loads((folder / "config.json").read_bytes()).get("transformers_weights"):
        files = [folder / named]
    state = model.state_dict()
    seen: set[str] = set()
    for path in files:
        content = path.read_bytes()
        library = load_bytes(content)
        wrong = check_tensors(content, library)
        if wrong is not None:
            return wrong
        for name, tensor in library.items():
            if name in seen:
                return "a tensor is in two files"
            seen.add(name)
            if name in state and not torch.equal(
                state[name].nan_to_num(7.0), tensor.to(torch.float32).nan_to_num(7.0)
            ):
                return "a weight is not the file's"
    if not seen & set(state):
        return "no weight is a file's"
    return None


def change_model(folder: Path, draw: random.Random, outside: Path) -> str:
    return change_weights(folder, draw, outside)


# ---- an index of shards


def make_index(folder: Path) -> None:
    make_weights(folder)
    weights = read_tensors(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, own in zip(SHARDS, parts, strict=True):
        save_file({name: weights[name] for name in own}, folder / shard, {"format": "pt"})
    held = {name: shard for shard, own in zip(SHARDS, parts, strict=True) for name in own}
    index = {"metadata": {"total_size": 99}, "weight_map": held}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def change_index(folder: Path, draw: random.Random, outside: Path) -> str:
    kind = draw.random()
    if kind < 0.12:
        return changed_place(folder, [INDEX, *SHARDS], draw, outside)
    if kind < 0.3:
        path = folder / draw.choice(SHARDS)
        other = (folder / draw.choice(SHARDS)).read_bytes()
        content = other if draw.random() < 0.2 else changed_file(path.read_bytes(), draw)
        path.write_bytes(content)
        return f"changed {path.name}"
    path = folder / INDEX
    lures: list[Any] = [*lures_of(outside, SHARDS[0]), "x.safetensors", WEIGHTS, *SHARDS]
    text = path.read_text()
    if draw.random() < 0.5:  # one name of a shard, in one entry or in all
        shard = json.dumps(draw.choice(lures))
        count = draw.choice([1, 1, text.count(SHARDS[0])])
        text = text.replace(json.dumps(SHARDS[0]), shard, count)
        path.write_text(text)
        return f"{count} entries name {shard[:60]}"
    path.write_bytes(changed_text(text.encode(), draw, lures))
    return "changed index"


# ---- config.json

FAMILIES = ("gpt2", "llama", "qwen2", "gpt_neo", "mistral")
HUGE = (10**5, 10**6, 10**9, 2**31, 2**63, 10**12, -1, 0, 3)
LURES: tuple[tuple[str, Any], ...] = (
    ("auto_map", {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}),
    ("auto_map", {"AutoModelForCausalLM": "../outside/planted.Model"}),
    ("model_type", "planted"), ("model_type", "bert"), ("model_type", "llama"), ("model_type", ""),
    ("attn_implementation", "someone/kernel"), ("_attn_implementation", "someone/kernel:f"),
    ("experts_implementation", "someone/kernel"), ("attn_implementation", {"": "a/b"}),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("quantization_config", {"quant_method": "planted"}), ("quantization_config", []),
    ("transformers_weights", "../outside/model.safetensors"), ("transformers_weights", "x.bin"),
    ("transformers_weights", WEIGHTS), ("transformers_weights", 5), ("num_labels", 10**9),
    ("num_labels", 10**7), ("id2label", {"a": "b"}), ("architectures", ["planted.Model"]),
    ("dtype", "planted"), ("torch_dtype", "load"), ("dtype", "float16"), ("dtype", {"": "float16"}),
    ("rope_scaling", {"rope_type": "planted", "factor": 0}), ("rope_theta", 0), ("head_dim", 10**9),
    ("rope_parameters", {"rope_type": "yarn", "factor": 1e30}), ("layer_types", ["planted"]),
    ("text_config", {"model_type": "gpt2", "n_layer": 10**9}), ("text_config", {"text_config": {}}),
    ("base_model_tp_plan", {"*": "planted"}), ("tie_word_embeddings", True), ("n_layer", 10**9),
    ("num_hidden_layers", 10**9), ("num_hidden_layers", 10**6), ("hidden_size", 10**9),
    ("n_embd", 10**9), ("vocab_size", 10**9), ("vocab_size", 10**12), ("n_positions", 10**9),
    ("n_positions", 10**6), ("max_position_embeddings", 10**12), ("intermediate_size", 10**9),
    ("n_inner", 10**9), ("num_attention_heads", 10**9), ("num_key_value_heads", 0), ("n_head", 0),
    ("attention_types", [[["global", "local"], 10**9]]), ("num_layers", 10**9), ("use_cache", 5),
    ("activation_function", "planted"), ("hidden_act", "../planted"), ("pad_token_id", 10**9),
    ("is_decoder", False), ("is_encoder_decoder", True), ("pruned_heads", {"0": [0, 1]}),
    ("chunk_size_feed_forward", -1), ("output_hidden_states", True), ("return_dict", False),
    ("gradient_checkpointing", True), ("layer_norm_epsilon", "x"), ("cross_attention", True),
    ("add_cross_attention", True), ("transformers_version", "99.0"), ("_name_or_path", "/etc"),
)  # fmt: skip


def make_config(folder: Path) -> None:
    for family in FAMILIES:
        (folder / family).mkdir()
        _tiny(family).save_pretrained(folder / family)
    make_weights(folder)


def change_config(folder: Path, draw: random.Random, outside: Path) -> str:
    family = draw.choice(FAMILIES)
    for path in (folder / family).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path = folder / draw.choice(["config.json"] * 6 + ["generation_config.json"])
    kind = draw.random()
    if kind < 0.06:
        return f"{family}: {changed_place(folder, [path.name], draw, outside)}"
    held = json.loads(path.read_bytes())
    if kind < 0.3:
        numbers = [k for k, v in held.items() if type(v) is int]
        for _ in range(draw.choice([1, 1, 2])):
            held[draw.choice(numbers)] = draw.choice(HUGE)
        path.write_text(json.dumps(held))
        return f"{family}: {path.name} with other numbers"
    if kind < 0.65:
        for _ in range(draw.choice([1, 1, 2])):
            key, value = draw.choice(LURES)
            held[key] = value
        path.write_text(json.dumps(held))
        return f"{family}: {path.name} with {key}={value}"
    path.write_bytes(changed_text(path.read_bytes(), draw, LURES))
    return f"{family}: changed {path.name}"


# ---- tokenizers

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@functools.cache
def _trained() -> Any:
    from onward.recipes.corpus import train_tokenizer

    return train_tokenizer(["a b c ab abc bca def " * 50], 270, 64)


def make_tokenizer(folder: Path) -> None:
    make_weights(folder)
    _trained().save_pretrained(folder)


TOKENIZER_LURES: tuple[tuple[str, Any], ...] = (
    ("tokenizer_class", "planted"), ("tokenizer_class", "GPT2Tokenizer"),
    ("tokenizer_class", "BertTokenizer"), ("auto_map", {"AutoTokenizer": ["planted.T", None]}),
    ("auto_map", {"AutoTokenizer": "planted.T"}), ("vocab_file", "../outside/x.json"),
    ("tokenizer_file", "../outside/tokenizer.json"), ("merges_file", "/etc/passwd"),
    ("fast_tokenizer_files", ["../outside/tokenizer.json"]), ("chat_template", "{{ 9**9**9 }}"),
    ("model_max_length", 10**30), ("extra_special_tokens", {"a": 5}), ("fix_mistral_regex", True),
    ("added_tokens_decoder", {"10000000000": {"content": "x"}}),
    ("eos_token", {"__type": "planted"}),
    ("bos_token", {"__type": "AddedToken", "content": 5}), ("use_fast", False), ("backend", "x"),
)  # fmt: skip


def change_tokenizer(folder: Path, draw: random.Random, outside: Path) -> str:
    path = folder / draw.choice(TOKENIZER)
    if draw.random() < 0.1:
        return changed_place(folder, [path.name], draw, outside)
    lures: list[Any] = [*TOKENIZER_LURES, *lures_of(outside, "tokenizer.json")]
    path.write_bytes(changed_text(path.read_bytes(), draw, lures))
    return f"changed {path.name}"


def load_tokenizer(folder: Path) -> Any:
    return start_model.load_tokenizer(FinetuneConfig(model_name_or_path=str(folder)))


def check_tokenizer(folder: Path, tokenizer: Any) -> str | None:
    """Says what is wrong where a tokenizer gives no tokens; its file alone says which."""
    ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    if not ids or not all(type(i) is int and i >= 0 for i in ids):
        return "ids that are none"
    return None


_REFUSALS = (OnwardError,)
FORMATS: dict[str, Format] = {
    "weights": Format(make_weights, change_weights, load_weights, check_weights, _REFUSALS),
    "model": Format(make_weights, change_model, load_model, check_model, _REFUSALS),
    "index": Format(make_index, change_index, load_model, check_model, _REFUSALS),
    "config": Format(make_config, change_config, load_model, check_model, _REFUSALS),
    "tokenizer": Format(
        make_tokenizer, change_tokenizer, load_tokenizer, check_tokenizer, _REFUSALS
    ),
}
