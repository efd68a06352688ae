"""sentence-transformers' trainer with an accelerated SentenceTransformer: as with the eager one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_runs import assert_same_run
from tokenizing import LINES, tokenizer
from transformers import BertConfig, BertModel

import onward
from onward.errors import EagerWarning
from onward.module import accelerated

datasets = pytest.importorskip("datasets", exc_type=ImportError)
st = pytest.importorskip("sentence_transformers", exc_type=ImportError)

# sentence-transformers calls transformers' methods by names of yesterday
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small BERT and its tokenizer, saved."""
    place = str(tmp_path_factory.mktemp("bert"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def model_of(folder: str) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    words = Transformer(folder)
    return st.SentenceTransformer(modules=[words, Pooling(16)], device="cpu")


def run(model: Any, out: Path, loss: str, **changes: Any) -> Any:
    from sentence_transformers.sentence_transformer import losses

    columns: dict[str, Any] = {"anchor": LINES[:32], "positive": LINES[32:64]}
    if loss == "CosineSimilarityLoss":
        columns["score"] = [i % 2 / 1 for i in range(32)]
    datasets.disable_progress_bars()
    args = st.SentenceTransformerTrainingArguments(
        output_dir=str(out), use_cpu=True, max_steps=6, per_device_train_batch_size=8,
        learning_rate=1e-3, report_to="none", disable_tqdm=True, save_strategy="no",
        logging_steps=1, log_level="error", dataloader_pin_memory=False, **changes,
    )  # fmt: skip
    rows = datasets.Dataset.from_dict(columns)
    trainer = st.SentenceTransformerTrainer(
        model, args, train_dataset=rows, loss=getattr(losses, loss)(model)
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("loss", ["MultipleNegativesRankingLoss", "CosineSimilarityLoss"])
def test_the_trainer(loss: str, folder: str, tmp_path: Path, captures: list[int]) -> None:
    """Two forwards, or more, before each backward; logs that the model keeps change no graph."""
    model = onward.accelerate(model_of(folder))
    ours, eager = run(model, tmp_path, loss), run(model_of(folder), tmp_path, loss)
    assert_same_run(ours, eager)
    held = accelerated(model)
    assert held is not None and held.plan.launches
    assert len(captures) == 1
    with pytest.warns(EagerWarning, match="BatchEncoding"):  # what `encode` gives its model
        found = model.encode(LINES[:4], show_progress_bar=False)
    want = eager.model.encode(LINES[:4], show_progress_bar=False)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=2e-4, atol=2e-5)
