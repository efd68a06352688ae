"""Each service by its own package: what a run sends is there, once, and a run that is resumed goes
on. Packages that are not installed are left out; nothing leaves the machine."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward

CONFIG = {"lr": 1e-3, "long": "x" * 7000, "model": {"name": "gpt2", "dropout": None}, "odd:=(": 1}
UNSET = (
    "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "TENSORBOARD_LOGGING_DIR",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "WANDB_PROJECT", "WANDB_DIR",
)  # fmt: skip
# torch's and tensorboard's own modules, and those of the services, when they are first imported
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def nothing_leaves_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # "" first, so that what a test or a package sets is taken back
    for name in UNSET:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def told() -> list[str]:
    return []


def run(service: str, steps: range, told: list[str], **more: Any) -> None:
    """One process's part of a run in the folder `run`. Neither the Reporter nor its threads draw
    from generators that the training loop may draw from."""
    settings = {"folder": "run", "config": CONFIG, **more}
    state = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()
    with onward.Reporter(service, tell=told.append, **settings) as reporter:
        for step in steps:
            reporter.log(step, metrics(step))
        reporter.close(30.0)
    now = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()
    np.testing.assert_equal(now, state)


def metrics(step: int) -> dict[str, float]:
    return {"loss": 1 / step, "eval_loss": 2.0, "odd (%)": float(step), "nan": math.nan}


# ---- TensorBoard


def accumulated(folder: Path) -> Any:
    """What TensorBoard's own reader makes of a folder, every point of it."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = module.EventAccumulator(str(folder), {"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by the name of a metric."""
    read = accumulated(folder)
    names = read.Tags()["scalars"]
    return {name: [(x.step, x.value) for x in read.Scalars(name)] for name in names}


def test_tensorboard_shows_a_run_and_its_resumption_as_one(tmp_path: Path, told: list[str]) -> None:
    pytest.importorskip("tensorboard")
    run("tensorboard", range(1, 8), told)
    run("tensorboard", range(5, 11), told)  # from a checkpoint at 4
    found = scalars(tmp_path / "run" / "tensorboard")
    assert set(found) == {"train/loss", "eval/loss", "train/odd (%)", "train/nan"}
    assert [step for step, _ in found["train/loss"]] == list(range(1, 11))
    np.testing.assert_allclose([v for _, v in found["train/loss"]], [1 / s for s in range(1, 11)])
    assert all(math.isnan(value) for _, value in found["train/nan"])
    [text] = accumulated(tmp_path / "run" / "tensorboard").Tensors("config/text_summary")
    assert '"model.name": "gpt2"' in text.tensor_proto.string_val[0].decode()
    assert told == []
    assert not (tmp_path / "run" / "reports.json").exists()  # its folder is its name


def test_tensorboard_has_the_folder_that_was_named(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    run("tensorboard", range(1, 3), told, logging_dir=tmp_path / "given")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "by variable"))
    run("tensorboard", range(1, 3), told)
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    run("tensorboard", range(1, 3), told, folder=None)
    places = [tmp_path / "given", tmp_path / "by variable", *(tmp_path / "runs").iterdir()]
    assert len(places) == 3
    for place in places:
        assert [step for step, _ in scalars(place)["train/loss"]] == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_on_a_full_disk(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tf = pytest.importorskip("tensorboard.compat").tf
    write, full = tf.io.gfile.GFile.write, [True]

    def no_space(self: Any, content: Any) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write(self, content)

    monkeypatch.setattr(tf.io.gfile.GFile, "write", no_space)
    before = set(threading.enumerate())
    with onward.Reporter("tensorboard", folder="run", tell=told.append) as reporter:
        for step in range(1, 5):
            reporter.log(step, metrics(step))
        while not told:
            threading.Event().wait(0.01)
        full.clear()
    # the writer's own thread ends with the error: within this test, not within the next one
    for thread in set(threading.enumerate()) - before:
        thread.join(30.0)
    assert "OSError" in told[0] and "No space left" in told[0]
    found = scalars(tmp_path / "run" / "tensorboard")["train/loss"]
    lost = sum(int(line.split()[0]) for line in told[1:])
    assert [step for step, _ in found] == list(range(1 + lost, 5))


# ---- MLflow


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """MLflow with its files in the test's folder."""
    found = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    found.set_tracking_uri((tmp_path / "store").as_uri())
    yield found
    found.set_tracking_uri(None)


def kept_id() -> str:
    return json.loads(Path("run/reports.json").read_bytes())["mlflow"]


def history(mlflow: Any, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(run_id, key)]


def test_mlflow_has_a_run_and_its_resumption_as_one(mlflow: Any, told: list[str]) -> None:
    run("mlflow", range(1, 8), told, run_name="mine")
    first = kept_id()
    run("mlflow", range(5, 11), told, config={**CONFIG, "lr": 5.0, "more": 1})
    assert kept_id() == first and told == []
    found = mlflow.MlflowClient().get_run(first)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "mine")
    expected = {"lr": "0.001", "long": "x" * 247 + "...", "model.name": "gpt2", "more": "1"}
    assert found.data.params == {**expected, "model.dropout": "None", "odd:__": "1"}
    assert history(mlflow, first, "loss") == [(step, 1 / step) for step in range(1, 11)]
    assert [step for step, _ in history(mlflow, first, "odd ___")] == [*range(1, 11)]
    assert all(math.isnan(value) for _, value in history(mlflow, first, "nan"))
    assert mlflow.active_run() is None


