"""Texts that a shell, YAML, Jinja or a path would act upon, given as names: none is acted upon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from onward.recipes.explain_options import ExplainConfig
from onward.recipes.options import FinetuneConfig, VerifyConfig
from onward.recipes.simulate_options import SimulateConfig

PAYLOADS = (
    "; touch pwned", "$(touch pwned)", "`touch pwned`", "| touch pwned", "&& touch pwned",
    "a\ntouch pwned", "> pwned", "'; touch pwned; '", '"; touch pwned; "', "%(touch pwned)s",
    "${IFS}touch${IFS}pwned", "$HOME/pwned", "../../../../pwned", "/proc/self/mem",
    "!!python/object/apply:os.system ['touch pwned']", "{x: !!python/name:os.system }",
    "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "__import__('os').system('touch pwned')", "--config=/etc/passwd", "-c touch pwned",
    "a\x00b", "\u202epwned", "file:///etc/passwd", "https://example.invalid/$(touch pwned)",
)  # fmt: skip
PROGRAM = Path(__file__).with_name("hostile_names_program.py")
QUICK = ["--model_name_or_path", "gpt2-tiny", "--corpus_bytes", "30000", "--vocab_size", "300"]
QUICK += ["--block_size", "16", "--max_steps", "2", "--max_eval_samples", "4"]
# texts that may be anything: a run starts, and shows them
FREE = ("run_name", "logging_dir", "output_dir", "html")
TARGET = {"explain": ["gpt2-tiny"], "simulate": ["h100"]}
VERBS: dict[str, type] = {
    "finetune": FinetuneConfig, "verify": VerifyConfig, "explain": ExplainConfig,
    "simulate": SimulateConfig,
}  # fmt: skip


def takes_text(annotation: Any) -> bool:
    """Whether an option is a text of any kind, not one of a list of words."""
    kinds = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    )
    return str in kinds


def texts(config: type) -> list[str]:
    hints = typing.get_type_hints(config)
    return [field.name for field in fields(config) if takes_text(hints[field.name])]


def run(cases: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    """What each command line did, all in one process whose files are watched."""
    (folder / "here").mkdir()
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    environment = {**os.environ, "ONWARD_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    environment |= {"HOME": str(folder), "HF_HOME": str(folder / "hub"), "TMPDIR": str(folder)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a first import of a library writes beside it
    done = subprocess.run(
        [sys.executable, PROGRAM, folder / "cases.json"],
        cwd=folder / "here", env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (folder / "here" / "pwned").exists() and not (folder / "pwned").exists()
    return json.loads(done.stdout.splitlines()[-1])


def outside(found: dict[str, Any], folder: Path) -> list[str]:
    """The files made or changed that do not lie in the test's own folder."""
    changed = set(found["changed"]) - {"/dev/null", "/proc/self/clear_refs"}  # peak memory
    return [path for path in changed if not Path(path).resolve().is_relative_to(folder)]


def names() -> list[tuple[str, str]]:
    """Each option of each verb that takes a text; "" is the word behind the verb."""
    found = [(verb, name) for verb, config in VERBS.items() for name in texts(config)]
    return [(v, n) for v, n in found if n not in FREE] + [
        ("finetune", "config"),
        ("explain", ""),
        ("simulate", ""),
        ("", ""),
    ]


def line(verb: str, name: str, payload: str) -> list[str]:
    """A command line with the payload as an option's value, or as a word."""
    if not name:
        return [verb, payload] if verb else [payload]
    more = QUICK if verb == "finetune" and name != "model_name_or_path" else []
    return [verb, *TARGET.get(verb, []), f"--{name}={payload}", *more]


def test_the_options_are_those_that_take_a_text() -> None:
    assert {"model_name_or_path", "train_file", "mesh", *FREE[:3]} <= set(texts(FinetuneConfig))
    assert "block_size" not in texts(FinetuneConfig) and "engine" not in texts(FinetuneConfig)
    assert len(PAYLOADS) >= 20 and len(names()) >= 15


def test_a_hostile_text_is_refused_in_one_line(tmp_path: Path) -> None:
    cases = [line(verb, name, payload) for verb, name in names() for payload in PAYLOADS]
    for found in run(cases, tmp_path):
        what = str(found)
        assert found["started"] == [], what
        assert outside(found, tmp_path) == [], what
        assert found["status"] == 2, what
        assert len(found["error"]) == 1 and "fix: " in found["error"][0], what
        assert "Traceback" not in what, what


@pytest.mark.parametrize("text", [p for p in PAYLOADS if "/" not in p and "\0" not in p][::5])
def test_a_run_may_have_any_name(text: str, tmp_path: Path) -> None:
    """A name is shown and is part of a path, no more."""
    words = ["finetune", *QUICK, f"--run_name={text}", "--report_to=tensorboard"]
    [found] = run([[*words, f"--output_dir=out/{text}", f"--logging_dir=logs/{text}"]], tmp_path)
    assert found["status"] == 0, found["error"]
    # matplotlib lists the fonts of a home that it is in for the first time
    assert [each for each in found["started"] if "('fc-list'" not in each] == []
    assert (tmp_path / "here" / "out" / text / "model.safetensors").exists()
    assert outside(found, tmp_path) == []
