"""What a load costs and touches: processor time, memory, files that it opens, code that it runs.

Python's audit hook sees what Python opens and runs. inotify sees every open of the planted files
outside of the folder, by libraries in Rust and C++ too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import site
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADROOM = 1536 << 20  # bytes of address space over what the worker has when it is ready
_IN_OPEN = 0x20
_IN_NONBLOCK = 0o4000
# events that no load may cause, by how their names begin
_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.",
    "pickle.find_class", "os.remove", "os.rename", "os.rmdir", "os.truncate",
    "os.chmod", "os.chown", "os.link", "os.symlink", "shutil.", "ctypes.dlopen", "pty.spawn",
    "os.mkdir", "os.chdir", "urllib.Request", "http.client", "ftplib.", "smtplib.", "webbrowser.",
)  # fmt: skip
_WATCHED = ("open", "exec", "import", *_FORBIDDEN)


@dataclass
class Cost:
    """What happened within `watched`.

    seconds: processor time of this process. bytes: memory at the peak beyond that at the start.
    events: of the audit hook. outside: names of planted files that were opened.
    """

    seconds: float = 0.0
    bytes: int = 0
    events: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


class Sandbox:
    """Watches the loads of one process. An audit hook cannot be taken away again, so that a process
    has one sandbox at most.

    root: a folder of its own, with `case`, which holds the files of a case, and `outside`, whose
    files nothing may open.
    """

    def __init__(self, root: Path) -> None:
        self.case, self.outside = root / "case", root / "outside"
        self.outside.mkdir(parents=True, exist_ok=True)
        self._cost: Cost | None = None
        self._notify, self._libc = -1, ctypes.CDLL(None, use_errno=True)
        if hasattr(self._libc, "inotify_init1"):
            self._notify = self._libc.inotify_init1(_IN_NONBLOCK)
            self._libc.inotify_add_watch(self._notify, os.fsencode(self.outside), _IN_OPEN)
        places = {*site.getsitepackages(), *sysconfig.get_paths().values(), sys.prefix}
        places |= {sys.base_prefix, "/proc", "/sys", "/dev", "/etc/localtime", "/usr", "/lib"}
        places.add(str(Path(__file__).parents[3]))
        self._trusted = tuple(os.path.realpath(p) for p in places)
        # a module that a load is the first to import is not written beside its source
        sys.dont_write_bytecode = True
        sys.addaudithook(self._heard)

    def limit_memory(self) -> None:
        """Limits the address space to a little more than there is now."""
        words = Path("/proc/self/statm").read_text().split()
        most = int(words[0]) * resource.getpagesize() + HEADROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    @contextlib.contextmanager
    def watched(self) -> Iterator[Cost]:
        cost = Cost()
        self._opened()  # what was opened before is no load's
        before = _memory("VmRSS")
        _forget_peak()
        start = time.process_time()
        self._cost = cost
        try:
            yield cost
        finally:
            self._cost = None
            cost.seconds = time.process_time() - start
            cost.bytes = _memory("VmHWM") - before
            cost.outside = self._opened()

    def strange(self, cost: Cost) -> str | None:
        """What a load has opened or run that it must not; None where there is nothing."""
        if cost.outside:
            return f"opens {cost.outside[0]} outside of the folder"
        for event, args in cost.events:
            if event == "open":
                path, writes = args[0], bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
                if isinstance(path, int) or path is None:
                    continue
                # the hook is told of an open that will fail, as of a link that is not followed
                real = os.path.abspath if args[2] & os.O_NOFOLLOW else os.path.realpath
                place = real(os.fsdecode(path))
                if writes:
                    return f"opens {place} to write"
                if not place.startswith((str(self.case), *self._trusted)):
                    return f"opens {place}, outside of the folder"
            elif event == "exec":
                file = getattr(args[0], "co_filename", "")
                if str(self.case) in file or str(self.outside) in file or "planted" in file:
                    return f"runs the code of {file}"
            elif event == "subprocess.Popen" and _is_own(args):
                continue
            elif event == "import":
                if "planted" in str(args[0]):
                    return f"imports {args[0]}"
            else:
                return f"causes {event} {str(args)[:80]}"
        return None

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self._cost is not None and event.startswith(_WATCHED):
            self._cost.events.append((event, args))

    def _opened(self) -> list[str]:
        found: list[str] = []
        while self._notify >= 0:
            try:
                data = os.read(self._notify, 1 << 16)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                size = int.from_bytes(data[at + 12 : at + 16], sys.byteorder)
                name = data[at + 16 : at + 16 + size].rstrip(b"\0").decode()
                found.append(name or "the folder")
                at += 16 + size
        return found


def _is_own(args: tuple[Any, ...]) -> bool:
    """Whether a process is the one that converts models of an old opset, which is limited."""
    words = [str(word) for word in args[1]]
    return words[0] == sys.executable and words[4].endswith("onnx_models/conversion_child.py")


def _memory(name: str) -> int:
    """A figure of /proc/self/status in bytes; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def _forget_peak() -> None:
    """Makes the peak of memory what is used now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
