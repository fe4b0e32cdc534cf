"""Training scripts on processes, with both kinds of parameters, against the same script on one process.

Every script of training_steps.py, training_runs.py and training_mixed.py (torch alone) and training_libraries.py trains
what `convgen.parallelize` gives on 2 or 4 processes with gloo, in float64 or in mixed precision, by the very lines that
train the module on one process. `python bench/training_scripts.py` runs them all on all grids.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import tempfile
import threading
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import training_libraries
import training_mixed
import training_runs
import training_steps
from steps_on_ranks import LIMIT
from torch import Tensor, nn
from training_steps import Make, Script

import convgen
from convgen.spec.text import parse_grid
from convgen.verify.processes import ProcessFailed, spawn

KINDS = ("dtensors", "blocks")
NETWORKS = (
    "net", "backbone", "generator", "discriminator", "net bfloat16", "net float32", "discriminator float32",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A grid, the one that checkpoints go to, and what the networks are like."""

    grid: str
    elsewhere: str
    ragged: bool = False  # 7 filters behind 8
    channels: int = 3  # of the images; 3 over two ranks, or 7 filters, make Blocks of some parameters among DTensors

    @property
    def name(self) -> str:
        return self.grid + ", ragged" * self.ragged + ", even" * (self.channels % 2 == 0)

    @property
    def ranks(self) -> int:
        return math.prod(parse_grid(self.grid).values())


CASES = (
    Case("N=2", "C=2"),
    Case("H=2", "C=2"),
    Case("C=2", "H=2"),
    Case("C=2", "N=2", ragged=True),
    Case("C=2", "N=2", channels=4),
    Case("N=2,H=2", "C=4"),
    Case("N=2,C=2", "H=2,C=2", ragged=True),
)


class Backbone(nn.Module):
    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, filters, 3, 2, 1, bias=False), nn.BatchNorm2d(filters)
        nn.init.uniform_(self.bn1.weight, 0.5, 1.5)
        with torch.no_grad():
            self.bn2.weight.copy_(torch.linspace(0.5, 1.5, filters))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x))).mean((2, 3))


