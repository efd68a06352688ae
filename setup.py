"""Builds the native CPU kernels; everything else stands in pyproject.toml.

The same sources are compiled once per instruction level. `onward.kernels.native.library` picks one
at run time. Without a compiler the package installs all the same and runs on PyTorch's operators.
"""

import copy
import hashlib
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/onward/kernels/native")
# Never -ffast-math: linked into a process it changes every library's denormals, and NaN checks go.
# Errno and trap handlers alone keep loops with sqrtf and comparisons from vectorising.
COMMON = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall"]
# For tests/kernels/sanitize.py. -fno-wrapv: Python's own flags define signed overflow.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
SANITIZE = [*SANITIZERS, "-O1", "-fno-omit-frame-pointer", "-fno-wrapv"]
LEVELS = {"plain": []}
if platform.machine() in ("x86_64", "AMD64"):
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


setup(
    cmdclass={"build_ext": BuildExt},
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
    ext_modules=[
        Extension(
            f"onward.kernels.native.{level}",
            sources=sorted(str(p) for p in FOLDER.glob("src/*.cpp")),
            depends=sorted(str(p) for p in FOLDER.glob("src/*.h")),
            define_macros=[("ONWARD_SOURCES", f'"{DIGEST.hexdigest()}"')],
            extra_compile_args=[*COMMON, *flags],
            # Not linked with OpenMP: PyTorch's own runtime serves both (see library.py).
            optional=True,
        )
        for level, flags in LEVELS.items()
    ],
)
