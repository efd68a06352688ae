"""`onward explain`: what may be named, what it shows, and what it refuses without a trace."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, T5Config, ViTConfig, WhisperConfig

import onward
from onward.cli import main, parse
from onward.module.accelerate import Accelerated
from onward.module.run import CallRun
from onward.recipes import example_models
from onward.recipes.example_models import example
from onward.recipes.explain_options import CONDITIONS, ExplainConfig
from onward.recipes.switches import Foreign

TINY: dict[str, Any] = dict(n_layer=1, n_embd=16, n_head=2, n_positions=64, vocab_size=50)  # noqa: C408
MODULE = """
import torch, onward
print("a line of the module's own")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.b(torch.tanh(self.a(x))), y)
X, Y = torch.randn(6, 8), torch.arange(6) % 3
def mapping(): return Net(), {"x": X, "y": Y}
def positions(): return Net(), (X, Y)
def both(): return Net(), (X,), {"y": Y}
def accelerated(): return onward.accelerate(Net()), (X, Y)
def wrapped(): return onward.Module(Net()), (X, Y)
def trainer():
    net = Net()
    return onward.Trainer(net, onward.optim.SGD()), (X, Y)
def fails(): raise ValueError("no data")
def nothing(): return None
def no_model(): return 3, X
def odd(): return torch.nn.Linear(3, 3), torch.ones(2, 3, dtype=torch.complex64)
NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text(MODULE)
    GPT2Config(**TINY).save_pretrained(tmp_path / "model")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("made", "package"):
            del sys.modules[name]


