"""Queries and the documents that answer them: two towers whose vectors are near each other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import one_line
from onward.recipes.library_examples import functions_with_purpose, library_tables
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    MULTIPLE,
    CutTexts,
    longest,
    padding_token,
    read_tables,
    split,
)
from onward.recipes.tasks.task import Baseline, Batch, Collate, Passage, Task, TaskData, as_tensors
from onward.recipes.tower_settings import (
    DOCUMENT,
    HEAD_FILE,
    LONGEST,
    chosen_settings,
    found_file,
    keep_settings,
    read_settings,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SIDES = ("query", "document")
NAMES = {
    "query": ("query", "question", "anchor", "sentence1", "summary", "text"),
    "document": ("document", "positive", "passage", "context", "answer", "sentence2", "text"),
}
LABELS = ("label", "labels", "score")
TEACHER = "teacher_score"  # the column that a teacher writes
NEGATIVE = re.compile(r"(?:hard_)?negatives?(?:_(\d+))?")  # names of columns with wrong documents
FOUND = (1, 10)  # the k of recall@k
_TILE = 2048  # queries, and documents, whose cosines are in memory at a time


class TextRetrieval(Task):
    """The document of a query, or the score of a pair."""

    name = "text-retrieval"
    about = "the document that answers a query, by vectors of both"
    auto_class = "AutoModel"
    mapping = "MODEL_MAPPING"
    sides = ()
    shares_data = False
    fetch = ("logits", "query_embeds", "document_embeds")

    def read(self, config: FinetuneConfig) -> tuple[Table, ...]:
        """Reads tables of pairs, or functions and what their docstrings say. Where pairs need
        labels and have none, each gets a second pair that is wrong."""
        if config.train_file is None:
            tables = library_tables(functions_with_purpose, config.corpus_bytes)
        else:
            tables = read_tables(config)
        asked = config.crossing == "residual" or config.teacher_model is not None
        found: list[Table] = []
        for table in tables:
            names = columns_of(table, config)
            is_short = asked and names.label is None
            found.append(_with_wrong_ones(table, names) if is_short else table)
        return tuple(found)

    def encode(
        self,
        sources: Sequence[Table],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Tokens of both texts, and the label of a pair where there is one."""
        size = longest(config, model_config, LONGEST)
        tokenizer.padding_side = "right"  # a vector is made of a text's first state, or its last
        encoded: list[list[Row]] = []
        kinds: list[bool] = []  # whether the pairs of a table have labels
        cut = CutTexts()
        for table in sources:
            columns = columns_of(table, config)
            label, rows = columns.label, list[Row]({} for _ in table.rows)
            for side, name in columns.texts.items():
                texts = table.texts(name)
                made = tokenizer(texts, truncation=True, max_length=size, verbose=False)
                cut.add(made)
                for i, row in enumerate(rows):
                    if not made["input_ids"][i]:
                        raise InputError(
                            f"column {name!r} has no token", table.where(i), "leave that row out"
                        )
                    row |= {f"{n}.{side}": made[n][i] for n in ("input_ids", "attention_mask")}
            kinds.append(label is not None or TEACHER in table.rows[0])
            for i, row in enumerate(rows if kinds[-1] else ()):
                true = None if label is None else _label(table, i, label)
                told = table.rows[i].get(TEACHER, true)
                row |= {"labels": float(told), "_true": float(told if true is None else true)}
            encoded.append(rows)
        cut.tell(size, "texts")
        labelled = kinds[0]
        if labelled != kinds[-1]:
            with_labels, without = (sources[kinds.index(kind)].source for kind in (True, False))
            raise InputError(
                f"the pairs of {with_labels} have labels, and those of {without} none",
                "in --train_file and --validation_file",
                "give both labels, or neither",
            )
        settings = chosen_settings(config, model_config, labelled)
        if settings.crossing == "residual" and not labelled:
            raise InputError(
                "the model's residual crossing needs labelled pairs, and the table has no labels",
                "in --model_name_or_path",
                "give --label_column, or --crossing residual, which adds wrong pairs",
            )
        keep_settings(model_config, settings)
        train, held = split(sources, encoded, config)
        if labelled:
            baseline = Baseline("auc", "chance", 0.5)
        else:
            documents = len(held) * (len(_sides(held[0])) - 1)
            baseline = Baseline("recall_at_10", "chance", min(1.0, 10 / documents))
        first, second = Samples.of_rows(train), Samples.of_rows(held)
        tokens = [
            sum(int(part.lengths(n).sum()) for n in part.columns if n.startswith("input_ids."))
            for part in (first, second)
        ]
        return TaskData(first, second, baseline, tokens[0], tokens[1])

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads the queries of a batch to the longest, and its documents: inputs i64[B,T]. Negatives
        stand below all documents, whose inputs are then i64[B(1+n),T]."""
        from transformers import DataCollatorWithPadding

        pad = DataCollatorWithPadding(padding_token(tokenizer), pad_to_multiple_of=MULTIPLE)

        def collate(rows: list[Row]) -> Batch:
            batch: Batch = {}
            query, *documents = _sides(rows[0])
            for side, columns in zip(SIDES, ([query], documents), strict=True):
                own = [
                    {n: row[f"{n}.{column}"] for n in ("input_ids", "attention_mask")}
                    for column in columns
                    for row in rows
                ]
                batch |= {f"{side}_{name}": value for name, value in pad(own).items()}
            if "labels" in rows[0]:
                batch |= as_tensors({"labels": [float(row["labels"]) for row in rows]})
            return batch

        return collate

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """One loss a pair."""
        return len(batch["query_input_ids"])

    def tokens(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The tokens of queries and documents, without padding."""
        return sum(int(batch[f"{side}_attention_mask"].sum()) for side in SIDES)

    def places(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The places of both texts, padding too."""
        return sum(batch[f"{side}_input_ids"].numel() for side in SIDES)

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The query, the document, titled by the label of the pair, and negatives."""
        label = f", label {row['labels']:.3g}" if "labels" in row else ""
        return [
            Passage("query", row["input_ids.query"]),
            Passage(f"document{label}", row["input_ids.document"]),
            *(Passage(side, row[f"input_ids.{side}"]) for side in _sides(row)[2:]),
        ]

    def predictions(
        self,
        rows: Sequence[Row],
        batch: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """The (true label, logit) of each pair that has a label; else of each query its vector
        f32[D], and vectors and tokens of its document and negatives."""
        if "labels" in batch:
            true = [row["_true"] for row in rows]
            return list(zip(true, outputs["logits"].float().tolist(), strict=True))
        query, document = (outputs[f"{side}_embeds"].float().cpu().numpy() for side in SIDES)
        columns = _sides(rows[0])[1:] if rows else ()
        parts = [document[i * len(rows) : (i + 1) * len(rows)] for i in range(len(columns))]
        return [
            (query[i], [(part[i], tuple(row[f"input_ids.{column}"]))
                        for column, part in zip(columns, parts, strict=True)])
            for i, row in enumerate(rows)
        ]  # fmt: skip

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """The area under the ROC curve: of pairs with labels, where a label of 0.5 or more is a
        right pair, else of each query beside all documents. Without labels recall@k too, the share
        of queries whose document is among the k nearest of all held-out ones; negatives are
        documents there."""
        if isinstance(predictions[0][0], float):
            labels, logits = np.array(predictions, dtype=np.float64).T
            return {"auc": area_under_roc(labels >= 0.5, logits)}
        query = np.stack([vector for vector, _ in predictions])
        documents = [row[i] for i in range(len(predictions[0][1])) for _, row in predictions]
        kinds: dict[tuple[int, ...], int] = {}  # numbers of the documents' texts
        texts = np.array([kinds.setdefault(tokens, len(kinds)) for _, tokens in documents])
        return ranking_scores(query, np.stack([vector for vector, _ in documents]), texts)

    def fits(self, model_config: PreTrainedConfig) -> bool:
        """Encoders and decoders of text; those that have both need more than one text."""
        sizes = [getattr(model_config, name, None) for name in ("hidden_size", "vocab_size")]
        is_text = all(isinstance(size, int) for size in sizes)
        return super().fits(model_config) and is_text and not model_config.is_encoder_decoder

    def assembled(
        self,
        model: PreTrainedModel,
        config: FinetuneConfig,
        load: Callable[[str], PreTrainedModel],
    ) -> Any:
        """Two towers around an encoder, with what a folder of theirs has besides. Raises InputError
        where those weights have other names or shapes."""
        from onward.recipes.two_towers import TwoTowers

        settings = read_settings(model.config)
        assert settings is not None, "encode keeps them"
        name = config.model_name_or_path
        # where a model of the hub has one, its weights come beside it
        own = found_file(name, f"{DOCUMENT}/config.json") if settings.separate else None
        if own is not None:
            found_file(name, f"{DOCUMENT}/model.safetensors")
        towers = TwoTowers(model, settings, None if own is None else load(str(own.parent)))
        head = found_file(name, HEAD_FILE)
        if head is not None:
            _load_head(towers, head)
        return towers

    def tokenizer_folders(self, model_config: PreTrainedConfig) -> tuple[str, ...]:
        """A folder for each encoder."""
        settings = read_settings(model_config)
        return ("", DOCUMENT) if settings is not None and settings.separate else ("",)

    def exports(self, batch: Batch, model: Any) -> dict[str, tuple[Any, Batch]]:
        """Each tower, from tokens to vectors, and what crosses the vectors where it has weights."""
        inputs = {
            side: {n: batch[f"{side}_{n}"] for n in ("input_ids", "attention_mask")}
            for side in SIDES
        }
        found: dict[str, tuple[Any, Batch]] = {"model.onnx": (model.query, inputs["query"])}
        if model.settings.separate:
            found[f"{DOCUMENT}/model.onnx"] = (model.document, inputs["document"])
        if model.settings.labelled:
            vectors = batch["query_input_ids"].new_zeros(2, model.config.hidden_size).float()
            pair = {"query_embeds": vectors, "document_embeds": vectors + 1}
            found["crossing.onnx"] = (model.crossing, pair)
        return found


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a table of pairs. texts: their names by what they are: `query`, `document`,
    and `negative_1` and so on, which are wrong documents. label: None where pairs have none."""

    texts: dict[str, str]
    label: str | None

    @property
    def negatives(self) -> list[str]:
        """The names of the columns with wrong documents."""
        return [name for side, name in self.texts.items() if side not in SIDES]


def columns_of(table: Table, config: FinetuneConfig) -> Columns:
    """The columns of queries, of documents, of negatives and of labels. Raises InputError where a
    text has none, and for negatives beside labels."""
    given = [name for name in (config.text_column or "").split(",") if name]
    if len(given) > 2:
        raise InputError(
            f"{len(given)} columns are named ({', '.join(given)})",
            "in --text_column",
            "name those of query and document; columns negative, negative_1, ... are found by name",
        )
    usual = ("summary", "text") if config.train_file is None else (None, None)
    asked = [*given, *usual[len(given) :]][:2]
    query = table.column(asked[0], NAMES["query"], "text_column")
    others = [name for name in NAMES["document"] if name != query]
    document = table.column(asked[1], others, "text_column")
    if config.label_column is not None:
        label = table.column(config.label_column, (), "label_column")
    else:
        known = (name for name in LABELS if name in table.rows[0])
        label = next((name for name in known if name not in (query, document)), None)
    negatives = sorted(
        (int(found[1] or 0), name)
        for name in table.rows[0]
        if (found := NEGATIVE.fullmatch(name)) and name not in (query, document, label)
    )
    if negatives and label is not None:
        raise InputError(
            f"column {negatives[0][1]!r} has negatives, and column {label!r} labels",
            f"in {table.source}",
            "leave one of them out, or make pairs with a label of 0 of the negatives",
        )
    wrong = {f"negative_{i}": name for i, (_, name) in enumerate(negatives, 1)}
    return Columns({"query": query, "document": document, **wrong}, label)


def pairs_of(table: Table, config: FinetuneConfig) -> list[tuple[str, str]]:
    """The texts of each pair of a table."""
    found = columns_of(table, config).texts
    return list(zip(table.texts(found["query"]), table.texts(found["document"]), strict=True))


def _sides(row: Mapping[str, Any]) -> list[str]:
    """What the texts of a sample are: `query`, `document`, then negatives."""
    return [name.partition(".")[2] for name in row if name.startswith("input_ids.")]


def _label(table: Table, index: int, name: str) -> float:
    """The label of a pair, from 0 to 1. Raises InputError for another."""
    value = table.rows[index].get(name)
    try:
        found = float(value)  # type: ignore[arg-type]
        if 0 <= found <= 1:
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(
        f"label {one_line(repr(value), 40)} is no number from 0 to 1",
        table.where(index),
        "give 1 for a right pair",
    )


def _with_wrong_ones(table: Table, columns: Columns) -> Table:
    """The pairs with a label of 1, and behind each its query with a wrong document and a label of
    0: with its negatives, else with a document of another pair. Raises InputError where all
    documents are one."""
    document, negatives = columns.texts["document"], columns.negatives
    texts = table.texts(document)
    if not negatives and len(set(texts)) < 2:
        raise InputError(
            "all pairs have one document", f"in {table.source}", "give pairs with others too"
        )
    others = [table.texts(name) for name in negatives] or [_drawn(texts)]
    rows: list[dict[str, Any]] = []
    for i, row in enumerate(table.rows):
        pair = {name: value for name, value in row.items() if name not in negatives}
        rows.append({**pair, "label": 1})
        rows += [{**pair, document: wrong[i], "label": 0} for wrong in others]
    lines = tuple(line for line in table.lines for _ in range(1 + len(others)))
    return dataclasses.replace(table, rows=tuple(rows), lines=lines)


def _drawn(texts: Sequence[str]) -> list[str]:
    """For each text another one, at random but always the same."""
    drawn = np.random.Generator(np.random.PCG64(0))
    found: list[str] = []
    for i, text in enumerate(texts):
        j = i
        while texts[j] == text:
            j = int(drawn.integers(len(texts)))
        found.append(texts[j])
    return found


def _load_head(towers: Any, path: Path) -> None:
    """Reads the weights that encoders do not have into towers, in place. Raises InputError for
    others than theirs."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    own = towers.head()
    try:
        found = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error})", "in --model_name_or_path", "name another"
        ) from error
    for name, value in own.items():
        if name not in found:
            continue  # of settings that the options have changed
        if found[name].shape != value.shape or not found[name].is_floating_point():
            raise InputError(
                f"{name} in {str(path)!r} is {list(found[name].shape)}, not {list(value.shape)}",
                "in --model_name_or_path",
                "name a folder whose files belong together",
            )
        value.copy_(found[name])


