# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (triton and parts of torch have no types)
"""The GPU that torch sees: its name, its target, and the versions of what runs on it."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from convgen.spec.target import Target, read_target
from convgen.tune.device import Device


def this_gpu() -> Device | None:
    """The current GPU; None where torch sees none.

    Raises:
        InputError: kernels are not made for its architecture.
    """
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(properties.name, str(_target_of(properties)))


def _target_of(properties: Any) -> Target:
    if torch.version.hip:
        return read_target(f"hip:{properties.gcnArchName.split(':')[0]}").known()
    return read_target(f"cuda:sm_{properties.major}{properties.minor}").known()


def gpu_facts() -> dict[str, str]:
    """The names and versions to which results belong."""
    import triton

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        shown = []
    return {
        "device": properties.name,
        "driver": shown[0] if shown else "unknown",
        "cuda": str(torch.version.cuda or torch.version.hip),
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        "cudnn": str(torch.backends.cudnn.version()),
    }
