"""Small texts and models for the recipes' tests; no network."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def text() -> str:
    """40 kB of real Python source."""
    return inspect.getsource(argparse)[:40_000]


@pytest.fixture
def text_file(tmp_path: Path, text: str) -> Path:
    """The text as a file with WikiText's suffix."""
    path = tmp_path / "corpus" / "wiki.train.tokens"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """A tiny GPT-2 with its tokenizer, as save_pretrained writes them: 64 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from onward.recipes.corpus import train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([text], 320, 64)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)  # a session's fixture comes before the one that does so for each test
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """A complete run from scratch by eager PyTorch, with a checkpoint after update 2."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(text, encoding="utf-8")
    words = ["--config_overrides", "n_layer=1,n_embd=16,n_head=2", "--engine", "torch"]
    for name, value in {
        "vocab_size": 300, "block_size": 16, "max_steps": 3, "save_steps": 2,
        "learning_rate": 0.05, "max_train_samples": 64, "max_eval_samples": 2,
    }.items():  # fmt: skip
        words += [f"--{name}", str(value)]
    words += ["--train_file", str(folder / "text.txt"), "--output_dir", str(folder / "out")]
    from onward.cli import main

    assert main(["finetune", *words]) == 0
    return folder / "out"
