"""Every family of local kernels against ATen on a GPU: checked, then timed in turn by CUDA graphs.

    python bench/kernels.py                      # goes on from its results; repeat until nothing is left
    python bench/kernels.py --chosen             # about sixty of them, of every kind: what to measure first
    python bench/kernels.py --list               # the problems, without a GPU
    python bench/kernels.py --table              # what was measured, without a GPU

The layers of tuning/layers as one of 1, 2, 4, 8 ranks has them, split by channel, filter, sample or rows. ATen runs in
benchmark mode, in both memory formats, as a matrix product where that is the same, at the same accuracy; the best of
those is the baseline. Operands are as a launch before left them in the cache. Regimes and shares of the roofline are
by ceilings measured in the same run. Exit code 2: nothing could be measured; 3: a kernel broke the device's context.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from kernel_tables import DTYPES, NAMES, PHASES, REGIMES, assumed, show_table, verdict
from rich.console import Console

from convgen.algebra.conv import Conv
from convgen.errors import ConvgenError, InputError, Note
from convgen.kernels.families import FAMILIES, GpuFamily
from convgen.kernels.partition import SPLITS, local_problem
from convgen.kernels.problem import Problem
from convgen.kernels.work import whole_bytes, whole_flops
from convgen.resources import data_file
from convgen.spec.reader import read_csv
from convgen.spec.target import read_target
from convgen.tune.key import key_of as problem_key

NETWORKS = ("resnet50", "wrn50_2", "vgg16", "alexnet")
SM_90 = read_target("cuda:sm_90").known()  # whose families are all there are
AHEAD = 2  # problems whose candidates are compiled while others are timed


# ---- Problems ------------------------------------------------------------------------------------------------------


@dataclass
class Planned:
    """A local problem, and which layers have it: (network, layer, split, ways)."""

    problem: Problem
    uses: list[list[Any]] = field(default_factory=list)

    @property
    def fused(self) -> bool:
        return self.problem.x_parts * self.problem.y_parts > 1

    @property
    def flops(self) -> int:
        return whole_flops(self.problem)

    @property
    def bytes(self) -> int:
        return whole_bytes(self.problem)


def in_parts(conv: Conv, p: Problem, split: str, ways: int) -> Problem | None:
    """The same with what is gathered or scattered in parts: x of a filter split, y of a channel split."""
    if ways == 1 or conv.groups > 1:
        return None
    if split == "filter" and p.channels % ways == 0:
        return replace(p, channels=p.channels // ways, x_parts=ways)
    if split == "channel" and p.filters % ways == 0:
        return replace(p, filters=p.filters // ways, y_parts=ways)
    return None


def key_of(p: Problem) -> str:
    """A problem as its results are found by; the memory format is no part of it."""
    return problem_key(p).replace(f" {p.memory_format} ", " ")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the flags ask for."""

    networks: tuple[str, ...]
    layers: tuple[str, ...]
    ways: tuple[int, ...]
    splits: tuple[str, ...]
    phases: tuple[str, ...]
    dtypes: tuple[str, ...]
    families: tuple[str, ...]
    configs: int
    fused: bool
    limit: int | None
    chosen: bool = False


def read_layers(wanted: Wanted) -> list[tuple[str, str, Conv]]:
    """Network, layer and convolution of each layer, in an order that any beginning of is a fair sample of."""
    found: list[tuple[str, str, Conv]] = []
    for network in wanted.networks:
        path = Path(network) if network.endswith(".csv") else data_file("tuning", "layers") / f"{network}.csv"
        if not path.exists():
            known = ", ".join(sorted(p.stem for p in data_file("tuning", "layers").glob("*.csv")))
            raise InputError(f"--networks {network}: there is no {path.name}", hint=f"{known}, or a CSV file")
        for layer in read_csv(str(path), grid={"N": 1}):
            if any(fnmatch(layer.name, pattern) for pattern in wanted.layers or ("*",)):
                found += [(Path(network).stem, layer.name, layer.conv)]
    return sorted(found, key=lambda named: hashlib.sha256(f"{named[0]}.{named[1]}".encode()).hexdigest())


