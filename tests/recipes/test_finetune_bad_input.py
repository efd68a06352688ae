"""Bad input: one clear line on stderr, exit status 2, nothing written."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from onward.cli import main
from onward.errors import CaptureError
from onward.recipes.options import FinetuneConfig
from onward.recipes.start_model import overridden


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs `finetune` with options that must be refused, and gives the one line."""

    def run(*options: str) -> str:
        monkeypatch.chdir(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert main(["finetune", *options]) == 2
        printed = capsys.readouterr()
        lines = printed.err.splitlines()
        assert len(lines) == 1, printed.err
        assert lines[0].startswith("onward finetune: error: ") and "; fix: " in lines[0]
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def test_text_files(refused, tmp_path: Path, text_file: Path) -> None:
    assert "no such file 'nope.txt', in --train_file" in refused("--train_file", "nope.txt")
    assert "no such file 'no.txt', in --validation_file" in refused(
        "--train_file", str(text_file), "--eval_file", "no.txt"
    )
    (tmp_path / "empty.txt").touch()
    assert "'empty.txt' is empty" in refused("--train-file", "empty.txt")
    (tmp_path / "blank.txt").write_text("\n\n")
    assert "'blank.txt' has no text" in refused("--train-file", "blank.txt")
    (tmp_path / "binary.txt").write_bytes(b"\x80\x00")
    assert "not UTF-8 text at byte 0" in refused("--train-file", "binary.txt")
    assert "is not a file" in refused("--train-file", str(tmp_path))
    assert "without a train file" in refused("--eval-file", str(text_file))


def test_a_type_that_no_file_is_written_in(refused) -> None:
    line = refused("--export_dtype", "fp8")
    assert "export_dtype" in line
    assert "float16" in line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("n_head=5", "no gpt2-tiny can be made with 'n_head=5'"),
        ("n_layer=0", "(num_hidden_layers is 0)"),
        ("n_layer=-1", "(num_hidden_layers is -1)"),
        ("n_embd=0", "(hidden_size is 0)"),
        ("n_embd=-8,n_head=-2", "(hidden_size is -8)"),
        ("n_head=0", "(num_attention_heads is 0)"),
        ("layers=2", "config_overrides is 'layers=2'"),
        ("n_layer", "'n_layer' is no name=value"),
        ("n_layer=two", "config_overrides is 'n_layer=two'"),
    ],
)
def test_overrides_that_make_no_model(overrides: str, said: str, refused) -> None:
    line = refused("--config_overrides", overrides, "--corpus_bytes", "300000")
    assert said in line and "in --config_overrides" in line


def test_a_decoder_has_the_layers_of_its_encoder() -> None:
    cases = {"num_layers=1": (1, 1), "num_layers=1,num_decoder_layers=3": (1, 3)}
    for overrides, layers in cases.items():
        made: Any = overridden(FinetuneConfig(task="seq2seq-lm", config_overrides=overrides), 300)
        assert (made.num_layers, made.num_decoder_layers) == layers


def test_text_shorter_than_a_block(refused, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "short.txt").write_text("def f(x): return x\n")
    options = ["--train_file", "short.txt", "--model", str(model_folder), "--block_size"]
    line = refused(*options, "64")
    assert "tokens is shorter than one block of 64, in short.txt" in line
    assert "leaves none for evaluation" in refused(*options, "9")
    (tmp_path / "longer.txt").write_text("def f(x): return x\n" * 8)
    options[1] = "longer.txt"
    line = refused(*options, "16")
    assert "do not fill one update of 8" in line


def test_block_size_over_the_positions(refused, text_file: Path, model_folder: Path) -> None:
    assert "block_size 513 is over the model's 512 positions" in refused("--block_size", "513")
    line = refused("--model", str(model_folder), "--train_file", str(text_file))
    assert "block_size 128 is over the model's 64 positions" in line


