"""`onward chat` and `onward complete`: a model's answers, beside those of the weights that it was
trained from. transformers' `generate` writes them."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from onward.recipes.chat_options import ChatConfig
from onward.recipes.corpus import begun, text_start
from onward.recipes.found_model import (
    find_model,
    load_model,
    load_model_tokenizer,
    load_start_model,
)
from onward.recipes.options import InputError

_WHERE = "as RUN_OR_MODEL"
WIDTH = 100  # columns at most, where a terminal has more
Messages = list[dict[str, str]]


class Answer(NamedTuple):
    """What a model writes after a prompt. tokens: how many of them."""

    text: str
    tokens: int


def chat(name: str, config: ChatConfig, templated: bool = True) -> int:
    """Answers prompts on stdout; returns the exit status. templated: whether the tokenizer's chat
    template is used, where it has one. Raises InputError for what cannot be answered."""
    found = find_model(name, _WHERE)
    if config.compare:
        found.run_options()  # refused before anything loads
    tokenizer: Any = load_model_tokenizer(found)
    models: dict[str, Any] = {"trained": load_model(found)}
    if config.compare:
        models = {"start": load_start_model(found, models["trained"]), **models}
    uses_template = templated and bool(getattr(tokenizer, "chat_template", None))
    talks = not config.prompts and sys.stdin.isatty()
    if talks:
        print("one prompt a line; an empty one ends", file=sys.stderr)
    said: dict[str, Messages] = {side: [] for side in models}
    for prompt in _prompts(config, talks):
        answers: dict[str, Answer] = {}
        for side, model in models.items():
            turn = {"role": "user", "content": prompt}
            before = said[side] if uses_template and talks else []
            given = [*before, turn] if uses_template else prompt
            answers[side] = answer(model, tokenizer, given, config)
            said[side] += [turn, {"role": "assistant", "content": answers[side].text}]
        print(_shown(prompt, answers, config.json), flush=True)
    return 0


def _prompts(config: ChatConfig, talks: bool) -> Iterator[str]:
    """The prompts of the command line, else of stdin, a line each; empty lines of a file are
    none."""
    if config.prompts:
        yield from config.prompts
    elif talks:
        yield from iter(_read, "")
    else:
        yield from (line for line in map(str.rstrip, sys.stdin) if line)


def _read() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def answer(model: Any, tokenizer: Any, prompt: str | Messages, config: ChatConfig) -> Answer:
    """The model's answer to a text, which it continues, or to messages by the chat template. Raises
    InputError for a prompt without tokens, and for one that fills the model's positions."""
    if isinstance(prompt, str):
        plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = begun(plain, text_start(tokenizer))
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    if not ids:
        raise InputError("the prompt has no tokens", "in --prompt", "give some text")
    most = config.max_new_tokens
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int):
        if len(ids) >= positions:
            raise InputError(
                f"the prompt has {len(ids)} tokens and the model {positions} positions",
                "in --prompt",
                f"give at most {positions - 1} tokens",
            )
        most = min(most, positions - len(ids))
    vocabulary = model.config.get_text_config().vocab_size
    if max(ids) >= vocabulary:
        raise InputError(
            f"the tokenizer's id {max(ids)} is over the model's vocabulary of {vocabulary}",
            _WHERE,
            "name a folder whose tokenizer is the model's",
        )
    torch.manual_seed(config.seed)
    draws: dict[str, Any] = {"do_sample": False}
    if config.temperature > 0:
        draws = {"do_sample": True, "temperature": config.temperature}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    given = torch.tensor([ids])
    with torch.no_grad():
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=most,
            pad_token_id=pad,
            **draws,
        )
    new = made[0, len(ids) :].tolist()
    return Answer(tokenizer.decode(new, skip_special_tokens=True), len(new))


def _shown(prompt: str, answers: dict[str, Answer], as_json: bool) -> str:
    """The answers below the prompt; two of them in two columns."""
    if as_json:
        said: dict[str, Any] = {"prompt": prompt}
        for side, each in answers.items():
            prefix = "" if side == "trained" else f"{side}_"
            said |= {f"{prefix}answer": each.text, f"{prefix}tokens": each.tokens}
        return json.dumps(said)
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    head = "\n".join(_wrapped(f"prompt: {prompt}", width))
    if len(answers) == 1:
        (only,) = answers.values()
        return "\n".join([head, *_wrapped(only.text, width), ""])
    column = (width - 3) // 2
    sides = [[side, *_wrapped(each.text, column)] for side, each in answers.items()]
    rows = [f"{a:<{column}} | {b}".rstrip() for a, b in zip_longest(*sides, fillvalue="")]
    return "\n".join([head, *rows, ""])


def _wrapped(text: str, width: int) -> list[str]:
    """A text in lines of so many columns; what a terminal would take for a command is spelled
    out."""
    safe = "".join(
        c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text.expandtabs(4)
    )
    return [
        part
        for line in safe.split("\n")
        for part in textwrap.wrap(line, width, drop_whitespace=False) or [""]
    ]


__all__ = ["Answer", "answer", "chat"]