def plan(wanted: Wanted) -> dict[str, Planned]:
    """The problems by their keys, in turn of each way to split, phase and type."""
    found: dict[str, Planned] = {}
    turns: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for network, name, conv in read_layers(wanted):
        for dtype in wanted.dtypes:
            for split in wanted.splits:
                for ways in wanted.ways:
                    for phase in wanted.phases:
                        p = local_problem(conv, split, ways, phase, dtype)
                        for q in (p, in_parts(conv, p, split, ways) if p and wanted.fused else None):
                            if q is not None:
                                key = key_of(q)
                                if key not in found:
                                    found[key] = Planned(q)
                                    turns[dtype, split, ways, phase, q is p].append(key)
                                found[key].uses.append([network, name, split, ways])
    if wanted.chosen:
        turns = {
            turn: spread([found[k] for k in keys], 3 if turn[0] == DTYPES[0] else 1) for turn, keys in turns.items()
        }
        taken = [found[k].problem for keys in turns.values() for k in keys]
        turns |= {(family.NAME,): left_out(family, found.values(), taken) for family in FAMILIES}
    order = [key for turn in zip_longest(*turns.values()) for key in turn if key is not None]
    return {key: found[key] for key in order[: wanted.limit]}


def spread(problems: Sequence[Planned], count: int) -> list[str]:
    """Keys of so many of the problems, from those with few flops a byte to those with many."""
    ordered = sorted(problems, key=lambda q: (q.flops / q.bytes, key_of(q.problem)))
    places = (int((i + 0.5) * len(ordered) / count) for i in range(min(count, len(ordered))))
    return [key_of(ordered[place].problem) for place in places]


def left_out(family: GpuFamily, problems: Iterable[Planned], taken: Sequence[Problem]) -> list[str]:
    """Of each phase in which a family can none of those taken, the largest problem that it can."""
    able = [q for q in problems if family.refusal(q.problem, SM_90) is None]
    seen = {p.phase for p in taken if family.refusal(p, SM_90) is None}
    phases = sorted({q.problem.phase for q in able} - seen)

    def worth(q: Planned) -> tuple[bool, float, str]:
        return q.problem.dtype == DTYPES[0], q.flops, key_of(q.problem)

    return [max(worth(q) for q in able if q.problem.phase == phase)[2] for phase in phases]


def show_list(planned: dict[str, Planned], console: Console) -> None:
    """The problems with flops, bytes and regime."""
    roof, floor = assumed()
    console.print(
        f"{len(planned)} problems; regimes by tuning/machines/cuda.yaml, which is assumed, not measured:"
        f" {roof.bytes_per_s / 1e12:.1f} TB/s, a launch {floor:.1f} us, "
        + ", ".join(f"{d} {roof.flops_per_s[d] / 1e12:.0f} TFLOP/s" for d in DTYPES)
    )
    counts: Counter[str] = Counter()
    for key, q in planned.items():
        times = roof.times(q.problem.dtype, q.flops, q.bytes, floor)
        regime = max(times, key=lambda r: times[r])
        counts[regime] += 1
        network, name, split, ways = q.uses[0]
        use = f"{network}.{name} {ways} {split}" + (f" (+{len(q.uses) - 1})" if len(q.uses) > 1 else "")
        console.print(
            f"{key}  {q.flops / 1e9:.3f} GFLOP  {q.bytes / 1e6:.2f} MB  {regime} {times[regime]:.1f} us  {use}"
        )
    console.print(", ".join(f"{counts[r]} bound by {r}" for r in REGIMES))


# ---- Results -------------------------------------------------------------------------------------------------------


def sources() -> str:
    """A digest of what kernels are made from."""
    digest = hashlib.sha256()
    folders = (data_file("templates", "kernels"), Path(sys.modules["convgen.kernels"].__file__ or "").parent)
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".jinja"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Results:
    """The JSON file: devices and versions apart, each with runs (ceilings, date) and problems."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"devices": {}}
        if path.exists():
            try:
                self.data = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                fact = f"{path} holds no results: {error}"
                raise InputError(fact, hint="another file by --results, or remove this one") from None
        if not isinstance(self.data, dict) or "devices" not in self.data:
            raise InputError(f"{path} holds no results", hint="another file by --results, or remove this one")

    def of(self, facts: dict[str, str]) -> dict[str, Any]:
        """The part of a device and its versions."""
        name = " | ".join(f"{k} {v}" for k, v in facts.items())
        empty: dict[str, Any] = {"facts": facts, "runs": [], "problems": {}, "deadly": {}}
        return self.data["devices"].setdefault(name, empty)

    def save(self) -> None:
        """Whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        made.write_text(json.dumps(self.data, indent=0), encoding="utf-8")
        os.replace(made, self.path)


