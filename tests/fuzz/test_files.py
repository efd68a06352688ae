"""The fuzzer of files: its judge finds what is planted, its readers and writers are right, and some
dozens of cases of each format pass."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.files import judge as judging
from fuzz.files.json_trees import changed_text, text_of, tree_of
from fuzz.files.judge import Format, Judge
from fuzz.files.run import SHARES, FileWorker, campaign, options
from fuzz.files.tensor_files import changed_file, reference
from fuzz.files.wire import Field, bytes_of, changed_message, fields_of

SMALL = (
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"I16","shape":[1,3],"data_offsets":[8,14]}}'
)
TENSORS = len(SMALL).to_bytes(8, "little") + SMALL + bytes(range(14))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and inotify")


def test_each_format(tmp_path: Path) -> None:
    """A round of the campaign, in a process of its own."""
    said = options(["--count", str(sum(SHARES.values())), "--workers", "1", "--seed", "1000"])
    verdicts = campaign(said, tmp_path)
    assert not [v for v in verdicts if v["finding"]]
    assert Counter(v["format"] for v in verdicts) == SHARES
    loaded = Counter(v["kind"] for v in verdicts)
    assert loaded["loaded"] > 20 and loaded["refused"] > 50  # neither half is for nothing


# ---- the judge, with loaders that do what none may


class Refusal(ValueError):
    """The refusal of the planted loaders."""


def _planted_offset(folder: Path) -> Any:
    """Follows an offset beyond the file: what is not there is left out without a word."""
    content = (folder / "x.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    return {k: data[slice(*v["data_offsets"])] for k, v in header.items() if k[0] != "_"}


def _planted_escape(folder: Path) -> Any:
    return {}["x"]


def _planted_long(folder: Path) -> Any:
    raise Refusal(f"{folder} " + "x" * 500)


def _planted_lines(folder: Path) -> Any:
    raise Refusal(f"{folder}\nis not sound")


def _planted_silence(folder: Path) -> Any:
    raise Refusal("something is not sound")


def _planted_control(folder: Path) -> Any:
    raise Refusal(f"{folder} \x1b[31m")


def _planted_outside(folder: Path) -> Any:
    return (folder / "../outside/x.safetensors").read_bytes()


def _planted_library(folder: Path) -> Any:
    """A library that is no Python opens the file."""
    from safetensors import safe_open

    with safe_open(folder / "../outside/sound.safetensors", "np") as file:
        return file.keys()


def _planted_elsewhere(folder: Path) -> Any:
    return Path("/etc/hostname").exists() and Path("/etc/hostname").read_bytes()


def _planted_write(folder: Path) -> Any:
    return (folder / "made").write_text("x")


def _planted_code(folder: Path) -> Any:
    (code := compile("1", str(folder / "code.py"), "exec"))
    exec(code)


def _planted_pickle(folder: Path) -> Any:
    import pickle  # noqa: TID251  # what the judge has to find

    return pickle.loads(b"cbuiltins\nlen\n.")


def _planted_process(folder: Path) -> Any:
    return os.system("true")  # noqa: S605


def _planted_time(folder: Path) -> Any:
    return sum(range(10_000_000))


def _planted_memory(folder: Path) -> Any:
    return len(bytearray(b"x") * (64 << 20))


PLANTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an offset beyond the file": (_planted_offset, "wrong: other bytes"),
    "another exception": (_planted_escape, "escaped: KeyError"),
    "a long refusal": (_planted_long, "over 500 characters"),
    "a refusal of two lines": (_planted_lines, "not one printable line"),
    "a refusal with a control character": (_planted_control, "not one printable line"),
    "a refusal without a file": (_planted_silence, "names no file"),
    "a file beside the folder": (_planted_outside, "strange: opens x.safetensors outside"),
    "a file that a library opens": (_planted_library, "strange: opens sound.safetensors outside"),
    "a file elsewhere": (_planted_elsewhere, "strange: opens /etc/hostname"),
    "a file that is written": (_planted_write, "strange: opens /case/made to write"),
    "code of the folder": (_planted_code, "strange: runs the code of"),
    "a pickle": (_planted_pickle, "strange: causes pickle.find_class"),
    "a process": (_planted_process, "strange: causes os.system"),
    "too much time": (_planted_time, "slow"),
    "too much memory": (_planted_memory, "memory"),
}


def _make(folder: Path) -> None:
    for name in ("x.safetensors", "sound.safetensors"):
        (folder / name).write_bytes(TENSORS)


def _change(folder: Path, draw: random.Random, outside: Path) -> str:
    (folder / "x.safetensors").write_bytes(TENSORS[:-2])
    return "cut"


def _check(folder: Path, found: Any) -> str | None:
    try:
        want = reference((folder / "x.safetensors").read_bytes())
    except ValueError:
        return "other bytes"
    return None if found in (None, {k: t.data for k, t in want.items()}) else "other bytes"


def _verdicts(root: Path) -> dict[str, str]:
    """The signature of each planted loader's case; of a sound loader, which refuses, too."""

    def sound(folder: Path) -> Any:
        try:
            return {
                k: t.data for k, t in reference((folder / "x.safetensors").read_bytes()).items()
            }
        except ValueError:
            raise Refusal(f"{folder} is cut") from None

    judging.SECONDS, judging.BYTES = 0.05, 32 << 20
    form = Format(_make, _change, sound, _check, (Refusal,))
    judge = Judge(root, {"x": form})
    found = {"": judge.judge("x", 0).kind}
    for name, (load, _) in PLANTED.items():
        judge.formats = {"x": form._replace(load=load)}
        verdict = judge.judge("x", 0)
        found[name] = verdict.signature if verdict.finding else verdict.kind
    return found


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`_verdicts` of a process of its own, as an audit hook stays for good."""
    root = tmp_path_factory.mktemp("files")
    child = os.fork()
    if child == 0:
        try:
            (root / "found.json").write_text(json.dumps(_verdicts(root / "judge")))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return json.loads((root / "found.json").read_text())


def test_a_sound_loader_is_no_finding(verdicts: dict[str, str]) -> None:
    assert verdicts[""] == "refused"


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str, verdicts: dict[str, str]) -> None:
    assert verdicts[name].startswith(PLANTED[name][1])


def test_a_worker_that_dies_is_a_finding(tmp_path: Path) -> None:
    worker = FileWorker(tmp_path / "x", (sys.executable, "-c", "import os; os.abort()"))
    verdict = worker.judge("weights", 0)
    worker.close()
    assert verdict["finding"] and verdict["signature"] == "crash: exit -6"


# ---- the readers and writers


def test_a_seed_says_everything() -> None:
    for change in (changed_file, lambda data, draw: changed_text(SMALL, draw)):
        one, same = (
            [change(TENSORS, random.Random(seed)) for seed in range(100)] for _ in range(2)
        )
        assert one == same and len(set(one)) > 60


def test_json_comes_back() -> None:
    assert json.loads(text_of(tree_of(SMALL))) == json.loads(SMALL)
    assert tree_of('{"a": 1, "a": 2}') == [["a", 1], ["a", 2]]


def test_messages_come_back() -> None:
    inner = bytes_of([Field(1, 0, 300), Field(2, 2, b"\x08\x01")])
    data = bytes_of([Field(7, 2, inner), Field(3, 5, b"abcd"), Field(4, 2, b"a name")])
    fields = fields_of(data)
    assert bytes_of(fields) == data and isinstance(fields[0].held, list)
    assert len({changed_message(data, random.Random(seed)) for seed in range(100)}) > 50


def test_the_reference_reads_what_the_format_says() -> None:
    found = reference(TENSORS)
    assert {name: (t.dtype, t.shape, len(t.data)) for name, t in found.items()} == {
        "a": ("F32", (2,), 8), "b": ("I16", (1, 3), 6),
    }  # fmt: skip
    for end in range(len(TENSORS)):
        with pytest.raises(ValueError, match=r"."):
            reference(TENSORS[:end])
