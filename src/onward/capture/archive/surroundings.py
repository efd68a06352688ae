"""Describes a capture's surroundings, which may decide it, as JSON that processes can compare.

Beside the model and its loss function (model_state/lasting.py) and the batch, these are: versions,
environment variables and arguments, the user's files, torch's flags, and the contents of the
transformers and torch modules that a forward may use, name by name, so that anything patched into
them is seen. What cannot be described raises NotKept.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import platform
import re
import sys
import time
import types
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onward.environment import environment_variables, is_own_command
from onward.model_state.code import origin
from onward.model_state.facts import ATOMS
from onward.model_state.own_code import of_library_file

STARTED = time.time()
# variables of a shell or terminal that change from session to session, and that no forward reads
NOISE = {
    "_", "COLUMNS", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "GPG_TTY", "INVOCATION_ID",
    "JOURNAL_STREAM", "LINES", "LS_COLORS", "OLDPWD", "PWD", "SHLVL", "SSH_AGENT_PID",
    "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "STY", "TERM", "TERM_PROGRAM",
    "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "TMUX", "TMUX_PANE", "WINDOW", "WINDOWID",
    "XDG_SESSION_ID",
}  # fmt: skip
_OURS = ("ONWARD_CACHE",)  # the place of the cache does not change a capture
_TORCH = (  # modules of torch's that a forward calls by their names
    "torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch.nn.parameter",
    "torch.nn.init", "torch.nn._reduction", "torch.autograd.function", "torch.autograd.grad_mode",
    "torch.autograd", "torch.utils.checkpoint", "torch.amp.autocast_mode", "torch.special",
    "torch.linalg", "torch.fft", "torch._jit_internal", "torch.overrides", "torch.random",
    "torch.nn.utils.rnn", "torch.nn.attention", "torch.nn.grad",
)  # fmt: skip
_CONFIGS = (
    "torch.fx.config", "torch.fx.experimental._config", "torch._export.config",
    "torch._functorch.config", "torch._dynamo.config",
)  # fmt: skip
_IN_NO_FORWARD = (  # modules that build, load, save or document models, or prepare their data
    "transformers.models.auto.", "transformers.quantizers", "transformers.generation.",
    "transformers.tokenization", "transformers.image_", "transformers.video_",
    "transformers.audio_", "transformers.processing_", "transformers.feature_extraction",
    "transformers.trainer", "transformers.training_args", "transformers.pipelines",
    "transformers.data", "transformers.dynamic_module_utils", "transformers.conversion_mapping",
    "transformers.core_model_loading", "transformers.safetensors_conversion",
    "transformers.utils.auto_docstring", "transformers.utils.args_doc", "transformers.utils.hub",
    "transformers.utils.quantization_config", "transformers.utils.chat_",
    "transformers.utils.loading_report", "transformers.utils.notebook", "transformers.monkey_patch",
)  # fmt: skip
_SKIPPED = {
    "__builtins__", "__spec__", "__loader__", "__cached__", "__doc__", "__warningregistry__",
    "_registered_model_output_types",  # grows with every class that is loaded
}  # fmt: skip
_OF_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEPTH = 3
_ATOMS = frozenset(ATOMS)
_LONGEST = 2000


class NotKept(Exception):
    """Raised with the reason why a capture can be neither stored nor loaded."""


def surroundings(modules: Iterable[str]) -> list[object]:
    """Returns the present surroundings in JSON's terms. modules: names of the modules that define
    the model's classes and functions. Raises NotKept."""
    return [
        *_installation(),
        _process(),
        _flags(),
        [[name, _own_file(name, file)] for name, file in sorted(own_files())],
        _names([*modules, *_TORCH, *(m for m in sys.modules if m.startswith("torch.nn.modules"))]),
    ]


@functools.cache
def _installation() -> list[object]:
    """Returns versions, the platform, and the names of installed packages."""
    packages = set[str]()
    for place in sys.path:
        if Path(place).is_dir():
            found = [path.name for path in Path(place).iterdir()]
            packages.update(
                n for n in found if n.endswith((".dist-info", ".egg-info", ".egg-link"))
            )
    versions = [sys.version, torch.__version__, str(torch.version.git_version), np.__version__]
    stamps = [_stamp(m) for name, m in sorted(sys.modules.items()) if name in _TORCH]
    return [versions, platform.platform(), sorted(packages), stamps]