def is_done(record: dict[str, Any] | None, wanted: Wanted, digest: str = "") -> bool:
    """Whether a problem was measured with as many candidates; and from these sources, if there is a digest."""
    if record is None or (digest and record["sources"] != digest):
        return False
    return record["configs"] >= wanted.configs and set(wanted.families) <= set(record["families"])


# ---- Measuring -----------------------------------------------------------------------------------------------------


def check_device() -> None:
    """Raises InputError where nothing can be measured."""
    try:
        import torch
    except ImportError:
        raise InputError("torch is not installed; nothing was measured", hint="pip install torch") from None
    if not torch.cuda.is_available():
        raise InputError(
            "there is no GPU here; nothing was measured",
            notes=(Note("torch", f"{torch.__version__}, without a device that it can use"),),
            hint="--list for the problems, --table for results from elsewhere, or a machine with a GPU",
        )


def run(wanted: Wanted, results: Results, budget_s: float, jobs: int, again: bool, console: Console) -> int:
    """Measure what is left, until time is up; the exit code."""
    # Needs torch, which --list and --table do without.
    from kernel_measure import Compilers, DeviceLost, candidates, cause, measure

    from convgen.tune.clock import CudaClock, ceilings
    from convgen.tune.gpu import gpu_facts, this_gpu

    end = time.monotonic() + budget_s
    facts, device = gpu_facts(), this_gpu()
    assert device is not None
    target = read_target(device.target).known()
    mine, clock = results.of(facts), CudaClock()
    marker = results.path.with_suffix(".running")
    results.path.parent.mkdir(parents=True, exist_ok=True)
    blame(marker, mine, console)
    results.save()  # the next process may not get as far as a problem's end
    planned = plan(wanted)
    for key, record in mine["problems"].items():
        if key in planned:
            record["uses"] = planned[key].uses + [u for u in record["uses"] if u not in planned[key].uses]
    digest = sources()
    left = [k for k in planned if not is_done(mine["problems"].get(k), wanted, digest if again else "")]
    console.print(f"{facts['device']}: {len(planned)} problems, {len(left)} of them to measure, {budget_s:.0f} s")
    if not left:
        return 0
    compilers = Compilers(jobs)
    made: dict[str, list[Any]] = {}

    def prepare(keys: Sequence[str]) -> None:
        for key in keys:
            if key not in made:
                made[key] = candidates(planned[key].problem, target, wanted.families, wanted.configs)
                compilers.submit(key, made[key])

    longest = 0.0
    try:
        prepare(left[: 1 + AHEAD])
        mine["runs"].append({"date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")} | ceilings(clock))
        for i, key in enumerate(left):
            if time.monotonic() + longest > end:
                console.print(f"time is up: {len(left) - i} problems are left; the same command goes on")
                break
            start = time.monotonic()
            prepare(left[i : i + 1 + AHEAD])
            left_out = {**compilers.failures(key), **mine["deadly"].get(key, {})}
            q = planned[key]
            record: dict[str, Any] = {
                "uses": q.uses, "dtype": q.problem.dtype, "phase": q.problem.phase, "fused": q.fused,
                "flops": q.flops, "bytes": q.bytes, "run": len(mine["runs"]) - 1, "sources": digest,
                "configs": wanted.configs, "families": list(wanted.families),
            }  # fmt: skip
            try:
                record |= measure(q.problem, key, made.pop(key), left_out, clock, marker)
            except DeviceLost as lost:
                results.save()
                return give_up(key, str(lost))
            except Exception as error:
                record["failed"] = cause(error)
                if not clock.alive():
                    mine["problems"][key] = record | {"seconds": round(time.monotonic() - start, 2)}
                    results.save()
                    return give_up(key, cause(error))
            clock.tidy()
            longest = max(longest, time.monotonic() - start)
            mine["problems"][key] = record | {"seconds": round(time.monotonic() - start, 2)}
            results.save()
            console.print(f"{i + 1}/{len(left)} {key}: {verdict(record)}", highlight=False)
    finally:
        compilers.close()
    results.save()
    return 0