class Net(Backbone):
    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(channels, filters)
        self.fc = nn.Linear(filters, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(super().forward(x))


class Generator(nn.Module):
    def __init__(self, channels: int, filters: int, odd: bool) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, filters, 3, 2, 1, output_padding=0 if odd else 1, bias=False)
        self.bn, self.out = nn.BatchNorm2d(filters), nn.Conv2d(filters, channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        return self.out(F.leaky_relu(self.bn(self.up(z)), 0.2)).tanh()


class Discriminator(nn.Module):
    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(channels, filters, 3, 2, 1), nn.Linear(filters, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.leaky_relu(self.conv(x), 0.2).mean((2, 3)))


@cache
def source(kind: str, ragged: bool, channels: int) -> tuple[nn.Module, Tensor]:
    """A network with its seed's weights, and what it takes; in float64, or as "net bfloat16" says."""
    torch.manual_seed(1)
    kind, _, of = kind.partition(" ")
    filters, (rows, columns) = (7, (9, 7)) if ragged else (8, (8, 8))
    x = torch.zeros(4, channels, rows, columns, dtype=torch.float64)
    match kind:
        case "net":
            module = Net(channels, filters)
        case "backbone":
            module = Backbone(channels, filters)
        case "generator":
            module = Generator(channels, filters, ragged)
            x = torch.zeros(4, 4, (rows + 1) // 2, (columns + 1) // 2, dtype=torch.float64)
        case _:
            module = Discriminator(channels, filters)
    dtype: torch.dtype = getattr(torch, of or "float64")
    return module.to(dtype), x.to(dtype)


@cache
def on_ranks(kind: str, ragged: bool, channels: int, grid: str, parameters: str) -> Any:
    """The network on this process's ranks, of which scripts train copies."""
    module, x = source(kind, ragged, channels)
    return convgen.parallelize(module, (x,), grid, None, parameters=parameters)


def make_of(case: Case, folder: Path, parameters: str | None, off: float = 0.0, at_random: int = 0) -> Make:
    """What a script has; parameters: the kind of ours, or none for one process."""

    def network(kind: str, elsewhere: bool) -> Any:
        if parameters is None:
            return copy.deepcopy(source(kind, case.ragged, case.channels)[0])
        return copy.deepcopy(
            on_ranks(kind, case.ragged, case.channels, case.elsewhere if elsewhere else case.grid, parameters)
        )

    x = source("net", case.ragged, case.channels)[1]
    return Make(
        network, (x.shape[0], x.shape[1], x.shape[2], x.shape[3]), 7 if case.ragged else 8, folder, off, at_random
    )


def whole(value: Any) -> dict[str, Tensor]:
    """What a script gives, as whole tensors of one process."""
    if not isinstance(value, nn.Module):
        return {"": torch.as_tensor(value, dtype=torch.float64)}
    if hasattr(value, "full_state_dict"):
        return value.full_state_dict()  # type: ignore[operator]
    found = {
        n: t.detach().clone() for n, t in [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
    }
    for name, child in value.named_children():
        found |= {f"{name}.{n}": t for n, t in whole(child).items()}
    return found


def result_of(script: Script, make: Make) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = script.run(make)
    return {f"{name} {n}".strip(): t for name, value in found.items() for n, t in whole(value).items()}


@cache
def truth(script: Script, case: Case, off: float = 0.0, at_random: int = 0) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = result_of(script, make_of(case, Path(folder), None, off, at_random))
    start = source("net", case.ragged, case.channels)[0].state_dict()
    moved = [float((found[f"model {n}"] - t).abs().max()) for n, t in start.items() if f"model {n}" in found]
    assert not moved or max(moved) > 1e-3 or "numbers" in found, f"{script.name} trains nothing"
    return found


def error_of(found: dict[str, Tensor], true: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error, and where."""
    if set(found) != set(true):
        return math.inf, f"names {sorted(set(found) ^ set(true))}"
    worst = 0.0, ""
    for name, wanted in true.items():
        got, wanted = found[name].double(), wanted.double()
        if got.shape != wanted.shape:
            return math.inf, f"{name}: shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
        far = (got - wanted).abs()
        far = torch.where(got == wanted, 0.0, far).nan_to_num(math.inf, math.inf)  # infinite alike is alike
        error = float(far.max() / wanted.abs().max().clamp(1e-6, 1e300)) if wanted.numel() else 0.0
        worst = max(worst, (error, name))
    return worst


@dataclass(frozen=True)
class Outcome:
    """right, wrong, refused or parted; with the error and where it is, or what is raised."""

    verdict: str
    error: float = 0.0
    text: str = ""

    def __str__(self) -> str:
        match self.verdict:
            case "right":
                return f"{self.error:.0e}"
            case "wrong":
                return f"WRONG: {self.error:.1e} of {self.text}"
            case _:
                return f"{'PARTED' if self.verdict == 'parted' else 'refused'}: {self.text}"


def on_rank(script: Script, case: Case, kind: str, folder: str) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = result_of(script, make_of(case, Path(folder), kind))
        except Exception as e:
            lines = [line for line in str(e).splitlines() if line.strip()] or [""]
            return Outcome("refused", text=f"{type(e).__name__}: {lines[0].strip()}")
    error, where = error_of(found, truth(script, case))
    return Outcome("right" if error < limit_of(script, case) else "wrong", error, where)


OFF = ((1, 0), (-1, 0), (1, 1), (1, 2), (1, 3))  # units up, down, and either at random


def limit_of(script: Script, case: Case) -> float:
    """As far as a unit in the last place of images takes one process, by the largest of several draws, and half as far
    again (LIMIT): ranks round each addend of a sum, where one process rounds the sum alone."""
    if not script.unit:
        return script.limit
    runs = [truth(script, case, script.unit * sign, seed) for sign, seed in OFF]
    return max(script.limit, *(LIMIT * error_of(run, truth(script, case))[0] for run in runs))


def of_ranks(outcomes: Sequence[Outcome]) -> Outcome:
    verdicts = {one.verdict for one in outcomes}
    if "refused" in verdicts and len(verdicts) > 1:
        at = next(r for r, one in enumerate(outcomes) if one.verdict == "refused")
        return Outcome("parted", text=f"rank {at} alone raises {outcomes[at].text}")
    return max(outcomes, key=lambda one: (one.verdict == "wrong", one.error))


Runs = Sequence[tuple[Script, str]]
STUCK_S = 30.0  # for a script, on a machine that others use


def run(case: Case, runs: Runs) -> list[Outcome]:
    """The scripts with these kinds on processes, in one launch; if one stops them, the others in the next."""
    import torch.distributed as dist

    for script, _ in runs:
        limit_of(script, case)
        truth(script, case)
    for kind in NETWORKS:  # compiled before there are ranks
        module, x = source(kind, case.ragged, case.channels)
        convgen.from_torch(module, (x,), case.grid)
    with tempfile.TemporaryDirectory() as folder:

        def program(rank: int) -> None:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # torchrun's; nobody listens
            for i, (script, kind) in enumerate(runs):
                guard = threading.Timer(STUCK_S, os._exit, (1,))
                guard.start()
                outcome = on_rank(script, case, kind, f"{folder}/{i}")
                with Path(f"{folder}/{rank}.jsonl").open("a") as file:
                    file.write(json.dumps(astuple(outcome)) + "\n")
                dist.barrier()  # pyright: ignore[reportUnknownMemberType]  torch leaves device_ids untyped
                guard.cancel()

        failed = ""
        try:
            spawn(program, case.ranks, STUCK_S * len(runs))
        except ProcessFailed as e:
            failed = [line for line in str(e).splitlines() if line.strip()][-1].strip()
        paths = [Path(folder) / f"{rank}.jsonl" for rank in range(case.ranks)]
        ranks = [
            [Outcome(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
            for path in paths
        ]
    done = min(map(len, ranks))
    found = [of_ranks(outcomes) for outcomes in zip(*(one[:done] for one in ranks), strict=True)]
    if not failed:
        return found
    some = [f"rank {r}: {one[done]}" for r, one in enumerate(ranks) if len(one) > done]
    found.append(Outcome("parted", text="; ".join(some) or failed))
    return [*found, *run(case, runs[done + 1 :])] if runs[done + 1 :] else found


def installed(script: Script) -> bool:
    return not script.needs or importlib.util.find_spec(script.needs) is not None


OF_TORCH = (*training_steps.script.found, *training_runs.script.found)
MIXED = (*training_mixed.script.found,)
SCRIPTS = (*OF_TORCH, *MIXED, *training_libraries.script.found)
