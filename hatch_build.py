"""Compile the loss's CPU kernels into the wheel, where there is a C++ compiler.

Without one the wheel has no kernels, and the loss falls back to PyTorch operations. `CXX` names the
compiler and may include options.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/pseudograd/loss/cpp")
FLAGS = [
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra"),
    # NaN and infinity keep their meaning; only errno and floating-point traps are given up.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wno-psabi", "-Wno-maybe-uninitialized"),
]
# A library for each kind of processor, by the names of torch.backends.cpu.get_cpu_capability().
PROCESSORS = {"DEFAULT": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    PROCESSORS |= {"AVX2": ["-march=x86-64-v3"], "AVX512": ["-march=x86-64-v4"]}


class Kernels(BuildHookInterface[Any]):
    """Compiles the sources for each kind of processor."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to a wheel, which makes it specific to this platform."""
        compiler, *options = shlex.split(os.environ.get("CXX") or "c++")
        source = Path(self.root, SOURCE)
        if self.target_name != "wheel" or os.name == "nt" or shutil.which(compiler) is None:
            return
        files = sorted(source.iterdir())
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        for name, flags in PROCESSORS.items():
            library = source.with_name(f"cpu_{name}.so")
            part = library.with_suffix(f".{os.getpid()}")
            defined = f'-DSOURCE="{digest}"'
            settings = [*options, *FLAGS, *flags, defined]
            command = [compiler, *settings, str(source / "loss.cpp"), "-o", str(part)]
            if subprocess.run(command).returncode:
                print(f"pseudograd: no CPU kernels for {name}: see above", file=sys.stderr)
                continue
            part.replace(library)
            build_data["artifacts"].append(f"/{library.relative_to(self.root)}")
        if build_data["artifacts"]:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{re.sub('[.-]', '_', sysconfig.get_platform())}"
