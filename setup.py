"""Builds the native CPU kernels; everything else stands in pyproject.toml.

The same sources are compiled once per instruction level. `onward.kernels.native.library` picks one
at run time. Without a compiler the package installs all the same and runs on PyTorch's operators.

The libraries use nothing of Python's, so that one wheel serves every Python of a platform
(docs/notes/0075-wheels-and-places.md). With ONWARD_NATIVE=0 nothing is compiled, and the wheel is
one for every platform.
"""

import copy
import hashlib
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/onward/kernels/native")
# Never -ffast-math: linked into a process it changes every library's denormals, and NaN checks go.
# Errno and trap handlers alone keep loops with sqrtf and comparisons from vectorising.
# -g0: Python's own flags ask for debug information, ten times the code, with the builder's paths.
COMMON = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-g0"]
# For tests/kernels/sanitize.py. -fno-wrapv: Python's own flags define signed overflow.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
SANITIZE = [*SANITIZERS, "-O1", "-g", "-fno-omit-frame-pointer", "-fno-wrapv"]
# Apple's and Microsoft's compilers know neither the sources' vector types nor OpenMP as they are.
HAS_NATIVE = sys.platform not in ("darwin", "win32") and os.environ.get("ONWARD_NATIVE") != "0"
# A wheel for others has every level, or is not made.
IS_RELEASE = os.environ.get("CIBUILDWHEEL") == "1"
# "plain" has what every processor of the architecture has: SSE2 on x86-64, NEON on aarch64.
LEVELS = {"plain": []} if HAS_NATIVE else {}
if HAS_NATIVE and platform.machine() in ("x86_64", "AMD64"):
    LEVELS["avx2"] = ["-march=x86-64-v3"]
    LEVELS["avx512"] = ["-march=x86-64-v4", "-mprefer-vector-width=512"]

# the digest of the C++ sources, which src/onward/kernels/native/library.py computes in the same
# way; that module cannot be imported here
DIGEST = hashlib.sha256()
for path in sorted(FOLDER.glob("src/*")):
    DIGEST.update(path.name.encode() + path.read_bytes())


def _at_once(compile_all):
    """A compiler's `compile`, with the sources compiled side by side: three levels would leave one
    of two cores idle for a third of the time."""

    def compile_each(sources, **options):
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            made = pool.map(lambda source: compile_all([source], **options), sources)
            return [path for paths in made for path in paths]

    return compile_each


class BuildExt(build_ext):
    """`build_ext` with a folder of objects per extension.

    The levels compile the same sources at the same time. In one folder each would write over
    the others' objects, and a library would hold code of another level, or half an object.

    With `--sanitize` AddressSanitizer and UBSan watch the kernels, and every level has to compile.
    `--levels avx2,plain` builds these alone.
    """

    user_options: ClassVar = [
        *build_ext.user_options,
        ("sanitize", None, "with sanitizers, -O1"),
        ("levels=", None, "instruction levels, with commas between; all where none is named"),
    ]
    boolean_options: ClassVar = [*build_ext.boolean_options, "sanitize"]

    def initialize_options(self):
        super().initialize_options()
        self.sanitize = False
        self.levels = ""

    def finalize_options(self):
        super().finalize_options()
        if self.levels:
            wanted = [f"onward.kernels.native.{level}" for level in self.levels.split(",")]
            self.extensions = [ext for ext in self.extensions if ext.name in wanted]
        for ext in self.extensions if self.sanitize else []:
            ext.extra_compile_args += SANITIZE
            ext.extra_link_args += SANITIZERS
            ext.optional = False

    def build_extension(self, ext):
        own = copy.copy(self)  # this method runs on several threads
        own.build_temp = str(Path(self.build_temp) / ext.name)
        own.compiler = copy.copy(self.compiler)
        own.compiler.compile = _at_once(self.compiler.compile)
        build_ext.build_extension(own, ext)

    def copy_extensions_to_source(self):
        """Puts the libraries beside their sources, in the place of those with another name, as
        builds of one Python had."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            level, made = ext.name.rpartition(".")[2], Path(self.get_ext_filename(ext.name)).name
            for path in FOLDER.glob(f"{level}.*.so"):
                if path.name != made and (FOLDER / made).exists():
                    path.unlink()


setup(
    cmdclass={"build_ext": BuildExt},
    options={
        "build_ext": {"parallel": os.cpu_count() or 1},
        "bdist_wheel": {"py_limited_api": "cp311"} if LEVELS else {},
    },
    ext_modules=[
        Extension(
            f"onward.kernels.native.{level}",
            sources=sorted(str(p) for p in FOLDER.glob("src/*.cpp")),
            depends=sorted(str(p) for p in FOLDER.glob("src/*.h")),
            define_macros=[("ONWARD_SOURCES", f'"{DIGEST.hexdigest()}"')],
            extra_compile_args=[*COMMON, *flags],
            # Not linked with OpenMP: PyTorch's own runtime serves both (see library.py).
            optional=not IS_RELEASE,
            py_limited_api=True,
        )
        for level, flags in LEVELS.items()
    ],
)