def test_ids_over_the_vocabulary(
    refused, tmp_path: Path, text: str, text_file: Path, model_folder: Path
) -> None:
    from onward.recipes.corpus import train_tokenizer

    train_tokenizer([text], 600, 64).save_pretrained(tmp_path / "larger")
    options = ["--train_file", str(text_file), "--tokenizer_name", "larger", "--block_size", "32"]
    line = refused(*options, "--model", str(model_folder))
    assert "token id 599 is over the model's vocabulary of 320 (the tokenizer has 600" in line
    assert "vocabulary of 400" in refused(*options, "--vocab_size", "400")
    assert "vocab_size is for a model from scratch" in refused(
        *options, "--model", str(model_folder), "--vocab_size", "400"
    )


def test_output_folder(refused, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for more in ([], ["--overwrite_output_dir"]):
        line = refused("--output_dir", "full", *more)
        assert "output folder 'full' is not empty, and holds no run" in line
    assert "is a file, not a folder" in refused("--output-dir", "full/x/y")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--learning-rat", "1"], "unknown option --learning-rat, on the command line; fix: did "
         "you mean --learning_rate?"),
        (["--modle", "gpt2-tiny"], "did you mean --model?"),
        (["--zzzzzz", "1"], "see --help"),
        (["corpus.txt"], "unexpected argument 'corpus.txt'"),
        (["--seed"], "option --seed has no value"),
        (["--seed", "1", "--seed", "2"], "option --seed twice"),
        (["--bf16", "--fp16"], "bf16 and fp16 together, on the command line; fix: give one"),
        (["--seed", "x"], "seed is 'x', in --seed; fix: give a whole number"),
        (["--max_steps", "1.5"], "give a whole number or null"),
        (["--engine", "ort"], "fix: give one of onward, torch"),
        (["--compare=perhaps"], "give true or false"),
        (["--learning_rate", "-1"], "learning_rate is -1.0, in --learning_rate"),
        (["--learning_rate", "nan"], "learning_rate is 'nan', in --learning_rate; fix: give"),
        (["--learning_rate", "inf"], "learning_rate is 'inf'"),
        (["--max_steps", "0"], "max_steps is 0"),
        (["--max_steps", "-1"], "max_steps is -1"),
        (["--num_train_epochs", "0"], "num_train_epochs is 0"),
        (["--per_device_train_batch_size", "0"], "per_device_train_batch_size is 0"),
        (["--per_device_eval_batch_size", "-2"], "per_device_eval_batch_size is -2"),
        (["--gradient_accumulation_steps", "0"], "gradient_accumulation_steps is 0"),
        (["--block_size", "1"], "at least 2 tokens"),
        (["--warmup_steps", "-1"], "warmup_steps is -1"),
        (["--weight_decay", "-0.1"], "weight_decay is -0.1"),
        (["--max_grad_norm", "-1"], "max_grad_norm is -1.0"),
        (["--memory_budget", "1"], "in --memory_budget; fix: give a value in bytes (2 or more)"),
        (["--memory_budget", "1.5"], "memory_budget is 1.5"),
        (["--memory_budget", "half"], "memory_budget is 'half', in --memory_budget; fix: give"),
        (["--dropout", "1"], "from 0 to below 1"),
        (["--logging_steps", "0"], "logging_steps is 0"),
        (["--save_steps", "0"], "save_steps is 0"),
        (["--save_total_limit", "0"], "save_total_limit is 0"),
        (["--save_strategy", "best"], "give one of steps, epoch, no"),
        (["--compare", "--save_steps", "5"], "in --compare with --save_steps"),
        (["--resume_from_checkpoint", "nope"], "no such checkpoint 'nope'"),
        (["--resume_from_checkpoint", "false"], "or start afresh with --overwrite_output_dir"),
        (["--engine", "torch", "--optimizer_state", "8bit"],
         "eager PyTorch keeps no optimizer_state 8bit, in --optimizer_state; fix: leave it out"),
        (["--fp16", "--skip_nonfinite", "false"], "fp16 finds its loss scale by skipping updates"),
        (["--offload_optimizer", "nvme"], "fix: give one of cpu, disk or null"),
        (["--offload_optimizer", "disk"], "the other says where, on the command line; fix: give "),
        (["--offload_dir", "there"], "offload_dir go together"),
        (["--offload_optimizer", "disk", "--offload_dir", "there"], "there takes no files (No "),
        (["--sequence_parallel"], "tp, of which mesh has one rank, on the command line; fix: "),
        (["--context_parallel_method", "star"], "give one of auto, allgather, alltoall, ring"),
        (["--vocab_size", "20"], "at least 257"),
        (["--corpus_bytes", "100"], "0 eval files"),
    ],
)  # fmt: skip
def test_options(refused, options: list[str], words: str) -> None:
    assert words in refused(*options)


