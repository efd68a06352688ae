"""The command line's own behaviour: verbs, spelling, help, exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch

import onward
from onward.cli import VERBS, main, parse
from onward.kernels.blas import choice
from onward.kernels.blas.engines import engines
from onward.kernels.native import library as native
from onward.recipes.doctor import EXTRAS
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
    assert "null: gpt2-tiny for causal-lm" in out and out.count("default: ") >= 22
    assert ("--bisect" in out) == (verb == "verify")


FIRST_WORDS = {
    "bench": ("MODEL_OR_SCRIPT", "no model or script", "onward bench gpt2-tiny"),
    "chat": ("RUN_OR_MODEL", "no run or model", "onward chat runs/wiki --prompt Hello"),
    "complete": ("RUN_OR_MODEL", "no run or model", "onward complete runs/wiki --prompt Hello"),
    "export": ("MODEL_OR_RUN OUT", "no model or run", "onward export runs/wiki model.onnx"),
    "sweep": ("SWEEP", "no sweep", "onward sweep sweep.yaml --output_dir runs/sweep"),
    "explain": ("MODEL_OR_SCRIPT", "no model or script", "onward explain gpt2-tiny"),
    "train": ("MODEL.onnx", "no model.onnx", "onward train model.onnx --data train.npz"),
    "simulate": ("CLUSTER", "no cluster", "onward simulate h100 --model gpt2-xl"),
}


@pytest.mark.parametrize("verb", FIRST_WORDS)
def test_the_first_word_of_a_command_is_asked_for(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    word, missing, example = FIRST_WORDS[verb]
    for words in ([], ["--json"]):
        assert main([verb, *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(
            f"onward {verb}: error: {missing} is given, as the first word after"
        )
        assert example in error and error.count("\n") == 1
    for words in (["-h"], ["gpt2", "--json", "--help"]):
        assert main([verb, *words]) == 0
        assert capsys.readouterr().out.startswith(f"usage: onward {verb} {word} [--")


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


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("ask", ["--help", "-h"])
def test_every_command_has_help(verb: str, ask: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, ask]) == 0
    printed = capsys.readouterr()
    assert printed.out.split()[:3] == ["usage:", "onward", verb] and printed.err == ""
    assert VERBS[verb][0].partition(",")[0] in printed.out


def test_doctor_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--mesure"]) == 2
    assert capsys.readouterr().err.endswith("; fix: did you mean --measure?\n")


def test_cache_shows_and_clears_what_is_kept_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "1")

    def said(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    assert said("cache").startswith(f"{tmp_path / 'graphs'}: 0 files, 0.0 MiB")
    (tmp_path / "graphs").mkdir()
    for name in ("a.graph", "b.graph", "products.json"):
        (tmp_path / "graphs" / name).write_bytes(b"x" * 2**20)
    assert "2 files, 2.0 MiB, kept" in said("cache")
    assert "2 files of graphs and tokens, 2.0 MiB" in said("doctor")
    assert "2 files, 2.0 MiB, removed" in said("cache", "--clear")
    assert [path.name for path in (tmp_path / "graphs").iterdir()] == ["products.json"]
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "0")
    assert "off (ONWARD_GRAPH_CACHE=0)" in said("doctor")
    assert main(["cache", "--claer"]) == 2
    assert capsys.readouterr().err.endswith("; fix: did you mean --clear?\n")


@pytest.fixture
def doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[str, str]]:
    """Runs `onward doctor` with an empty cache; what it says, by the word before it."""
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))

    def run(*options: str) -> dict[str, str]:
        assert main(["doctor", *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line[:14].strip(): line[14:] for line in lines}

    return run


def test_doctor_names_the_machine_and_its_libraries(
    doctor: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = doctor()
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    assert not models or found["processor"].startswith(models[0])
    assert f"{len(os.sched_getaffinity(0))} cores" in found["processor"]
    assert found["instructions"].startswith(torch.backends.cpu.get_cpu_capability())
    files = sorted(native.FOLDER.glob("*.so"))
    taken, _, installed = found["native build"].partition("; installed: ")
    assert set(installed.split(", ")) == {path.name.partition(".")[0] for path in files}
    assert taken.partition(" (")[2].rstrip(")") in [path.name for path in files]
    assert found["threads"] == f"{torch.get_num_threads()} in PyTorch; OMP_NUM_THREADS is 7"
    assert onnxruntime.__version__ in found["onnxruntime"]
    assert "CPUExecutionProvider" in found["onnxruntime"]
    assert "libgomp" in found["OpenMP"]
    assert all(name in found["BLAS engines"] for name in ("torch", *engines()))
    assert found["plugins"] == "none installed"


FLAGS = {"AVX512-BF16": "avx512_bf16", "AMX": "amx_tile"}


def test_doctor_says_what_the_processor_has_for_bf16(
    doctor: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = doctor()["bf16"]
    flags = re.findall(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    said, _, rest = found.partition("; ")
    if flags:
        have = [name for name, flag in FLAGS.items() if flag in flags[0].split()]
        assert said == (", ".join(have) or "no instructions for it")
    measured = re.fullmatch(
        r"PyTorch's products of 384: (\d+) GFLOP/s, fp32 (\d+)(; Onward widens blocks to fp32)?; "
        r'mixed_precision="auto" is (bf16|fp32)',
        rest,
    )
    assert measured is not None, rest
    assert int(measured[2]) > 0
    host_module = sys.modules["onward.kernels.host"]
    for names, auto in ((("AMX",), "bf16"), ((), "fp32")):
        host_module._multiplies_bf16.cache_clear()  # type: ignore[attr-defined]
        monkeypatch.setattr(host_module, "bf16_instructions", lambda names=names: names)
        found = doctor()["bf16"]
        assert found.startswith("AMX; " if names else "no instructions for it; ")
        assert found.endswith(f"is {auto}")
    host_module._multiplies_bf16.cache_clear()  # type: ignore[attr-defined]


def test_doctor_measures_when_asked_and_says_what_was_measured(
    doctor: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not engines():
        pytest.skip("no engine beside torch's own")
    names = ("torch", *engines())
    assert "not measured yet" in doctor()["rates"]
    rates = {shape: {n: 2.0**i for i, n in enumerate(names)} for shape in choice.SAMPLES}
    monkeypatch.setattr(choice, "measure", lambda: rates)
    for found in (doctor("--measure"), doctor()):  # measured now, and kept
        assert "rates" not in found
        for i, name in enumerate(names):
            first = len(choice.SAMPLES) if i == len(names) - 1 else 0
            assert found[name] == (
                f"{2**i} GFLOP/s in the mean of {len(choice.SAMPLES)} products, {2**i} at most; "
                f"fastest on {first}"
            )
    choice.rates.cache_clear()


def test_doctor_says_why_there_are_no_native_kernels(
    doctor: Callable[..., dict[str, str]],
    build: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    build("0")
    found = doctor()
    assert found["native build"].startswith("off (ONWARD_NATIVE=0)")
    assert found["BLAS engines"] == "torch" and found["environment"].count("ONWARD_NATIVE=0") == 1
    build("")
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert "installed without a C++ compiler; installed: nothing" in doctor()["native build"]


def test_doctor_without_torch_says_how_to_get_it(
    doctor: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from onward.recipes import doctor as recipe

    had = recipe.installed
    monkeypatch.setattr(recipe, "installed", lambda name: None if name == "torch" else had(name))
    found = doctor()
    assert any('not installed; fix: pip install "onward"' in text for text in found.values())
    assert "processor" not in found


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["finetune", "--help"], ["doctor"]])
def test_a_pipe_without_a_reader_is_no_traceback(words: list[str]) -> None:
    """`onward ... | head`, where head has gone before the first line comes."""
    end, start = os.pipe()
    os.close(end)
    done = subprocess.run(
        [sys.executable, "-m", "onward.cli", *words],
        stdout=start,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(start)
    assert (done.returncode, done.stderr) == (141, "")


def test_options_of_the_trainer_are_those_of_the_command_line() -> None:
    """By the same names, where both have them."""
    options = onward.TrainerOptions.__dataclass_fields__
    shared = {
        "gradient_accumulation_steps", "max_grad_norm", "seed", "memory_budget", "mesh", "zero",
        "pipeline_schedule", "pipeline_microbatches", "sequence_parallel",
        "context_parallel_method", "optimizer_state", "offload_optimizer", "offload_dir",
        "skip_nonfinite",
    }  # fmt: skip
    assert shared == options.keys() & FinetuneConfig.__dataclass_fields__.keys()
    config = parse(["--memory_budget", "1.5 GiB"], "finetune", FinetuneConfig)
    assert config is not None and config.memory_budget == "1.5 GiB"
    for text, value in (("2000", 2000), ("0.6", 0.6), ("512MiB", "512MiB"), ("null", None)):
        config = parse([f"--memory_budget={text}"], "finetune", FinetuneConfig)
        assert config is not None
        assert config.memory_budget == value and type(config.memory_budget) is type(value)


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


@pytest.mark.parametrize("verb", ["finetune", *FIRST_WORDS])
def test_help_loads_nothing_heavy(verb: str) -> None:
    code = (
        f"import sys, onward.cli; onward.cli.main(['{verb}', '--help']); "
        "assert not {'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["finetune", "verify"])
def test_a_line_comes_before_the_imports_that_take_seconds(verb: str) -> None:
    code = (
        "import sys, onward.cli\n"
        f"sys.modules['onward.recipes.{verb}'] = None\n"  # its import fails
        "try:\n"
        f"    onward.cli.main(['{verb}', '--model', 'gpt2-small'])\n"
        "except ImportError:\n"
        "    assert not {'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"onward {verb}: gpt2-small; loading torch\n"
