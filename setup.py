"""Builds the transfer kernels (csrc/) as plain shared libraries beside the package.

They have a C interface and need neither torch nor Python headers. Whatever goes wrong here, installation goes
on: the package then uses its pure-torch code and says so. `DARIC_RAG_CUDA=0|1` decides about the CUDA part
instead of the presence of nvcc and of a CUDA torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU_SOURCES = ["csrc/transfer_cpu.cpp", "csrc/transfer_cpu_avx2.cpp", "csrc/transfer_cpu_baseline.cpp"]
CUDA_SOURCE = "csrc/transfer_kernels.cu"
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))
# Products and sums must be rounded one by one, as torch does, for results equal to the bit.
CPU_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fopenmp",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
CUDA_FLAGS = [
    "-std=c++17",
    "-O3",
    "--fmad=false",
    "-Xcompiler=-fPIC",
    "-gencode=arch=compute_80,code=[sm_80,compute_80]",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
]


class BuildKernels(build_ext):
    """`build_ext` that hands the CUDA library to nvcc."""

    def build_extension(self, ext: Extension) -> None:
        if ext.sources != [CUDA_SOURCE]:
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["nvcc", *CUDA_FLAGS, "--shared", CUDA_SOURCE, "-o", str(target)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(f"the CUDA transfer kernels were not built: {error}")


def wants_cuda() -> bool:
    """Whether to build the CUDA library; an isolated build cannot see torch and goes by nvcc alone."""
    chosen = os.environ.get("DARIC_RAG_CUDA")
    if chosen is not None:
        return chosen == "1"
    if shutil.which("nvcc") is None or sys.platform != "linux":
        return False
    if importlib.util.find_spec("torch") is None:
        return True
    import torch

    return torch.version.cuda is not None


def extensions() -> list[Extension]:
    """The libraries to build here, all optional."""
    cpu = Extension(
        "daric_rag._C",
        CPU_SOURCES,
        depends=HEADERS,
        language="c++",
        extra_compile_args=CPU_FLAGS,
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    if not wants_cuda():
        return [cpu]
    return [cpu, Extension("daric_rag._cuda", [CUDA_SOURCE], depends=HEADERS, optional=True)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
