# Databricks notebook source
# MAGIC %md
# MAGIC # A transformer language model, without and with Onward
# MAGIC
# MAGIC PyTorch's tutorial on `nn.Transformer` trains a small encoder to say the next word of
# MAGIC WikiText-2. This notebook trains the same model twice: by a plain PyTorch loop, and by
# MAGIC `onward.Trainer`, which runs forward, loss, backward, clipping and update as one graph.
# MAGIC One flag of `train` decides. Time per batch, loss and perplexity go to MLflow, and a
# MAGIC table at the end compares both.
# MAGIC
# MAGIC Without a text the notebook reads the sources of Python's own library, so that it runs
# MAGIC anywhere without a network. Each setting below can be given as an environment variable
# MAGIC with `TUTORIAL_` before its name, as in `TUTORIAL_TRAIN_FILE`, and on Databricks by a
# MAGIC widget.

# COMMAND ----------

import importlib.util
import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onward
from onward.recipes.corpus import python_library

# COMMAND ----------

# MAGIC %md
# MAGIC ## Settings
# MAGIC
# MAGIC The model, the batches and the optimizer are those of the tutorial.

# COMMAND ----------


@dataclass(frozen=True)
class Settings:
    """Settings of the notebook; those of the tutorial by default."""

    train_file: str = ""  # text to train on; without it, Python's library
    eval_file: str = ""  # text to evaluate on; without it, the last tenth of the text
    corpus_bytes: int = 600_000  # how much of Python's library is read
    epochs: int = 3
    emsize: int = 200  # width of the model
    nhid: int = 200  # width of the feed-forward layers
    nlayers: int = 2
    nhead: int = 2
    dropout: float = 0.2
    bptt: int = 35  # words of a window
    batch_size: int = 20
    eval_batch_size: int = 10
    lr: float = 5.0
    gamma: float = 0.95  # factor of the learning rate after each epoch
    clip: float = 0.5  # largest norm of the gradients
    seed: int = 0
    processes: int = 1  # more than one: TorchDistributor starts so many
    local_mode: int = 1  # 1: they run on this machine; 0: on the workers of the cluster
    report_to: str = "mlflow"  # "none": nowhere
    experiment: str = "onward-tutorial"  # in MLflow; a path such as /Shared/name on Databricks
    log_every: int = 10  # batches of one point in MLflow


def setting(name: str, default: Any) -> Any:
    """The widget on Databricks, the environment variable elsewhere, or the default."""
    text = os.environ.get(f"TUTORIAL_{name.upper()}", str(default))
    if tools := globals().get("dbutils"):
        tools.widgets.text(name, text)
        text = tools.widgets.get(name)
    return type(default)(text)


SETTINGS = Settings(**{each.name: setting(each.name, each.default) for each in fields(Settings)})
os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", SETTINGS.experiment)
if SETTINGS.report_to == "mlflow" and importlib.util.find_spec("mlflow") is None:
    print('nothing is logged: mlflow is not installed; fix: pip install "onward[notebook]"')
    SETTINGS = Settings(**{**asdict(SETTINGS), "report_to": "none"})
if SETTINGS.batch_size % SETTINGS.processes:
    raise SystemExit(
        f"batch_size is {SETTINGS.batch_size}, which {SETTINGS.processes} processes cannot share; "
        "fix: choose a multiple"
    )

# COMMAND ----------

# MAGIC %md
# MAGIC ## Words
# MAGIC
# MAGIC The text is one long row of word numbers. It is cut into `batch_size` columns of equal
# MAGIC length, which are read side by side in windows of `bptt` words. The target of each word
# MAGIC is the one after it.

# COMMAND ----------

UNKNOWN = "<unk>"


def words_of(text: str) -> list[str]:
    """Lower-case words, numbers and single signs, in order."""
    return re.findall(r"<unk>|\w+|[^\w\s]", text.lower())


def read_texts(settings: Settings) -> tuple[list[str], list[str]]:
    """The words to train on, and those to evaluate on."""
    if not settings.train_file:
        train_side, eval_side = python_library(settings.corpus_bytes)
        return words_of("\n".join(train_side.documents)), words_of("\n".join(eval_side.documents))
    train = words_of(Path(settings.train_file).read_text(encoding="utf-8"))
    if settings.eval_file:
        return train, words_of(Path(settings.eval_file).read_text(encoding="utf-8"))
    cut = len(train) * 9 // 10
    return train[:cut], train[cut:]


