"""Compiles the kernels; everything else stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "onward_example._kernels",
            sources=["src/onward_example/kernels.cpp"],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3"],
            optional=True,  # without a compiler the op runs as its body
        )
    ]
)
