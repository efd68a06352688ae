"""The command line's own behaviour: verbs, spelling, help, exit status."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from onward.cli import EXTRAS, VERBS, main, parse
from onward.recipes.options import FinetuneConfig, VerifyConfig


def test_usage_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS)
    assert main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("onward ")


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetun"]) == 2
    assert capsys.readouterr().err == (
        "onward: error: unknown command 'finetun', as the first word; fix: did you mean finetune?\n"
    )


@pytest.mark.parametrize("verb", ["finetune", "verify"])
def test_help_shows_every_option_and_default(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name in FinetuneConfig.__dataclass_fields__:
        assert f" --{name} " in out
    assert "default: gpt2-tiny" in out and out.count("default: ") >= 22
    assert ("--bisect" in out) == (verb == "verify")


def test_dashes_underscores_aliases_flags_and_nulls() -> None:
    config = parse(
        ["--model=m", "--train-file", "a.txt", "--eval_file", "b.txt", "--compare", "--dry-run",
         "false", "--learning-rate=1e-4", "--dropout", "null"],
        "finetune",
        FinetuneConfig,
    )  # fmt: skip
    assert config == FinetuneConfig(
        model_name_or_path="m",
        train_file="a.txt",
        validation_file="b.txt",
        compare=True,
        learning_rate=1e-4,
    )
    verify = parse(["--bisect", "--seed", "3"], "verify", VerifyConfig)
    assert isinstance(verify, VerifyConfig) and verify.bisect and verify.seed == 3


def test_doctor_lists_what_the_package_declares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    project = tomllib.loads(
        (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    declared = {
        "required": project["dependencies"],
        **{extra: project["optional-dependencies"][extra] for extra in ("hf", "ort", "viz")},
    }
    for extra, requirements in declared.items():
        names = tuple(re.split(r"[<>=\[ ]", requirement)[0] for requirement in requirements)
        assert EXTRAS[extra] == names
        assert all(re.search(rf"{extra} +{name} ", out) for name in names)


def test_as_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "onward.cli", "finetune", "--train_file", "missing.txt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "onward finetune: error: no such file 'missing.txt', in --train_file; "
        "fix: name an existing text file\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, onward.cli; onward.cli.main(['finetune', '--help']); "
        "assert not {'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