def give_up(key: str, text: str) -> int:
    """Say that the device's context is gone, and with it this process; exit code 3."""
    click.echo(f"the device was lost at {key}: {text}", err=True)
    click.echo("  try     the same command: it goes on without what ran last", err=True)
    return 3


def blame(marker: Path, mine: dict[str, Any], console: Console) -> None:
    """Leave out a candidate that the process before this one did not survive."""
    if not marker.exists():
        return
    lines = marker.read_text(encoding="utf-8").splitlines()
    if len(lines) == 2:
        mine["deadly"].setdefault(lines[0], {})[lines[1]] = "the process, or its device, did not survive it"
        console.print(f"left out from now on, since the last run ended in it: {lines[1]} of {lines[0]}")
    marker.unlink()


# ---- The command ---------------------------------------------------------------------------------------------------


class Words(click.ParamType):
    """Comma-separated words, of some or of any."""

    name = "a,b"

    def __init__(self, some: Sequence[str] = ()) -> None:
        self.some = some

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(dict.fromkeys(w.strip() for w in value.split(",") if w.strip()))
        for word in words:
            if self.some and word not in self.some:
                self.fail(f"{word!r} is none of {', '.join(self.some)}", param, ctx)
        return words


@click.command(help=__doc__.split("\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--networks", type=Words(), default=",".join(NETWORKS), show_default=True,
              help="Names in tuning/layers, or CSV files.")  # fmt: skip
@click.option("--layers", type=Words(), default="", help="Names of layers, or patterns (res3*); all by default.")
@click.option("--ways", type=Words(), default="1,2,4,8", show_default=True, help="Ranks that share a layer.")
@click.option("--splits", type=Words(SPLITS), default=",".join(SPLITS), show_default=True)
@click.option("--phases", type=Words(PHASES), default=",".join(PHASES), show_default=True)
@click.option("--dtypes", type=Words(DTYPES), default=",".join(DTYPES), show_default=True)
@click.option("--families", type=Words(NAMES), default=",".join(NAMES), show_default=True)
@click.option("--configs", type=click.IntRange(0), default=4, show_default=True,
              help="Configurations of a family beside its default one.")  # fmt: skip
@click.option(
    "--fused", is_flag=True, help="Also activations in parts: unpack + convolution + pack against ATen and copies."
)
@click.option(
    "--chosen",
    is_flag=True,
    help="Of each type, split, ways and phase those at the ends and in the middle; of each family one at least.",
)
@click.option("--limit", type=click.IntRange(1), help="Only the first so many problems.")
@click.option("--budget", type=float, default=500.0, show_default=True, help="Seconds after which it ends.")
@click.option("--jobs", type=click.IntRange(0), default=min(16, os.cpu_count() or 1), show_default=True,
              help="Processes that compile ahead; 0 compiles at the launch.")  # fmt: skip
@click.option("--again", is_flag=True, help="Measure anew what other sources of kernels gave.")
@click.option(
    "--results", "file", type=click.Path(path_type=Path), default=Path("build/kernels.json"), show_default=True
)
@click.option("--list", "listing", is_flag=True, help="Print the problems and measure nothing.")
@click.option("--table", is_flag=True, help="Print the table of the results and measure nothing.")
def main(**given: Any) -> None:
    console = Console(width=None if sys.stdout.isatty() else 190, soft_wrap=True, markup=False)
    try:
        sys.exit(command(given, console))
    except ConvgenError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


def command(given: dict[str, Any], console: Console) -> int:
    """From the flags to the exit code."""
    if not all(w.isdigit() and int(w) for w in given["ways"]):
        raise InputError(f"--ways {','.join(given['ways'])}: not whole numbers, 1 or more", hint="--ways 1,2,4,8")
    wanted = Wanted(
        ways=tuple(sorted(int(w) for w in given["ways"])),
        **{n: given[n] for n in ("networks", "layers", "splits", "phases", "dtypes", "families")},
        **{n: given[n] for n in ("configs", "fused", "limit", "chosen")},
    )
    if given["listing"]:
        show_list(plan(wanted), console)
        return 0
    if not given["table"]:
        check_device()
    results = Results(given["file"])
    code = 0 if given["table"] else run(wanted, results, given["budget"], given["jobs"], given["again"], console)
    if not results.data["devices"]:
        console.print(f"{results.path}: no results")
    show_table(results.data["devices"], console)
    return code


if __name__ == "__main__":
    main()
