"""What two versions of Triton make of the same kernels, or one of kernels that take extents as constants and as
arguments: the tests' problems, compiled for sm_90 and counted.

    python bench/kernel_versions.py                       # counts by the triton at hand, as JSON
    pip install --target build/triton36 --no-deps triton==3.6.0
    python bench/kernel_versions.py --other build/triton36   # where they differ
    python bench/kernel_versions.py --extents             # by one triton, of extents as constants and as arguments

No GPU: nothing is timed. `issue`, `shared` and `waits` are shares of the matrix units' peak that a step of the loop
allows by its instructions, with shared memory, and with waits between matrix instructions; `us` is the least time of
all launches (convgen/kernels/bound.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import triton

from convgen.kernels.choose import choose
from convgen.kernels.facts import bound, facts, launches
from convgen.kernels.problem import LocalDim, Problem
from convgen.program.nodes import Phase
from convgen.spec.target import read_target

TARGET = read_target("cuda:sm_90").known()
PHASES: tuple[Phase, ...] = ("forward", "backward_data", "backward_filter")
TOLD = {"issue": 2, "shared": 2, "waits": 2, "us": 1}  # what is compared, with its digits
TELLING = 0.1  # of a share, or of time: less is not shown


def square(phase: Phase, size: int = 14, channels: int = 256, kernel: int = 3, **changes: Any) -> Problem:
    """A layer of 32 samples in bfloat16 with channels last, unless told otherwise."""
    d = LocalDim("H", size, size, kernel, 1, 1, kernel // 2)
    values: dict[str, Any] = {
        "batch": 32, "channels": channels, "filters": channels, "dims": (d, replace(d, name="W")),
        "dtype": "bfloat16", "memory_format": "channels_last",
    }  # fmt: skip
    return Problem(phase=phase, **(values | changes))


def problems() -> Iterator[tuple[str, Problem]]:
    """Sixteen a phase, by name."""
    first = LocalDim("H", 224, 112, 7, 2, 1, 3)
    flat = {"memory_format": "contiguous"}
    for phase in PHASES:
        h, w = square(phase).dims
        yield "3x3 of 8 samples", square(phase, batch=8)
        yield "3x3 of 64 channels", square(phase, channels=64, filters=256)
        yield "4 rows and a halo", square(phase, rim=2, dims=(replace(h, x=6, y=4, below=0), w))
        yield "stride 2", square(phase, dims=(replace(h, stride=2, x=28), replace(w, stride=2, x=28)), batch=8)
        yield "1x1", square(phase, kernel=1, batch=8)
        yield "3x3 of 56x56", square(phase, size=56)
        yield "7x7 stem", square(phase, channels=3, filters=64, batch=8, dims=(first, replace(first, name="W")))
        yield "3x3 contiguous", square(phase, **flat)
        yield "1x1 contiguous", square(phase, size=28, kernel=1, **flat)
        for dtype in ("tfloat32", "float32"):
            yield f"3x3 {dtype}", square(phase, dtype=dtype)
            yield f"1x1 {dtype}", square(phase, size=28, kernel=1, dtype=dtype)
            yield f"64 channels {dtype}", square(phase, size=56, channels=64, dtype=dtype)
        yield "4 parts of 16 filters", square(phase, size=56, channels=16, y_parts=4)


def counts(some: Iterable[tuple[str, Problem]] | None = None, *, open: bool = False) -> dict[str, Any]:
    """Triton's version, and by problem and phase what it makes; of all problems, or of some.

    Args:
        open: extents are arguments.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, p in problems() if some is None else some:
        kernel = replace(choose((p,), TARGET), open=open)
        (main,) = [one for one in launches(kernel, p) if one.name == kernel.name]
        made = facts(main, TARGET, loops=True)
        b = bound(kernel, p, main, made)
        if b is None or made.loop is None:
            raise click.ClickException(f"{name} {p.phase}: no loop of matrix instructions in {kernel.config}")
        found[f"{name} {p.phase}"] = {
            "kernel": str(kernel.config), "spilled": made.spill_bytes, "narrowest": made.loop.narrowest_copy,
            "instructions": made.loop.instructions, "issue": round(b.share_by_issue, 3),
            "shared": round(b.share_without_waits, 3), "waits": round(b.share, 3), "us": round(b.us, 2),
        }  # fmt: skip
    return {"triton": triton.__version__, "kernels": found}


def compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Lines of what differs, and what all have."""
    here, there = one["kernels"], other["kernels"]
    versions = f"triton {one['triton']}, {other['triton']}"
    yield f"{versions:42}  instructions        issue       shared        waits           us"
    told = 0
    for name, a in here.items():
        b = there[name]
        if all(abs(a[n] / b[n] - 1) < TELLING for n in TOLD):
            continue
        told += 1
        texts = (f"{a[n]:.{digits}f}, {b[n]:.{digits}f}" for n, digits in TOLD.items())
        yield f"{name:42}  {a['instructions']:5}, {b['instructions']:5}  {'  '.join(f'{t:>11}' for t in texts)}"
    alike = sum(here[n]["kernel"] == there[n]["kernel"] for n in here)
    both = [*here.values(), *there.values()]
    yield (
        f"{len(here) - told} of {len(here)} differ by less than a tenth; {alike} have the same sizes; "
        f"{sum(r['spilled'] > 0 for r in both)} spill; copies of {min(r['narrowest'] for r in both)} bytes at least"
    )


def of_other(folder: Path) -> dict[str, Any]:
    """The same by the triton in a folder."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@click.command(help=__doc__)
@click.option("--other", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--extents", is_flag=True)
def main(other: Path | None, extents: bool) -> None:
    found = counts()
    if extents:
        found["triton"] += " with constants"
        click.echo("\n".join(compared(found, counts(open=True) | {"triton": "with arguments"})))
        return
    click.echo(json.dumps(found, indent=1) if other is None else "\n".join(compared(found, of_other(other.resolve()))))


if __name__ == "__main__":
    main()
