"""Changes of a folder's files as such: lost, cut, linked, exchanged, no file at all."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from fuzz.files.tensor_files import flipped


def lures_of(outside: Path, name: str) -> tuple[str, ...]:
    """Names that lead out of the folder, or nowhere, for a file called `name`."""
    there = outside.name
    return (
        f"../{there}/{name}", f"{outside}/{name}", f"./{name}", f"sub/../../{there}/{name}",
        f"..\\{there}\\{name}", f"{name}\0", f"//{name}", "..", "", f"~/{name}", f"file://{name}",
        f"{name}/", "no such.safetensors", "x.bin", f"../case/{name}",
    )  # fmt: skip


def changed_place(folder: Path, names: Sequence[str], draw: random.Random, outside: Path) -> str:
    """Changes one of these files of a folder; says how."""
    path = folder / draw.choice(names)
    kind = draw.choice([
        "remove", "flip", "flip", "flip", "empty", "link", "link", "hard", "loop", "pipe", "folder",
        "exchange", "other", "device",
    ])  # fmt: skip
    content = path.read_bytes()
    if kind != "flip":
        path.unlink()
    match kind:
        case "flip":
            path.write_bytes(flipped(content, draw))
        case "empty":
            path.touch()
        case "link":
            target = draw.choice([f"../{outside.name}/{path.name}", str(outside / path.name)])
            path.symlink_to(target)
        case "hard":
            path.with_name("moved.txt").write_bytes(content)
            path.symlink_to("moved.txt")
        case "loop":
            path.symlink_to(path.name)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/proc/self/mem"]))
        case "exchange":
            other = folder / draw.choice(names)
            if other != path and other.exists():
                path.write_bytes(other.read_bytes())
                other.write_bytes(content)
        case "other":
            path.write_bytes(draw.choice([
                b"\x80\x02cposix\nsystem\n(S'touch ran'\ntR.", b"PK\x03\x04" + bytes(99), b"<html>",
                b"version https://git-lfs.github.com/spec/v1\n", b"GGUF" + bytes(40), bytes(512),
                b"\x7fELF" + bytes(99), b"[" * 100_000, b"{}", b"null", b"[]", b"\xff" * 64,
            ]))  # fmt: skip
    return f"{path.name} {kind}"
