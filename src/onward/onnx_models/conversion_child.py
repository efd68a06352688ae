"""The process of `conversion`: a model on stdin, the converted one on stdout.

Run as a file, so that nothing but onnx is imported. Exits with 3 where the converter refuses.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

MEMORY = 1 << 30  # bytes beyond what the process has with the model in it, and its size many times
TIMES = 16


def _limit(seconds: int, size: int) -> None:
    """Limits processor time, files and memory, where the system can."""
    try:
        import resource
    except ImportError:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = Path("/proc/self/statm").read_text(encoding="ascii").split()
        have = int(words[0]) * resource.getpagesize()
        most = have + MEMORY + TIMES * size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    sys.path += [path for path in sys.argv[3:] if path not in sys.path]
    import onnx
    from onnx import version_converter

    opset, seconds = int(sys.argv[1]), int(sys.argv[2])
    data = sys.stdin.buffer.read()
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no model
    _limit(seconds, len(data))
    try:
        made = version_converter.convert_version(onnx.load_from_string(data), opset)
        answer = made.SerializeToString()
    except BaseException as error:
        text = str(error) or type(error).__name__
        sys.stderr.write(text[:2000])
        return 3
    with os.fdopen(out, "wb") as file:
        file.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