def _process() -> list[object]:
    """Returns the process's variables and flags, and the arguments of a program that is not
    Onward's own. Raises NotKept without a main file."""
    variables = {k: v for k, v in environment_variables().items() if k not in (*NOISE, *_OURS)}
    main = sys.modules.get("__main__")
    theirs = [name for name, _ in own_files() if name != "__main__"]
    if is_own_command() and not theirs:  # a module of the user's may read the arguments
        return [sorted(variables.items()), str(sys.flags)]
    if getattr(main, "__file__", None) is None:
        raise NotKept("the program is a notebook or an interactive session")
    return [sorted(variables.items()), sys.argv, str(sys.flags), str(getattr(main, "__file__", ""))]


def _flags() -> list[object]:
    """Returns torch's flags, as far as a trace may read them. Raises NotKept in a process group."""
    backends, cuda = torch.backends, torch.cuda.is_available()
    core: Any = torch._C
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed:
        raise NotKept("torch.distributed has a process group")
    # read one by one: the flags that speak of several raise where these differ
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    products: tuple[Any, ...] = (
        backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn,
    )  # fmt: skip
    found = [
        repr(torch.get_default_dtype()),
        repr(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        [part.fp32_precision for part in products],
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        [repr(torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
        backends.mps.is_available(),
        [
            core._get_flash_sdp_enabled(),
            core._get_mem_efficient_sdp_enabled(),
            core._get_math_sdp_enabled(),
            core._get_cudnn_sdp_enabled(),
        ],
        [cudnn.enabled, cudnn.deterministic],
        [mkldnn.enabled, backends.mha.get_fastpath_enabled()],
        backends.opt_einsum.enabled,
        backends.opt_einsum.strategy,
    ]
    for name in _CONFIGS:
        module = sys.modules.get(name)
        held = getattr(module, "_config", None)
        changed = []
        for key, entry in sorted((held or {}).items()):
            value: Any = getattr(entry, "user_override", None)  # what the user has set
            value = value.get() if isinstance(value, contextvars.ContextVar) else value
            if type(value) in ATOMS and value != getattr(entry, "default", _OF_ADDRESS):
                changed.append([key, repr(value)])
        found.append(changed)
    return found


def own_files() -> Iterator[tuple[str, str]]:
    """Yields the names and files of the user's own modules that are loaded."""
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None) if type(module) is types.ModuleType else None
        if not isinstance(file, str) or "site-packages" in file or of_library_file(file):
            continue
        if origin(name) == "own":
            yield name, file


def _own_file(name: str, file: str) -> str:
    """Returns a SHA-256 of a file. Raises NotKept if it changed after it may have been loaded."""
    try:
        changed, size = (found := Path(file).stat()).st_mtime, found.st_size
        if changed > STARTED:
            raise NotKept(f"{name} has changed since the program started")
        return _digest(file, changed, size)
    except OSError as error:
        raise NotKept(f"{name}: {error}") from error


@functools.lru_cache(maxsize=4096)
def _digest(file: str, changed: float, size: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _stamp(module: types.ModuleType) -> list[str]:
    """Returns the path, size and modification time of a library module's file."""
    file = getattr(module, "__file__", None)
    if file is None:
        return []
    try:
        found = Path(file).stat()
    except OSError as error:
        raise NotKept(f"{file}: {error}") from error
    return [file, str(found.st_size), str(found.st_mtime_ns)]


# ---- the contents of modules


def _names(modules: Iterable[str]) -> list[tuple[str, str]]:
    """Returns (name, SHA-256 of the contents) of these modules of torch and transformers, and of
    the transformers modules that their functions and classes come from."""
    waiting = sorted({m for m in modules if m.partition(".")[0] in ("torch", "transformers")})
    seen, told = set(waiting), dict[str, str]()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name.startswith(_IN_NO_FORWARD):
            continue
        scope = vars(module).copy()
        for x in scope.values():
            if type(x) is types.FunctionType or isinstance(x, type):
                of = x.__module__
                if of not in seen and isinstance(of, str) and of.startswith("transformers."):
                    seen.add(of)
                    waiting.append(of)
        text = "\n".join([*_Scope(name).lines(scope), *_stamp(module)])
        told[name] = hashlib.sha256(text.encode()).hexdigest()
    return sorted(told.items())


class _Scope:
    """Describes the contents of one module of a library. Raises NotKept for code of the user's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def lines(self, scope: dict[str, Any], depth: int = _DEPTH) -> list[str]:
        """Returns a line for each name and its value, sorted."""
        found = list[str]()
        for name, x in scope.items():
            if name in _SKIPPED:
                continue
            if type(x) is types.FunctionType:  # most of them
                code = x.__code__
                held = _CODES.get(id(code))
                if held is None or held[0] is not code:
                    held = self._code(code)
                found.append(f"{name}={held[1]}")
            elif type(x) in _OF_C:
                found.append(f"{name}:{x.__qualname__}")
            else:
                found.append(f"{name}={self.told(x, depth)}")
        found.sort()
        return found

    def _code(self, code: types.CodeType) -> tuple[types.CodeType, str]:
        """Returns code, with its name, file, line and CRC as text. Raises NotKept for code that is
        in no library's file."""
        file = code.co_filename
        known = of_library_file(file) or file.startswith("<")
        if not known and "site-packages" not in file and "dist-packages" not in file:
            raise NotKept(f"{self.name} holds {code.co_qualname} of {file}")
        what = f"{file}:{code.co_firstlineno} {zlib.crc32(code.co_code)}"
        _CODES[id(code)] = held = code, f"{code.co_qualname} {what}"
        return held

    def told(self, x: Any, depth: int) -> str:
        """Returns a value as text, with its contents down to `depth` levels. Raises NotKept."""
        kind = type(x)
        if kind in _ATOMS:
            return repr(x)
        if kind is types.FunctionType:
            held = _CODES.get(id(x.__code__))
            return (held if held and held[0] is x.__code__ else self._code(x.__code__))[1]
        if isinstance(x, type):
            return self._class(x, depth)
        if kind in (dict, OrderedDict) or isinstance(x, dict):
            held = list(dict.items(x))  # not `x.items()`, which may import values lazily
            if not depth or len(held) > _LONGEST:
                return f"{kind.__qualname__} of {len(held)}"
            pairs = [f"{self.told(k, 0)}: {self.told(v, depth - 1)}" for k, v in held]
            return f"{kind.__qualname__} {pairs}"
        if isinstance(x, (list, tuple, set, frozenset)):
            if not depth or len(x) > _LONGEST:
                return f"{kind.__qualname__} of {len(x)}"
            items = [self.told(v, depth - 1) for v in list(x)]
            ordered = items if isinstance(x, (list, tuple)) else sorted(items)
            return f"{kind.__qualname__} {ordered}"
        return self._object(x, kind, depth)

    def _class(self, x: type, depth: int) -> str:
        where = f"{x.__module__}.{x.__qualname__}"
        if x.__module__ == self.name and depth == _DEPTH:
            return f"{where} {self.lines(vars(x).copy(), 1)}"
        if _is_own(x):
            raise NotKept(f"{self.name} holds {where}")
        return where

    def _object(self, x: Any, kind: type, depth: int) -> str:
        if isinstance(x, types.ModuleType):
            return f"module {x.__name__}"
        if isinstance(x, (staticmethod, classmethod)):
            return f"{kind.__name__} {self.told(x.__func__, depth)}"
        if isinstance(x, property):
            return f"property {[f and self.told(f, depth) for f in (x.fget, x.fset, x.fdel)]}"
        if isinstance(x, functools._lru_cache_wrapper):
            return f"cache {self.told(x.__wrapped__, depth)}"
        if isinstance(x, types.MethodType):
            return f"method {self.told(x.__func__, depth)} of {type(x.__self__).__qualname__}"
        if isinstance(x, functools.partial):
            parts = [self.told(part, depth) for part in (x.func, x.args, x.keywords)]
            return f"partial {parts}"
        if kind in _OF_C:
            return f"{kind.__name__} {x.__qualname__}"
        if isinstance(x, enum.Enum):
            return f"{kind.__qualname__}.{x.name}"
        if isinstance(x, re.Pattern):
            return f"pattern {x.pattern!r}"
        if _is_own(kind):
            raise NotKept(f"{self.name} holds a {kind.__qualname__}")
        held = getattr(x, "__dict__", None)
        if depth and type(held) is dict and kind.__module__.startswith("transformers."):
            return f"{kind.__qualname__} {self.told(held, depth - 1)}"
        return kind.__qualname__


def _is_own(cls: type) -> bool:
    return cls.__module__ in sys.modules and origin(cls.__module__) == "own"


_OF_C = {  # functions and members that C defines
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType,
}  # fmt: skip
_CODES: dict[int, tuple[types.CodeType, str]] = {}


__all__ = ["NotKept", "surroundings"]