def area_under_roc(right: np.ndarray, scores: np.ndarray) -> float:
    """The chance that a right one of two has the larger score; equal ones count half. right:
    bool[N]. scores: f64[N]. 0.5 where all are right, or none."""
    positive = int(right.sum())
    negative = right.size - positive
    if not positive or not negative:
        return 0.5
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1, the mean of equal ones
    return float((ranks[right].sum() - positive * (positive + 1) / 2) / (positive * negative))


def ranking_scores(query: np.ndarray, documents: np.ndarray, texts: np.ndarray) -> dict[str, float]:
    """Recall@k of each query's document among all, and the area under the ROC curve of all pairs,
    by the cosines of unit vectors. Documents with one cosine are in random order: recall is the
    mean over all orders. A document with the text of the own one counts in neither score.

    query: f32[N,D]. documents: f32[M,D], the own ones first. texts: i64[M], a number for each text.
    """
    count = len(query)
    rows = _tiles(0, count)
    own = np.concatenate([np.diag(query[part] @ documents[part].T) for part in rows])
    own = np.where(np.isnan(own), -np.inf, own)  # a model without numbers finds nothing
    scores, nearer, level = np.sort(own), np.zeros(count), np.zeros(count)
    lower = equal = wrong = 0  # of pairs of a right and a wrong one: those in order, and ties
    for part in rows:
        for columns in (*rows, *_tiles(count, len(documents))):
            cosines, right = query[part] @ documents[columns].T, own[part, None]
            other = texts[part, None] != texts[columns]
            ties = ((cosines == right) & other).sum(1)
            nearer[part] += (~(cosines < right) & other).sum(1) - ties
            level[part] += ties
            found = np.sort(cosines[other])
            places = [np.searchsorted(found, scores, side) for side in ("left", "right")]
            lower += int(places[0].sum())
            equal += int((places[1] - places[0]).sum())
            wrong += found.size
    recall = {
        f"recall_at_{k}": float(np.clip((k - nearer) / (level + 1), 0, 1).mean()) for k in FOUND
    }
    return {**recall, "auc": (lower + equal / 2) / (count * wrong) if wrong else 0.5}


def _tiles(first: int, end: int) -> list[slice]:
    return [slice(i, min(i + _TILE, end)) for i in range(first, end, _TILE)]


__all__ = [
    "TEACHER",
    "Columns",
    "TextRetrieval",
    "area_under_roc",
    "columns_of",
    "pairs_of",
    "ranking_scores",
]
