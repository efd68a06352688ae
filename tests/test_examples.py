"""The programs of `examples/` run as they stand, and train."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_programs import EXAMPLES, example


def test_every_program_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    programs = [path.name for path in EXAMPLES.glob("*.py")]
    assert programs
    assert [name for name in programs if f"`{name}" not in listed] == []


def test_gpt2_learns_a_text() -> None:
    losses = example("gpt2_from_text").main()
    assert losses[-1] < 0.6 * losses[0]


def test_gpt2_refuses_a_text_that_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("word")
    with pytest.raises(SystemExit, match="4 bytes; fix: a text of more than"):
        example("gpt2_from_text").main(str(path))


def test_bert_learns_to_classify(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = example("bert_classification").main()
    assert after < before
    assert "% right" in capsys.readouterr().out


def test_own_module_learns_and_resumes() -> None:
    first, last = example("your_own_module").main()
    assert last < 0.5 * first


def test_a_file_of_no_framework_learns() -> None:
    before, after = example("onnx_file").main()
    assert after > 0.85 > before


def test_exported_file_computes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    assert example("export_to_onnx").main(str(path)) < 1e-5
    assert path.exists()


# other packages' own use of names of yesterday, and Lightning's advice about workers
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*num_workers.*", "ignore:.*workers.*")
@pytest.mark.parametrize("name", ["lora_with_peft", "lightning_module"])
def test_loops_of_other_packages_learn(name: str) -> None:
    before, after = example(name).main()
    assert after < before - 0.2


@pytest.mark.slow
def test_two_processes_learn() -> None:
    """Started as the program's first lines say."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "data_parallel.py")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [
        float(x) for x in re.findall(r"loss (\S+) over the sequences of 2 ranks", done.stdout)
    ]
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "words", [[], ["tp=2"], ["cp=2"], ["pp=2", "pipeline_schedule=GPipe"], ["dp_shard=2", "zero=3"]]
)
def test_any_mesh_makes_the_losses_of_one_process(words: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "any_mesh.py"), *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(
        r"on one process: loss (\S+); the losses differ by (\S+) at most", done.stdout
    )
    assert found is not None and float(found[1]) < 3 and float(found[2]) < 1e-4


@pytest.mark.slow
def test_huggingface_s_trainer_learns_and_resumes(tmp_path: Path) -> None:
    before, after = example("huggingface_trainer").main(str(tmp_path))
    assert after < before - 1.0
