"""`onward search`: the documents that two towers find for a query; and the vectors of a run's
documents, which it writes when it is complete."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from onward.checkpoint import StagedFiles
from onward.errors import one_line
from onward.recipes.found_model import find_model, load_model_tokenizer
from onward.recipes.model_size import positions_of
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.search_options import SearchConfig
from onward.recipes.start_model import build_model, load_model_config
from onward.recipes.tower_settings import DOCUMENTS, INDEX, LONGEST, read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from onward.recipes.two_towers import Tower, TwoTowers

_WHERE = "as RUN"
_ROWS = 32  # of a batch
MOST = 100_000  # documents of an index
_SHOWN = 96  # characters of a document


@dataclass(frozen=True)
class Hit:
    """A document that was found. score: the cosine, or with labels the logit of the pair. number:
    the document's in the index, from 0."""

    score: float
    number: int
    text: str


def search(name: str, config: SearchConfig) -> int:
    """Prints the nearest documents for each query; returns the exit status. Raises InputError for a
    folder without towers or index."""
    found = find_model(name, _WHERE)
    folder = Path(found.weights)
    towers = load_towers(folder)
    tokenizer = load_model_tokenizer(found)
    longest = LONGEST if found.record is None else found.run_options().max_seq_length or LONGEST
    vectors, texts = read_index(folder, towers.config.hidden_size)
    queries = config.queries or (line for line in map(str.rstrip, sys.stdin) if line)
    for query in queries:
        hits = nearest(towers, tokenizer, query, vectors, texts, config.k, longest)
        print(_shown(query, hits, config.json), flush=True)
    return 0


def load_towers(folder: Path) -> TwoTowers:
    """Two towers from the folder of a complete run, in evaluation mode. Raises InputError for a
    folder without."""
    config = FinetuneConfig(task="text-retrieval", model_name_or_path=str(folder))
    model_config = load_model_config(config)
    if read_settings(model_config) is None:
        raise InputError(
            f"{str(folder)!r} has no towers",
            _WHERE,
            "name a complete run of onward finetune --task text-retrieval",
        )
    towers: Any = build_model(config, model_config)
    return towers.eval()


def embed(
    tower: Tower, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], longest: int = LONGEST
) -> torch.Tensor:
    """The vectors f32[N,D] of texts. longest: tokens of a text, of which the rest is cut off."""
    tokenizer_of: Any = tokenizer
    most = min(longest, positions_of(tower.encoder.config) or longest)  # type: ignore[arg-type]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
    found: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    with torch.no_grad():
        for start in range(0, len(order), _ROWS):
            part = order[start : start + _ROWS]
            batch = tokenizer_of(
                [texts[i] for i in part], truncation=True, max_length=most, padding=True,
                padding_side="right", return_tensors="pt",
            )  # fmt: skip
            vectors = tower(batch["input_ids"], batch["attention_mask"])
            for i, vector in zip(part, vectors, strict=True):
                found[i] = vector
    return torch.stack(found)


def nearest(
    towers: TwoTowers,
    tokenizer: PreTrainedTokenizerBase,
    query: str,
    vectors: torch.Tensor,
    texts: list[str],
    k: int,
    longest: int = LONGEST,
) -> list[Hit]:
    """The k documents with the largest score beside a query. vectors: f32[N,D], of the texts."""
    if not tokenizer(query)["input_ids"]:
        raise InputError("the query has no token", "in --query", "give some text")
    [asked] = embed(towers.query, tokenizer, [query], longest)
    with torch.no_grad():
        if towers.settings.labelled:
            scores = towers.crossing(asked.expand_as(vectors), vectors)
        else:
            scores = vectors @ asked
    best = scores.topk(min(k, len(texts)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [Hit(score, number, texts[number]) for score, number in pairs]


def write_index(
    folder: Path, tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], longest: int
) -> tuple[TwoTowers, torch.Tensor, list[str]]:
    """Writes the vectors of documents, each once, and their texts beside the towers that the folder
    holds. Returns the towers, the vectors f32[N,D] and the texts."""
    texts = list(dict.fromkeys(documents))[:MOST]
    towers = load_towers(folder)
    vectors = embed(towers.document, tokenizer, texts, longest)
    with StagedFiles(folder) as staged:
        save_file({"embeddings": vectors}, staged.path / INDEX)
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        (staged.path / DOCUMENTS).write_text("".join(lines), encoding="utf-8")
        staged.publish()
    return towers, vectors, texts


def read_index(folder: Path, width: int) -> tuple[torch.Tensor, list[str]]:
    """The vectors f32[N,D] of documents and their texts. width: D. Raises InputError where there is
    no index, and for one that does not belong together."""
    try:
        vectors = load_file(folder / INDEX)["embeddings"]
        lines = (folder / DOCUMENTS).read_text(encoding="utf-8").split("\n")[:-1]
        texts = [str(json.loads(line)["text"]) for line in lines]
        if vectors.shape != (len(texts), width) or vectors.dtype != torch.float32:
            raise ValueError(f"{vectors.dtype} {list(vectors.shape)} for {len(texts)} texts")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(folder)!r} has no index of documents ({one_line(repr(error), 120)})",
            _WHERE,
            "name a complete run of onward finetune --task text-retrieval",
        ) from error
    return vectors, texts


def shown_hits(hits: Sequence[Hit]) -> list[str]:
    """Lines with the scores and the beginnings of documents."""
    return [f"  {hit.score:7.4f}  {one_line(' '.join(hit.text.split()), _SHOWN)}" for hit in hits]


def _shown(query: str, hits: Sequence[Hit], as_json: bool) -> str:
    if as_json:
        return json.dumps({"query": query, "hits": [asdict(hit) for hit in hits]})
    return "\n".join([f"query: {one_line(query, _SHOWN)}", *shown_hits(hits), ""])


__all__ = [
    "Hit",
    "embed",
    "load_towers",
    "nearest",
    "read_index",
    "search",
    "shown_hits",
    "write_index",
]
