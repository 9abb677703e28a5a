"""Where it ran, and with what: for the head of every results file."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from axolotl.integrations.protrain.core.planner.hardware import cpu_name

_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "axolotl",
    "deepspeed",
    "torchao",
)


def describe() -> dict[str, str]:
    """Hardware, versions and commit."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        total = torch.cuda.get_device_properties(0).total_memory
        device += f", {total / 2**30:.0f} GiB"
    else:
        device = "none, the plugin's CPU device stands in"
    cores = len(os.sched_getaffinity(0))
    return {
        "device": device,
        "processor": f"{cpu_name()}, {cores} cores",
        "host memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        **{package: package_version(package) for package in _PACKAGES},
        "commit": commit(),
    }


def package_version(package: str) -> str:
    """The installed one, in words if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def command() -> str:
    """How this process was started, but for where its results go."""
    options = sys.argv[1:]
    if "--output" in options:
        at = options.index("--output")
        options = [*options[:at], *options[at + 2 :]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *options])


def commit() -> str:
    """Of this checkout, with a plus if files differ from it; a copy has none."""
    here = Path(__file__).parent
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or os.environ.get("COMMIT", "unknown")
