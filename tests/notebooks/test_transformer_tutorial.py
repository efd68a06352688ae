"""The tutorial notebook, executed: by a kernel and a real MLflow server, by a server that dies, and
by pyspark's TorchDistributor. The oracle of losses is the eager loop that the notebook has."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_processes import free_port

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
SOURCE, NOTEBOOK = FOLDER / "transformer_tutorial.py", FOLDER / "transformer_tutorial.ipynb"
PROGRAM = Path(__file__).with_name("tutorial_program.py")
SECONDS = 300  # until something that does not answer is a failure
# a text, a model and a number of steps that take a second
SMALL = {
    "corpus_bytes": "60000", "epochs": "2", "emsize": "32", "nhid": "32", "lr": "0.5",
    "log_every": "1",
}  # fmt: skip
BATCHES = 15  # of an epoch, at least; the library of each Python has other words
# mlflow's, IPython's and Jupyter's own use of names of yesterday
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def environment(**more: str) -> dict[str, str]:
    """The variables of a process that imports what this one does, and sends nothing elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return {
        **kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", **more,
    }  # fmt: skip


def start(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], said: Path
) -> subprocess.Popen[bytes]:
    """A process in a group of its own, which `kill` ends. said: the file of what it says."""
    with said.open("wb") as file:
        return subprocess.Popen(
            command, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started, at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def until(reached: Callable[[], bool], what: str) -> None:
    """Waits; fails after SECONDS."""
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end, f"no {what} within {SECONDS} s"
        time.sleep(0.1)


@dataclass(frozen=True)
class Server:
    """A running `mlflow server`."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def client(self) -> Any:
        import mlflow

        return mlflow.MlflowClient(tracking_uri=self.address)

    def runs(self, experiment: str) -> dict[str, Any]:
        """The runs of an experiment, by name."""
        client = self.client()
        found = client.get_experiment_by_name(experiment)
        runs = [] if found is None else client.search_runs([found.experiment_id])
        names = [run.info.run_name for run in runs]
        assert len(set(names)) == len(names)
        return dict(zip(names, runs, strict=True))


def is_open(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def servers() -> Generator[list[Server]]:
    """The servers that tests have started; gone at the end, with all that they started."""
    made: list[Server] = []
    yield made
    for server in made:
        kill(server.process)
        until(lambda port=server.port: not is_open(port), "end of the server")


@pytest.fixture
def server(servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """MLflow's own server over SQLite: the newest, unless a test has killed it."""
    pytest.importorskip("mlflow", reason="needs onward[notebook]")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if servers and servers[-1].process.poll() is None:
        return servers[-1]
    folder = tmp_path / "mlflow"
    folder.mkdir()
    with free_port() as port:
        pass
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
        "--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'runs.db'}",
        "--default-artifact-root", str(folder / "artifacts"),
    ]  # fmt: skip
    quiet = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    made = Server(port, start(command, folder, quiet, folder / "said"))
    servers.append(made)
    until(made.answers, "answer of the server")
    return made


@contextmanager
def tutorial(
    folder: Path, settings: Mapping[str, str], variables: Mapping[str, str]
) -> Generator[tuple[subprocess.Popen[bytes], Callable[[], dict[str, Any]]]]:
    """The notebook's source as a program that has begun, and the function that waits for its end
    and returns its runs by name, its baseline and what it said."""
    result, said = folder / "result.json", folder / "said"
    command = [sys.executable, str(PROGRAM), str(SOURCE), str(result), json.dumps(settings)]
    process = start(command, folder, variables, said)

    def ended() -> dict[str, Any]:
        code = process.wait(SECONDS)
        text = said.read_text(encoding="utf-8")
        assert code == 0, text[-3000:]
        found = json.loads(result.read_bytes())
        runs = {run["name"]: run for run in found["runs"]}
        assert set(runs) == {"eager", "onward"}
        return {**runs, "baseline": found["baseline"], "said": text}

    try:
        yield process, ended
    finally:
        kill(process)


# ---- the file


