"""Exported training steps in Node and in a headless Chromium: the losses of the session or Trainer.

npm installs the runtimes into a temporary folder. Both tests are left out where npm, Node or
Chromium is missing, and where npm reaches no registry.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_files import Words, words_batches, words_file

import onward
from onward import TrainingSession, loss

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_in_browser"
STEPS = 20
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def of_a_session(folder: Path) -> list[float]:
    """Writes the step of an ONNX file; returns the losses from there on."""
    model = words_file()
    session = TrainingSession(model, onward.optim.AdamW(lr=1e-2), loss.cross_entropy("logits"))
    session.step(words_batches(STEPS)[0])
    session.export_training(folder)
    return [session.step(batch).loss for batch in words_batches(STEPS)]


class Labelled(torch.nn.Module):
    """The words' model with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.words(ids).flatten(0, 1), labels.flatten())


def of_a_trainer(folder: Path) -> list[float]:
    """Writes the step of a module; returns the losses from there on."""
    trainer = onward.Trainer(Labelled(), onward.optim.AdamW(lr=1e-2))
    held = [{name: torch.tensor(x) for name, x in batch.items()} for batch in words_batches(STEPS)]
    trainer.train_step(held[0])
    trainer.export_training(folder)
    return [float(trainer.train_step(batch).loss) for batch in held]


MAKERS = {"session": of_a_session, "trainer": of_a_trainer}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example and its packages."""
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("neither npm nor Node is here")
    folder = tmp_path_factory.mktemp("javascript") / "site"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", "step"))
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip("npm cannot install the runtimes")
    return folder


@pytest.fixture(params=MAKERS)
def site(request: pytest.FixtureRequest, installed: Path) -> tuple[Path, list[float]]:
    """The folder with a step and batches in it, and the losses that are expected."""
    shutil.rmtree(installed / "step", ignore_errors=True)
    want = MAKERS[request.param](installed / "step")
    given = [{name: x.tolist() for name, x in batch.items()} for batch in words_batches(STEPS)]
    (installed / "batches.json").write_text(json.dumps(given))
    return installed, want


def test_node_goes_on_as_onward(site: tuple[Path, list[float]]) -> None:
    folder, want = site
    command = ["node", "train.mjs", "step", "batches.json", "0.01"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=True)
    np.testing.assert_allclose(json.loads(done.stdout), want, rtol=1e-5)


@pytest.fixture
def address(site: tuple[Path, list[float]]) -> Iterator[str]:
    """Where the folder is served."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site[0]))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
        server.shutdown()
        thread.join(30)


def test_a_browser_goes_on_as_onward(site: tuple[Path, list[float]], address: str) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is here")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--virtual-time-budget=60000", "--dump-dom", address]
    page = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    said = re.search(r'id="losses">([^<]*)', page)
    assert said and said[1], re.search(r'id="said">([^<]*)', page)
    np.testing.assert_allclose(json.loads(said[1]), site[1], rtol=1e-5)