Said = Callable[..., dict[str, Any]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs `onward explain ... --json`; what it says, which is all of stdout."""

    def run(*words: str, status: int = 0) -> dict[str, Any]:
        at = words.index("--") if "--" in words else len(words)
        assert main(["explain", *words[:at], "--json", *words[at:]]) == status
        return json.loads(capsys.readouterr().out)

    return run


# ---- functions and folders


@pytest.mark.parametrize("name", ["mapping", "positions", "both"])
@pytest.mark.parametrize("place", ["made.py", "made"])
def test_a_functions_model_and_batch(name: str, place: str, folder: Path, said: Said) -> None:
    found = said(f"{place}:{name}")
    assert (found["model"], found["loop"], found["batch_size"]) == ("Net", "trainer", 6)
    assert found["captured"] and found["memory"]["kinds"]["optimizer"]


@pytest.mark.parametrize(("name", "loop"), [
    ("accelerated", "module"), ("wrapped", "module"), ("trainer", "trainer"),
])  # fmt: skip
def test_a_functions_own_loop_stays(name: str, loop: str, folder: Path, said: Said) -> None:
    assert said(f"made.py:{name}")["loop"] == loop


def test_a_module_within_a_package(folder: Path, said: Said) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "inner.py").write_text(MODULE)
    assert said("package.inner:both")["model"] == "Net"


def test_a_folder_with_a_configuration(folder: Path, said: Said) -> None:
    found = said(
        "model", "--batch_size", "3", "--sequence-length=8", "--memory", "1MB", "--batch_sizes=1,6",
        "--disable", "noop,gemm_add",
    )  # fmt: skip
    assert (found["dims"]["B"], found["dims"]["T"]) == (3, 8) and found[
        "model"
    ] == "GPT2LMHeadModel"
    assert [s["batch_size"] for s in found["sizes"]] == [1, 6]
    assert found["largest"]["batch_size"] > 6 and found["largest"]["memory"] == 1_000_000
    assert not {"noop", "gemm_add"} & {c["name"] for c in found["changes"]}


def test_a_loop_of_ones_own(folder: Path, said: Said) -> None:
    sizes = ("--batch_size", "2", "--sequence_length", "8")
    loss = said("model", "--loop", "module", *sizes)
    every = said("model", "--loop", "module", "--outputs", "all", *sizes)
    assert loss["loop"] == every["loop"] == "module"
    assert (loss["results"], every["results"]) == (["loss"], ["loss", "logits"])
    assert loss["memory"]["kinds"]["optimizer"], "AdamW's, as one would train it"


def test_text_and_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch_size", "2", "--sequence_length", "8"]
    assert main(["explain", "model", *sizes, "--html", "page.html", "--profile"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("GPT2LMHeadModel in onward.Trainer: B=2, T=8") and "share" in out
    assert (folder / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert {p.name for p in folder.iterdir() if p.name[0] == "."} == set(), "nothing half written"


def test_what_runs_in_eager_has_an_exit_status_of_its_own(folder: Path, said: Said) -> None:
    found = said("made.py:odd", "--loop", "module", status=1)
    assert not found["captured"] and "complex64" in found["reasons"][0]


# ---- names

SMALL = {
    "gpt2": GPT2Config(**TINY),
    "bert": BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=50, max_position_embeddings=32,
    ),
    "t5": T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50),
    "whisper": WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "vit": ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=8,
    ),
}  # fmt: skip
CLASSES = {
    "GPT2LMHeadModel": "gpt2", "GPT2ForSequenceClassification": "gpt2", "BertForMaskedLM": "bert",
    "BertForTokenClassification": "bert", "BertForQuestionAnswering": "bert",
    "BertForSequenceClassification": "bert", "T5ForConditionalGeneration": "t5",
    "ViTForImageClassification": "vit", "WhisperForConditionalGeneration": "whisper",
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_gets_a_batch_that_eager_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task that has an example; the oracle is the model itself."""
    import transformers

    kind = getattr(transformers, name)
    monkeypatch.setattr(example_models, "described", lambda _: (kind, SMALL[CLASSES[name]]))
    model, given = example(name, 3, None if "ViT" in name else 8)
    assert type(model) is kind and model.training
    assert {len(t) for t in given.values()} == {3}
    loss = model(**given).loss
    loss.backward()
    assert torch.isfinite(loss)
    trained = [p.grad is not None for p in model.parameters() if p.requires_grad]
    assert sum(trained) > len(trained) / 2


def test_every_task_with_an_example_is_tried() -> None:
    import transformers

    tried = {example_models.task_of(getattr(transformers, name)) for name in CLASSES}
    assert tried == set(example_models._BATCHES)


@pytest.mark.parametrize(("name", "kind"), [
    ("gpt2-tiny", "GPT2LMHeadModel"), ("gpt2", "GPT2LMHeadModel"), ("bert", "BertForMaskedLM"),
    ("t5", "T5ForConditionalGeneration"), ("vit", "ViTForImageClassification"),
    ("distilbert", "DistilBertForMaskedLM"), ("whisper", "WhisperForConditionalGeneration"),
    ("llama", "LlamaForCausalLM"),
    ("BertForTokenClassification", "BertForTokenClassification"),
])  # fmt: skip
def test_names_without_a_network(name: str, kind: str) -> None:
    found, config = example_models.described(name)
    assert found.__name__ == kind and config.model_type


# ---- scripts

SCRIPT = """
import sys, torch, onward
from made import Net, X, Y
print("arguments", sys.argv[1:], __name__)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
how = sys.argv[1]
open("begun", "w").close()
if how == "trainer":
    trainer = onward.Trainer(net, optimizer)
    for step in range(3):
        trainer.train_step(X, Y)
        open(f"step{step}", "w").close()
elif how in ("accelerate", "Module", "catches", "looks"):
    net = onward.Module(net) if how == "Module" else onward.accelerate(net)
    if how == "looks":
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            net(X, Y)
    with torch.no_grad():
        net(X, Y)
    for step in range(3):
        try:
            net(X, Y).backward()
        except Exception:
            pass
        optimizer.step()
        open(f"step{step}", "w").close()
elif how == "eager":
    onward.accelerate(net)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        net(X, Y).backward()
    open("step0", "w").close()
elif how == "exits":
    sys.exit(3)
elif how == "fails":
    raise RuntimeError("no data")
"""


@pytest.fixture
def script(folder: Path) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.mark.filterwarnings("ignore::onward.EagerWarning")
@pytest.mark.parametrize("how", ["trainer", "accelerate", "Module", "catches", "looks"])
def test_a_script_runs_until_its_first_step_is_done(how: str, script: Path, said: Said) -> None:
    before = (
        onward.Trainer.train_step,
        Accelerated._as_graph,
        CallRun.backward,
        Accelerated._in_eager,
    )
    path, argv = list(sys.path), sys.argv
    found = said("train.py", "--memory", "64KiB", "--", how)
    assert found["captured"] and found["model"] == "Net" and found["batch_size"] == 6
    assert found["loop"] == ("trainer" if how == "trainer" else "module")
    assert sum(item["backward"] for item in found["launches"]), "the training step, no other"
    assert found["largest"]["batch_size"] > 6
    assert (script / "begun").exists() and not list(script.glob("step*"))
    after = (
        onward.Trainer.train_step,
        Accelerated._as_graph,
        CallRun.backward,
        Accelerated._in_eager,
    )
    assert before == after and (path, argv) == (sys.path, sys.argv)


def test_a_scripts_call_that_runs_in_eager_is_what_there_is_to_say(
    script: Path, said: Said
) -> None:
    found = said("train.py", "--", "eager", status=1)
    assert not found["captured"] and "saved_tensors_hooks" in found["reasons"][0]
    assert not (script / "step0").exists()


# ---- refused

Refused = tuple[list[str], str]
REFUSED: dict[str, Refused] = {
    "no target": ([], "no model or script is given, as the first word after explain"),
    "an option first": (["--json"], "no model or script"),
    "a strange name": (["gpt3-tiny"], "no model 'gpt3-tiny', as MODEL_OR_SCRIPT"),
    "a strange word": (["qqqqqq"], "no model 'qqqqqq'"),
    "a strange option": (["model", "--memroy", "2"], "unknown option --memroy"),
    "a switch of training": (["model", "--do_train"], "unknown option --do_train"),
    "no number": (["model", "--batch_size", "many"], "batch_size is 'many', in --batch_size"),
    "no sample": (["model", "--batch_size", "0"], "batch_size is 0, in --batch_size"),
    "one token": (["model", "--sequence_length", "1"], "sequence_length is 1"),
    "too many tokens": (["model", "--sequence_length", "65"], "over the model's 64 positions"),
    "no memory": (["model", "--memory", "much"], "memory is 'much', in --memory"),
    "a share of memory": (["model", "--memory", "0.5"], "memory is '0.5', in --memory"),
    "no sizes": (["model", "--batch_sizes", "1,x"], "batch_sizes is '1,x'"),
    "a size of none": (["model", "--batch_sizes", "0"], "batch_sizes is '0'"),
    "no budget": (["model", "--memory_budget", "x"], "memory_budget is 'x'"),
    "precision of one's own loop": (
        ["model", "--mixed_precision", "bf16", "--loop", "module"], "torch.autocast decides",
    ),
    "a strange precision": (["model", "--mixed_precision", "fp8"], "mixed_precision is 'fp8'"),
    "no pass": (["model", "--disable", "nop"], "did you mean noop?"),
    "outputs of a Trainer": (["model", "--outputs", "all"], "add --loop module"),
    "a page that exists": (["model", "--html", "made.py"], "'made.py' exists, in --html"),
    "a page nowhere": (["model", "--html", "no/page.html"], "no folder 'no' to write into"),
    "an empty folder": (["empty"], "has no config.json"),
    "a broken configuration": (["broken"], "cannot load the configuration of model 'broken'"),
    "arguments of a model": (["model", "--", "x"], "only where the first word is a script"),
    "no script": (["missing.py"], "no such script 'missing.py'"),
    "no file": (["missing.py:f"], "no such file 'missing.py'"),
    "no module": (["missing:f"], "no module 'missing'"),
    "no function": (["made.py:missing"], "no function 'missing' in made.py"),
    "not a function": (["made:NUMBER"], "no function 'NUMBER' in made"),
    "a function that fails": (["made.py:fails"], "ValueError: no data, in made.py, line 19"),
    "a function of nothing": (["made.py:nothing"], "nothing returns a NoneType"),
    "a function of no model": (["made.py:no_model"], "no_model returns a int as the model"),
    "a batch of a function's": (
        ["made.py:both", "--batch_size", "2"], "the function decides batch_size",
    ),
    "a loop of a function's": (
        ["made.py:trainer", "--loop", "module"], "what the function gives decides loop, in --loop",
    ),
    "a loop of a script's": (
        ["train.py", "--loop", "module"], "the script decides loop, in --loop",
    ),
    "no ranks": (["model", "--mesh", "auto", "--ranks", "0"], "ranks is 0, in --ranks"),
    "a strange stage": (["model", "--mesh", "tp=2", "--zero", "4"], "zero is 4, in --zero"),
    "a script without steps": (["train.py", "--", "none"], "made no training step"),
    "a script that ends": (["train.py", "--", "exits"], "train.py ended (exit status 3) before"),
    "a script that fails": (
        ["train.py", "--", "fails"], "RuntimeError: no data, in train.py, line 36",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line(
    name: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script / "empty").mkdir()
    (script / "broken").mkdir()
    (script / "broken" / "config.json").write_text("{")
    words, text = REFUSED[name]
    (script / "begun").touch()
    before = {p: p.stat().st_mtime_ns for p in script.rglob("*") if p.is_file()}
    assert main(["explain", *words]) == 2
    printed = capsys.readouterr()
    line = printed.err.strip().splitlines()[-1]
    assert printed.out == "" and line.startswith("onward explain: error: ")
    assert text in line and "; fix: " in line
    after = {p: p.stat().st_mtime_ns for p in script.rglob("*") if p.is_file()}
    written = {p for p in after if p.name != "begun" and "__pycache__" not in p.parts}
    assert all(before.get(p) == after[p] for p in written)


def test_a_page_that_appears_meanwhile_is_not_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from onward.recipes import explain

    def slow(*_: Any) -> Any:
        (folder / "page.html").write_text("somebody's")
        return onward.explain(torch.nn.Linear(2, 2), torch.ones(3, 2))

    monkeypatch.setattr(explain, "explanation", slow)
    assert main(["explain", "model", "--html", "page.html"]) == 2
    assert "cannot write 'page.html'" in capsys.readouterr().err
    assert (folder / "page.html").read_text() == "somebody's"
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_a_model_that_memory_has_no_room_for(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        available = 1000

    monkeypatch.setattr(example_models.psutil, "virtual_memory", lambda: Full)
    assert main(["explain", "model"]) == 2
    assert "billion parameters" in capsys.readouterr().err


def test_every_condition_is_on_an_option_and_has_a_refusal() -> None:
    fields = set(ExplainConfig.__dataclass_fields__)
    named = [name for name, _, _ in CONDITIONS]
    assert set(named) <= fields and len(set(named)) == len(named)
    refused = " ".join(text for _, text in REFUSED.values())
    assert all(f"{name} is " in refused for name in named)


def test_options_are_typed() -> None:
    config = parse(
        ["--batch-sizes", "4", "--memory=2000"], "explain", ExplainConfig, Foreign({}, {})
    )
    assert config == ExplainConfig(batch_sizes="4", memory=2000)
    assert config is not None and config.sizes == (4,)


def test_as_a_program(script: Path) -> None:
    """stdout is the explanation alone; the script's own lines go to stderr."""
    code = textwrap.dedent("""
        import sys, onward.cli
        sys.exit(onward.cli.main(sys.argv[1:]))
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", "train.py", "--json", "--", "Module", "--flag"],
        cwd=script, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "Net"
    assert "arguments ['Module', '--flag'] __main__" in done.stderr