def test_model_folders(refused, tmp_path: Path, text_file: Path, model_folder: Path) -> None:
    from transformers import BertConfig, T5Config

    text = ["--train_file", str(text_file), "--block_size", "32"]
    assert "no such model folder './nope'" in refused("--model", "./nope")
    assert "did you mean gpt2-tiny?" in refused("--model", "gpt2-tny")
    assert "is a file" in refused("--model", str(text_file))
    (tmp_path / "bare").mkdir()
    assert "model folder 'bare' has no config.json" in refused("--model", "bare")
    for name, config in (("bert", BertConfig()), ("t5", T5Config())):
        config.save_pretrained(tmp_path / name)
        line = refused("--model", name, *text)
        assert f"model '{name}' ({name}) is not a causal language model" in line
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert "cannot load the configuration of model 'broken'" in refused("--model", "broken", *text)
    shutil.copytree(model_folder, tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    line = refused("--model", "weightless", *text, "--engine", "torch")
    assert "cannot load the weights of model 'weightless'" in line
    (tmp_path / "tokenless").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "tokenless")
    assert "the tokenizer in 'tokenless' has no vocabulary" in refused(
        "--model", "tokenless", *text
    )
    (tmp_path / "tokenless" / "tokenizer.json").write_text("{")
    assert "cannot load a tokenizer from 'tokenless'" in refused("--model", "tokenless", *text)


def test_a_pickle_is_refused_unless_it_is_asked_for(
    refused, tmp_path: Path, text_file: Path, model_folder: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "pickled"
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    options = ["--train_file", str(text_file), "--block_size", "32", "--max_steps", "1"]
    options += ["--engine", "torch", "--model", "pickled", "--save_strategy", "no"]
    line = refused(*options)
    assert "are a pickle (pytorch_model.bin)" in line and "--allow_pickle" in line
    assert main(["finetune", *options, "--output_dir", "out", "--allow_pickle"]) == 0
    # even then only tensors are read, and no code in the file is run
    ran = tmp_path / "ran"

    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return ran.touch, ()

    torch.save({**weights, "lm_head.weight": Runs()}, folder / "pytorch_model.bin")
    assert "a pickle that holds more than tensors" in refused(*options, "--allow_pickle")
    assert not ran.exists()


def test_weights_of_another_shape(
    refused, tmp_path: Path, text_file: Path, model_folder: Path
) -> None:
    shutil.copytree(model_folder, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "n_embd": 16}))
    options = ["--train_file", str(text_file), "--block_size", "32", "--engine", "torch"]
    assert "cannot load the weights" in refused("--model", "other", *options)


@pytest.mark.parametrize("package", ["transformers", "tokenizers"])
def test_missing_extra(refused, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = refused()
    assert f"{package} is not installed" in line and "pip install 'onward[hf]'" in line


def test_model_that_cannot_be_captured(
    refused, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses:
        def __init__(self, *_: object) -> None:
            raise CaptureError(
                "cannot capture GPT2LMHeadModel, in transformer.h.0; fix: --engine torch\ndetails"
            )

    from onward.recipes import engines

    monkeypatch.setitem(engines.ENGINES, "onward", Refuses)
    line = refused("--train_file", str(text_file), "--block_size", "32", "--vocab_size", "300")
    assert line.endswith("in transformer.h.0; fix: --engine torch")