def test_mlflow_writes_into_the_run_that_the_user_has_begun(mlflow: Any, told: list[str]) -> None:
    with mlflow.start_run(run_name="theirs") as theirs:
        run("mlflow", range(1, 4), told)
        assert mlflow.active_run().info.run_id == theirs.info.run_id
        assert mlflow.MlflowClient().get_run(theirs.info.run_id).info.status == "RUNNING"
    assert history(mlflow, theirs.info.run_id, "loss") == [(s, 1 / s) for s in range(1, 4)]
    assert not Path("run/reports.json").exists() and told == []


def test_mlflow_begins_a_new_run_where_the_old_one_is_gone(mlflow: Any, told: list[str]) -> None:
    Path("run").mkdir()
    Path("run/reports.json").write_text(json.dumps({"mlflow": "0" * 32}), encoding="utf-8")
    run("mlflow", range(1, 4), told)
    assert kept_id() != "0" * 32 and len(history(mlflow, kept_id(), "loss")) == 3 and told == []


def test_mlflow_uses_the_experiment_of_the_environment(
    mlflow: Any, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "words")
    with onward.Reporter("mlflow", run_name="first", tell=told.append) as reporter:
        reporter.log(1, metrics(1))
    run("mlflow", range(1, 3), told)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("words")
    assert len(client.search_runs([experiment.experiment_id])) == 2 and told == []


def test_mlflow_that_refuses_hyperparameters_gets_the_metrics(
    mlflow: Any, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = mlflow.MlflowClient.log_batch

    def old_server(self: Any, run_id: str, metrics: Any = (), params: Any = (), **more: Any) -> Any:
        if params:
            code = mlflow.protos.databricks_pb2.INVALID_PARAMETER_VALUE
            raise mlflow.MlflowException("exceeds 2 characters", error_code=code)
        return send(self, run_id, metrics=metrics, **more)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", old_server)
    run("mlflow", range(1, 4), told)
    assert history(mlflow, kept_id(), "loss") == [(s, 1 / s) for s in range(1, 4)]
    [line] = told
    assert line.startswith("mlflow refuses hyperparameters: ") and line.endswith("2 characters")


class Answers(BaseHTTPRequestHandler):
    """A server that answers each request with 500, or never."""

    gate: threading.Event | None = None

    def do_GET(self) -> None:
        if self.gate is not None:
            self.gate.wait(30.0)
        self.send_error(500)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Callable[[threading.Event | None], str]]:
    """Makes an HTTP server and returns its address."""
    made: list[ThreadingHTTPServer] = []

    def make(gate: threading.Event | None) -> str:
        handler = type("Handler", (Answers,), {"gate": gate})
        found = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        found.daemon_threads = True
        made.append(found)
        threading.Thread(target=found.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{found.server_port}"

    yield make
    for found in made:
        found.shutdown()
        found.server_close()


def test_mlflow_at_a_closed_port(mlflow: Any, told: list[str]) -> None:
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    run("mlflow", range(1, 4), told)
    assert "reports to mlflow fail (" in told[0] and "127.0.0.1" in told[0]
    assert told[1].startswith("3 of 3 records were not delivered to mlflow (") and len(told) == 2


def test_mlflow_that_answers_500(
    mlflow: Any,
    told: list[str],
    server: Callable[[threading.Event | None], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its pauses draw a jitter
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    mlflow.set_tracking_uri(server(None))
    run("mlflow", range(1, 4), told)
    assert "reports to mlflow fail (" in told[0] and "500" in told[0]
    assert told[1].startswith("3 of 3 records were not delivered to mlflow (") and len(told) == 2


def test_mlflow_that_never_answers(
    mlflow: Any, told: list[str], server: Callable[[threading.Event | None], str]
) -> None:
    gate = threading.Event()
    mlflow.set_tracking_uri(server(gate))
    reporter = onward.Reporter("mlflow", tell=told.append)
    for step in range(1, 200):
        reporter.log(step, metrics(step))
    assert reporter.status() == "mlflow 199 waiting"
    reporter.close(0.2)
    [line] = told
    assert line.startswith("199 of 199 records were not delivered to mlflow (")
    gate.set()


# ---- Weights & Biases, which sends nothing when it is offline


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_takes_a_run_and_goes_on_with_it(
    mode: str, told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", mode)
    wandb.teardown()  # it reads its variables once
    made: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, Any], int | None]] = []
    init = wandb.init

    def noted(**given: Any) -> Any:
        made.append(given)
        begun = init(**given)
        log = begun.log
        monkeypatch.setattr(
            begun,
            "log",
            lambda data, step=None: (logged.append((data, step)), log(data, step=step)),
        )
        return begun

    monkeypatch.setattr(wandb, "init", noted)
    run("wandb", range(1, 4), told, run_name="mine")
    run("wandb", range(3, 5), told)
    assert told == []
    assert (
        made[0]["id"] == made[1]["id"] == json.loads(Path("run/reports.json").read_bytes())["wandb"]
    )
    assert [made[0]["name"], made[1]["name"]] == ["mine", "run"]
    assert [step for _, step in logged] == [1, 2, 3, 3, 4]
    assert set(logged[0][0]) == {
        "train/loss", "eval/loss", "train/odd (%)", "train/nan", "train/global_step",
    }  # fmt: skip
    folders = list((tmp_path / "wandb").glob("offline-run-*")) if mode == "offline" else []
    assert len(folders) == (2 if mode == "offline" else 0)
    assert wandb.run is None


def test_wandb_without_a_key_asks_nobody(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("NETRC", str(Path.cwd() / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()
    run("wandb", range(1, 4), told)
    assert "no API key; fix: wandb login, or WANDB_MODE=offline" in told[0]
    assert told[1].startswith("3 of 3 records were not delivered to wandb (") and len(told) == 2
    wandb.teardown()
