"""`onward chat` and `onward complete` beside transformers' own `generate`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.cli import main
from onward.recipes.options import InputError

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def generated(folder: Path, tokenizer: Path, text: str, **options: Any) -> str:
    """What transformers generates after a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokens: Any = AutoTokenizer.from_pretrained(tokenizer)
    given = tokens(text, return_tensors="pt")
    made = model.eval().generate(**given, pad_token_id=0, **options)
    return tokens.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("which", ["run", "checkpoint", "model"])
def test_greedy_answers_are_those_of_generate(
    which: str, small_run: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, beside = {
        "run": (small_run, small_run), "checkpoint": (small_run / "checkpoint-2", small_run),
        "model": (model_folder, model_folder),
    }[which]  # fmt: skip
    prompts = ["def add(self, a, b):", "import os"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    found = said(capsys, "chat", str(folder), *words, "--max_new_tokens", "12")
    assert [each["prompt"] for each in found] == prompts
    for each in found:
        want = generated(folder, beside, each["prompt"], max_new_tokens=12, do_sample=False)
        assert each["answer"] == want


def test_draws_are_those_of_generate_and_of_the_seed(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["complete", str(model_folder), "--prompt", "class A", "--max_new_tokens", "9"]
    words += ["--temperature", "1.5", "--seed"]
    found = [said(capsys, *words, seed)[0]["answer"] for seed in ("5", "6", "5")]
    assert found[0] == found[2] != found[1]
    torch.manual_seed(5)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": True, "temperature": 1.5}
    assert found[0] == generated(model_folder, model_folder, "class A", **options)


def test_the_start_weights_are_those_of_the_run(
    small_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the digest that the run wrote before its first update."""
    from onward.recipes.found_model import find_model, load_model, load_start_model
    from onward.recipes.weights_digest import weights_sha256

    found = find_model(str(small_run), "as RUN_OR_MODEL")
    trained = load_model(found)
    start = load_start_model(found, trained)
    results = json.loads((small_run / "eval_results.json").read_text())
    assert weights_sha256(start) == results["start_weights_sha256"] != weights_sha256(trained)
    start.save_pretrained(tmp_path)
    words = ["chat", str(small_run), "--prompt", "def f(", "--compare", "--max_new_tokens", "8"]
    (each,) = said(capsys, *words)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert each["start_answer"] == generated(tmp_path, small_run, "def f(", **options)
    assert each["answer"] == generated(small_run, small_run, "def f(", **options)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "prompt: def f(" and lines[1].split() == ["start", "|", "trained"]
    (small_run / "eval_results.json").write_text(
        json.dumps({**results, "start_weights_sha256": "0"})
    )
    try:
        assert main(words) == 2
        assert "began with other weights" in capsys.readouterr().err
    finally:
        (small_run / "eval_results.json").write_text(json.dumps(results))


def test_a_chat_template_is_used_by_chat_alone(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    for verb, text in (("chat", "user: hi you\nassistant: "), ("complete", "hi you")):
        words = [verb, str(tmp_path), "--prompt", "hi you", "--max_new_tokens", "6"]
        want = generated(tmp_path, tmp_path, text, **options)
        assert said(capsys, *words)[0]["answer"] == want


@pytest.mark.parametrize("prompt", ["def f(", "<s>def f(", "template"])
def test_a_prompt_begins_once_as_texts_do(prompt: str, text: str) -> None:
    from types import SimpleNamespace

    from tiny_tokenizers import with_template

    from onward.recipes.chat import answer
    from onward.recipes.chat_options import ChatConfig

    tokenizer = with_template(text, "<s> $A")
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    given: list[list[int]] = []

    class Model:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=320))

        def generate(self, ids: torch.Tensor, **_: Any) -> torch.Tensor:
            given.append(ids[0].tolist())
            return ids

    message = [{"role": "user", "content": "def f("}]
    answer(Model(), tokenizer, message if prompt == "template" else prompt, ChatConfig())
    want: list[int] = tokenizer("def f(")["input_ids"]
    assert given == [want] and want.count(tokenizer.bos_token_id) == 1


def test_lines_of_stdin_are_prompts_and_positions_are_kept(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("if a\n\nfor b\n"))
    found = said(capsys, "chat", str(model_folder), "--max_new_tokens", "500")
    assert [each["prompt"] for each in found] == ["if a", "for b"]
    assert all(each["tokens"] <= 64 for each in found)
    assert main(["chat", str(model_folder), "--prompt", "x = 1\n" * 64]) == 2
    assert "64 positions, in --prompt; fix: give at most 63 tokens" in capsys.readouterr().err


def test_what_a_terminal_would_obey_is_spelled_out(small_run: Path) -> None:
    from onward.recipes.chat import Answer, _shown

    text = _shown("p", {"trained": Answer("a\x1b[2Jb\u202ec\nd", 3)}, False)
    assert text.splitlines()[1:] == ["a\\x1b[2Jb\\u202ec", "d"]


@pytest.mark.parametrize(
    ("words", "said_of"),
    [
        (["gpt2-tny", "--prompt", "a"], "no model 'gpt2-tny', as RUN_OR_MODEL; fix: did you mean"),
        (["./gone", "--prompt", "a"], "no such model folder './gone', as RUN_OR_MODEL"),
        (
            ["{model}", "--prompt", "a", "--compare"],
            "is not from a run of onward finetune, as RUN_OR_MODEL",
        ),
        (["{model}", "--temperature", "-1"], "temperature is -1.0, in --temperature"),
        (["{model}", "--promt", "a"], "fix: did you mean --prompt?"),
    ],
)
def test_refusals(
    words: list[str], said_of: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *(word.format(model=model_folder) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said_of in error and error.count("error") == 1


def test_a_run_without_weights_is_refused(tmp_path: Path, small_run: Path) -> None:
    from onward.recipes.found_model import find_model

    (tmp_path / "run_config.json").write_bytes((small_run / "run_config.json").read_bytes())
    with pytest.raises(InputError, match="neither a model nor a checkpoint"):
        find_model(str(tmp_path), "as RUN_OR_MODEL")
