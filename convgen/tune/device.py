"""The device on which kernels are measured: the name under which results are kept, and the versions that they belong
to.

Found without importing torch, since compiling looks its kernels up.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from convgen.knobs import cpu_threads
from convgen.spec.target import Target


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its name, which for a CPU includes the number of threads; a GPU has 0 threads."""

    name: str
    target: str
    threads: int = 0

    @property
    def file_name(self) -> str:
        """The file name of its database."""
        return re.sub(r"[^A-Za-z0-9.]+", "_", self.name).strip("_") + ".json"


@cache
def this_cpu(threads: int | None = None) -> Device:
    """The CPU that this process runs on, with as many threads as torch takes unless told otherwise."""
    threads = threads or cpu_threads()
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    model = facts.get("model name") or facts.get("CPU part") or os.uname().machine
    generation = f" {facts['cpu family']}-{facts['model']}" if {"cpu family", "model"} <= facts.keys() else ""
    return Device(f"{model}{generation}, {threads} thread{'s' if threads > 1 else ''}", "cpu", threads)


@cache
def this_gpu_name() -> str:
    """The name of this machine's GPU, from its driver; empty if there is none, or the driver does not say."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return ""


def versions(target: Target) -> dict[str, str]:
    """The versions of installed packages on which a measured time depends, without local parts (2.13.0 of
    2.13.0+cpu)."""
    found: dict[str, str] = {}
    for package in ("torch", "triton") if target.is_gpu else ("torch",):
        try:
            found[package] = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return found


def versions_text(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def minor(version: str) -> str:
    """A version's first two numbers: 2.13 of 2.13.0."""
    return ".".join(version.split(".")[:2])