def converter() -> Any:
    pytest.importorskip("nbformat", reason="needs onward[notebook]")
    spec = importlib.util.spec_from_file_location("to_ipynb", FOLDER / "to_ipynb.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ipynb_is_made_of_the_source(tmp_path: Path) -> None:
    copied = tmp_path / SOURCE.name
    shutil.copy(SOURCE, copied)
    converter().main(str(copied))
    made = copied.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert made == NOTEBOOK.read_text(encoding="utf-8")
    cells = json.loads(made)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5 and len(cells) - len(code) > 5
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    # every line of the source is in a cell, in order
    lines = "".join("".join([*cell["source"], "\n"]) for cell in cells).split("\n")
    plain = SOURCE.read_text(encoding="utf-8").replace("# MAGIC %md\n", "").split("\n")
    kept = [x.removeprefix("# MAGIC").removeprefix(" ") if x.startswith("# MAGIC") else x
            for x in plain[1:] if x != "# COMMAND ----------"]  # fmt: skip
    assert [x for x in lines if x] == [x for x in kept if x]


def test_lines_of_ipython_and_other_files() -> None:
    notebook_of = converter().notebook_of
    text = (
        "# Databricks notebook source\n# MAGIC %pip install onward\n\n# COMMAND ----------\n\nx\n"
    )
    made = notebook_of(text)
    assert [(c.cell_type, c.source) for c in made.cells] == [
        ("code", "%pip install onward"), ("code", "x"),
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="does not begin with '# Databricks notebook source'"):
        notebook_of("x = 1\n")


# ---- the notebook


@pytest.mark.slow
def test_the_notebook_trains_both_and_the_server_has_it(server: Server, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs onward[notebook]")
    nbclient = pytest.importorskip("nbclient", reason="needs onward[notebook]")
    pytest.importorskip("ipykernel", reason="needs onward[notebook]")
    settings = {f"TUTORIAL_{name.upper()}": value for name, value in SMALL.items()}
    variables = environment(
        **settings, TUTORIAL_DROPOUT="0", TUTORIAL_EXPERIMENT="notebook",
        MLFLOW_TRACKING_URI=server.address, IPYTHONDIR=str(tmp_path),
        JUPYTER_DATA_DIR=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path),
    )  # fmt: skip
    book = nbformat.read(NOTEBOOK, 4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=SECONDS, resources=where).execute(env=variables)

    told = ["".join(out.get("text", "") for out in c.get("outputs", ())) for c in book.cells]
    runs = server.runs("notebook")
    assert set(runs) == {"eager", "onward"}
    client, histories = server.client(), {}
    for name, run in runs.items():
        assert run.info.status == "FINISHED"
        assert run.data.params["engine"] == name and run.data.params["dropout"] == "0.0"
        histories[name] = {
            key: {
                point.step: point.value for point in client.get_metric_history(run.info.run_id, key)
            }
            for key in run.data.metrics
        }
        history = histories[name]
        assert set(history) == {
            "loss", "perplexity", "ms_per_batch", "learning_rate",
            "epoch", "epoch_seconds", "eval_loss", "eval_perplexity",
        }  # fmt: skip
        steps = list(history["loss"])
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2 * BATCHES
        half = len(steps) // 2
        assert all(list(history[key]) == steps for key in ("perplexity", "ms_per_batch"))
        assert min(history["ms_per_batch"].values()) > 0
        assert history["epoch"] == {half: 1.0, 2 * half: 2.0}
        rates = history["learning_rate"]
        assert (rates[half], rates[half + 1]) == pytest.approx((0.5, 0.475))
        for loss, perplexity in (("loss", "perplexity"), ("eval_loss", "eval_perplexity")):
            expected = {step: math.exp(value) for step, value in history[loss].items()}
            assert history[perplexity] == pytest.approx(expected)

    eager, mine = histories["eager"], histories["onward"]
    assert mine["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert mine["eval_loss"] == pytest.approx(eager["eval_loss"], rel=1e-5)
    [baseline] = [float(t.split()[-1]) for t in told if t.startswith("perplexity of the unigram")]
    last = max(mine["eval_perplexity"])
    assert mine["eval_perplexity"][last] < 0.75 * baseline
    assert 0.5 * baseline < math.exp(mine["loss"][1])  # it knew nothing before

    rows = {row[:24].strip(): row[24:].split() for row in told[-1].splitlines()}
    assert rows[""] == ["eager", "onward"]
    assert rows["unigram baseline"] == [f"{baseline:.1f}"] * 2
    assert rows["evaluation perplexity"] == [
        f"{histories[name]['eval_perplexity'][last]:.1f}" for name in ("eager", "onward")
    ]
    assert all(float(cell) > 0 for cell in rows["time per batch, ms"])


@pytest.mark.slow
def test_training_goes_on_where_the_server_dies(server: Server, tmp_path: Path) -> None:
    """The server ends when it has the first loss of the first run; both runs are complete. With
    dropout, whose masks are others, the losses agree in the mean."""
    variables = environment(MLFLOW_TRACKING_URI=server.address)
    settings = {**SMALL, "dropout": "0.2", "experiment": "program"}
    with tutorial(tmp_path, settings, variables) as (program, ended):

        def has_a_loss() -> bool:
            assert program.poll() is None, (tmp_path / "said").read_text(encoding="utf-8")
            return any("loss" in run.data.metrics for run in server.runs("program").values())

        until(has_a_loss, "loss at the server")
        kill(server.process)
        assert program.poll() is None
        found = ended()
    eager, mine = found["eager"], found["onward"]
    assert len(eager["losses"]) == len(mine["losses"]) >= 2 * BATCHES
    assert len(mine["eval_losses"]) == 2
    assert found["said"].count("reports to mlflow fail") >= 1
    assert "records were not delivered to mlflow" in found["said"]
    # both see the same words in the same order, under masks of their own
    assert mine["losses"] != pytest.approx(eager["losses"], rel=1e-4)
    assert sum(mine["losses"]) == pytest.approx(sum(eager["losses"]), rel=0.01)
    for run in (eager, mine):
        assert math.exp(run["eval_losses"][-1]) < 0.75 * found["baseline"]


@pytest.mark.slow
def test_torch_distributor_makes_the_losses_of_one_process(tmp_path: Path) -> None:
    """Two processes of pyspark's TorchDistributor by Onward, one process by plain PyTorch."""
    pytest.importorskip("pyspark", reason="needs onward[databricks]")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("needs a Java runtime, such as default-jre-headless")
    variables = environment(
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_SUBMIT_ARGS="--master local[1] --conf spark.ui.enabled=false pyspark-shell",
    )
    settings = {**SMALL, "dropout": "0", "epochs": "1", "processes": "2", "report_to": "none"}
    with tutorial(tmp_path, settings, variables) as (_, ended):
        found = ended()
    assert "local training with 2 processes" in found["said"]
    assert len(found["onward"]["losses"]) >= BATCHES
    for losses in ("losses", "eval_losses"):
        assert found["onward"][losses] == pytest.approx(found["eager"][losses], rel=1e-6)


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROCESSES": "3", "REPORT_TO": "none"}.items():
        monkeypatch.setenv(f"TUTORIAL_{name}", value)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "any")  # so that the program sets none
    with pytest.raises(SystemExit, match="size is 20, which 3 processes cannot share; fix: choose"):
        runpy.run_path(str(SOURCE), run_name="__main__")
