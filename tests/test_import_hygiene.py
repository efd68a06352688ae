"""Importing Onward does nothing but import: no network, no process, no file written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onward"
WATCHED = """
import json, os, sys
seen = []
PREFIXES = ("socket.", "subprocess.", "urllib.", "http.", "ftplib.", "smtplib.", "sqlite3.")
CALLS = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate",
    "os.chmod", "shutil.copyfile", "tempfile.mkstemp", "tempfile.mkdtemp",
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def watch(event, arguments):
    if event == "open":
        if isinstance(arguments[2], int) and arguments[2] & WRITES and arguments[0] != os.devnull:
            seen.append([event, str(arguments[0])])
    elif event in CALLS or event.startswith(PREFIXES):
        seen.append([event, str(arguments[0]) if arguments else ""])

sys.addaudithook(watch)
exec(sys.argv[1])
print(json.dumps([seen, sorted(m for m in sys.modules if "." not in m)]))
"""


def watched(code: str, folder: Path) -> tuple[list[list[str]], set[str]]:
    """What a new interpreter did while it ran `code`: events of the network, of processes and of
    writes to the disk; and the packages that it has imported."""
    told = {"PYTHONPATH": str(PACKAGE.parent), "ONWARD_CACHE": str(folder / "cache")}
    plain = {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, code],
        capture_output=True, text=True, check=True, env={**os.environ, **told, **plain},
    )  # fmt: skip
    seen, modules = json.loads(done.stdout.splitlines()[-1])
    return seen, set(modules)


def test_import_does_nothing_else(tmp_path: Path) -> None:
    seen, modules = watched("import onward", tmp_path)
    assert seen == []
    assert "onward" in modules
    assert not modules & {"torch", "transformers", "onnxruntime", "socket", "subprocess"}


def test_public_names_and_the_command_line_do_nothing_else(tmp_path: Path) -> None:
    """torch makes files in folders for temporary ones; nothing else is written, and nothing of
    Onward's."""
    code = "import onward, onward.cli; [getattr(onward, name) for name in onward.__all__]"
    seen, modules = watched(code, tmp_path)
    torchs = (str(tmp_path), str(Path(tempfile.gettempdir()) / "torchinductor_"))
    elsewhere = [event for event in seen if not event[1].startswith(torchs)]
    assert elsewhere == []
    assert not any("onward" in path.removeprefix(str(tmp_path)) for _, path in seen)
    assert "torch" in modules
    assert not modules & {"onnxruntime", "mlflow", "wandb", "tensorboard"}


def test_onnxruntime_sends_nothing_where_onward_imports_it(tmp_path: Path) -> None:
    """onnxruntime keeps a database of events in the user's cache, and sends it."""
    pytest.importorskip("onnxruntime")
    code = "from onward.train.verify.engines import Engines; Engines.has_onnxruntime()"
    _, modules = watched(code, tmp_path)
    assert "onnxruntime" in modules
    assert not list(tmp_path.rglob("*onnxruntime*"))


@pytest.mark.parametrize(
    ("code", "event"),
    [
        ("import socket; socket.socket()", "socket.__new__"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("open('made', 'w')", "open"),
        ("import os; os.mkdir('made')", "os.mkdir"),
    ],
)
def test_the_watch_sees(code: str, event: str, tmp_path: Path) -> None:
    seen, _ = watched(f"import os; os.chdir({str(tmp_path)!r}); {code}", tmp_path)
    assert event in [name for name, _ in seen]


NETWORK = re.compile(
    r"^\s*(?:import|from) (?:aiohttp|ftplib|http|httpx|requests|smtplib|socket|ssl|urllib)\b"
)


def test_no_source_opens_a_connection() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {line}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if NETWORK.match(line)
    ]
    assert found == []