def columns(words: list[str], numbers: dict[str, int], count: int) -> Tensor:
    """The text as columns side by side: i64[words of a column, count]."""
    ids = torch.tensor([numbers.get(word, numbers[UNKNOWN]) for word in words])
    length = len(ids) // count
    return ids[: length * count].view(count, length).t().contiguous()


def windows(text: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of the columns with their targets, i64[length, B]; a shorter rest is left out."""
    for start in range(0, len(text) - length, length):
        yield text[start : start + length], text[start + 1 : start + length + 1]


train_words, eval_words = read_texts(SETTINGS)
vocabulary = {word: i for i, word in enumerate(dict.fromkeys([UNKNOWN, *train_words]))}
train_text = columns(train_words, vocabulary, SETTINGS.batch_size)
eval_text = columns(eval_words, vocabulary, SETTINGS.eval_batch_size)
if min(len(train_text), len(eval_text)) <= SETTINGS.bptt:
    raise SystemExit("the text has no whole window of words; fix: give a longer one")
print(f"{len(train_words)} words to train on, {len(vocabulary)} different ones")

# COMMAND ----------

# MAGIC %md
# MAGIC The baseline is a model that knows how frequent each word is and nothing else (add-one
# MAGIC smoothing). A model that has learned anything about order is below its perplexity.

# COMMAND ----------


def unigram_perplexity() -> float:
    """Perplexity of the evaluation text under the frequencies of the training text."""
    counts = Counter(train_text.flatten().tolist())
    total = train_text.numel() + len(vocabulary)
    targets = [y for _, target in windows(eval_text, SETTINGS.bptt) for y in target.flatten()]
    logs = [math.log((counts[int(y)] + 1) / total) for y in targets]
    return math.exp(-sum(logs) / len(logs))


baseline = unigram_perplexity()
print(f"perplexity of the unigram baseline: {baseline:.1f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The model
# MAGIC
# MAGIC Word vectors, sines and cosines for the places, encoder layers that may not look ahead,
# MAGIC and a linear layer back to the words.

# COMMAND ----------


class WordModel(nn.Module):
    """A causal transformer over words: i64[T, B] -> f32[T, B, V], the logits of the next word."""

    def __init__(self, words: int, settings: Settings) -> None:
        super().__init__()
        width, length = settings.emsize, settings.bptt
        self.scale = math.sqrt(width)
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(settings.dropout)
        layer = nn.TransformerEncoderLayer(width, settings.nhead, settings.nhid, settings.dropout)
        self.encoder = nn.TransformerEncoder(layer, settings.nlayers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
        places = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)  # [T, D]
        self.register_buffer("places", places[:, None])
        ahead = torch.full((length, length), -math.inf).triu(1)
        self.register_buffer("ahead", ahead)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(words) * self.scale + self.places)
        return self.head(self.encoder(hidden, mask=self.ahead))


def next_word_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the next word: f32[T, B, V], i64[T, B] -> f32[]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


# COMMAND ----------

# MAGIC %md
# MAGIC ## The two loops
# MAGIC
# MAGIC Everything that differs is in this cell. Both take the same optimizer; its schedule goes
# MAGIC on outside.

# COMMAND ----------

Step = Callable[[Tensor, Tensor], float]


def eager_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Step]:
    """A training step and an evaluation of plain PyTorch, which return the loss of a batch."""

    def step(source: Tensor, target: Tensor) -> float:
        model.train()
        optimizer.zero_grad()
        loss = next_word_loss(model(source), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
        optimizer.step()
        return float(loss.detach())

    def evaluate(source: Tensor, target: Tensor) -> float:
        model.eval()
        with torch.no_grad():
            return float(next_word_loss(model(source), target))

    return step, evaluate


def onward_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int
) -> tuple[Step, Step]:
    """Both by Onward. ranks: processes that train the model, each on its own columns."""
    trainer = onward.Trainer(
        model,
        optimizer,
        loss_fn=next_word_loss,
        options=onward.TrainerOptions(
            max_grad_norm=SETTINGS.clip,
            seed=SETTINGS.seed,
            mesh={"dp_replicate": ranks} if ranks > 1 else None,
        ),
    )

    def step(source: Tensor, target: Tensor) -> float:
        return float(trainer.train_step(source, target).loss)

    def evaluate(source: Tensor, target: Tensor) -> float:
        return float(trainer.eval_step(source, target).loss)

    return step, evaluate


# COMMAND ----------

# MAGIC %md
# MAGIC ## Training
# MAGIC
# MAGIC `onward.Reporter` sends the numbers to MLflow from a thread of its own. A server that is
# MAGIC slow or down costs points in its charts and one line here, not time, and never the run.

# COMMAND ----------


@dataclass
class Run:
    """Losses and seconds of each batch of one run, and losses of the evaluations, one an epoch."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)


def train(use_onward: bool) -> Run:
    """Trains a new model, and reports to MLflow. With Onward, processes of TorchDistributor train
    it together, each on its own columns of every batch."""
    rank, ranks = 0, 1
    if use_onward and "RANK" in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    torch.manual_seed(SETTINGS.seed)
    model = WordModel(len(vocabulary), SETTINGS)
    optimizer = torch.optim.SGD(model.parameters(), lr=SETTINGS.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=SETTINGS.gamma)
    if use_onward:
        step, evaluate = onward_steps(model, optimizer, ranks)
    else:
        step, evaluate = eager_steps(model, optimizer)
    run = Run("onward" if use_onward else "eager")
    config = {**asdict(SETTINGS), "engine": run.name, "words": len(vocabulary)}
    report_to = SETTINGS.report_to if rank == 0 else "none"
    with onward.Reporter(report_to, run_name=run.name, config=config, tell=print) as reporter:
        for epoch in range(1, SETTINGS.epochs + 1):
            epoch_start = time.perf_counter()
            for source, target in windows(train_text[:, rank::ranks], SETTINGS.bptt):
                started = time.perf_counter()
                run.losses.append(step(source, target))
                run.seconds.append(time.perf_counter() - started)
                if len(run.losses) % SETTINGS.log_every == 0:
                    reporter.log(len(run.losses), newest(run, optimizer))
            epoch_seconds = time.perf_counter() - epoch_start
            evaluations = [evaluate(*window) for window in windows(eval_text, SETTINGS.bptt)]
            loss = statistics.fmean(evaluations)
            run.eval_losses.append(loss)
            metrics = {"epoch": epoch, "epoch_seconds": epoch_seconds, "eval_loss": loss}
            reporter.log(len(run.losses), {**metrics, "eval_perplexity": math.exp(loss)})
            if rank == 0:
                told = f"loss {loss:.3f}, perplexity {math.exp(loss):.1f} on the evaluation text"
                print(f"{run.name}, epoch {epoch}: {epoch_seconds:.1f} s, {told}")
            schedule.step()
    if ranks > 1:
        torch.distributed.destroy_process_group()
    return run


def newest(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The metrics of the batches since the last point, as means."""
    loss = statistics.fmean(run.losses[-SETTINGS.log_every :])
    seconds = statistics.fmean(run.seconds[-SETTINGS.log_every :])
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "ms_per_batch": 1000 * seconds,
        "learning_rate": optimizer.param_groups[0]["lr"],
    }


# COMMAND ----------

# MAGIC %md
# MAGIC Without Onward, then with it: one flag. With `processes` above one, pyspark's
# MAGIC TorchDistributor starts the second run in so many processes, which share every batch.
# MAGIC Without dropout its losses are those of one process; with it, they draw other masks.

# COMMAND ----------

runs = [train(use_onward=False)]
if SETTINGS.processes == 1:
    runs.append(train(use_onward=True))
else:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    SparkSession.builder.getOrCreate()  # the cluster's on Databricks, else one on this machine
    distributor = TorchDistributor(
        num_processes=SETTINGS.processes, local_mode=bool(SETTINGS.local_mode), use_gpu=False
    )
    runs.append(distributor.run(train, True))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Both side by side
# MAGIC
# MAGIC The first batch of Onward has the capture and the compilation in it. The time per batch
# MAGIC is the median of the others.

# COMMAND ----------


def table(runs: list[Run]) -> str:
    """The runs side by side, one column each."""
    rows: dict[str, Callable[[Run], str]] = {
        "first batch, s": lambda run: f"{run.seconds[0]:.2f}",
        "time per batch, ms": lambda run: f"{1000 * statistics.median(run.seconds[1:]):.1f}",
        "all batches, s": lambda run: f"{sum(run.seconds):.1f}",
        "loss of the last batch": lambda run: f"{run.losses[-1]:.4f}",
        "evaluation loss": lambda run: f"{run.eval_losses[-1]:.4f}",
        "evaluation perplexity": lambda run: f"{math.exp(run.eval_losses[-1]):.1f}",
    }
    lines = [["", *(run.name for run in runs)]]
    lines += [[name, *(show(run) for run in runs)] for name, show in rows.items()]
    lines += [["unigram baseline", *(f"{baseline:.1f}" for _ in runs)]]
    return "\n".join(
        f"{line[0]:24}" + "".join(f"{cell:>12}" for cell in line[1:]) for line in lines
    )


print(table(runs))
