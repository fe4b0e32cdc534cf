"""What it would bring that a convolution's kernel normalises and activates what it reads, instead of a pass before it.

    python bench/prologues.py [--networks resnet50 kl_decoder ...] [--batch 16] [--rows 224] [--inference]

By the bound of kernels compiled for sm_90, bfloat16, of one rank; nothing is timed. Of each convolution that alone
reads what a norm's last pass writes: that pass reads and writes it once, at the memory's rate, or takes a launch. In
the kernel every element of every step's tile is widened, scaled, shifted, activated and rounded once more: for each
tap, and for each tile of filters. These instructions come on top of those that a step issues. That operands would come
by registers, with loads and waits for it, and that zeros around images would have to be made, is left out: a gain is
one at most. `gains` are rows that would take less, and `us` what they would save, of the least time of the network's
convolutions forward and of these passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from options import options
from step_traffic import NETWORKS, SM_90

from convgen.algebra.grid import Grid
from convgen.kernels.bound import ISSUES, WARP
from convgen.kernels.config import largest
from convgen.kernels.estimate import data_sheet
from convgen.kernels.facts import bound, facts, launches
from convgen.kernels.families import of_gpu
from convgen.kernels.source import Kernel
from convgen.network_compiler import compile_network
from convgen.program.behind_norms import behind_norms
from convgen.program.network import Program, label
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype

# Instructions an element: widen, scale and shift as one, round half a one; then the activation.
AFFINE, ACTIVATIONS = 2.5, {"relu": 1, "silu": 5, "sigmoid": 4, "hardswish": 4, "hardtanh": 2}


class Row(NamedTuple):
    """A convolution behind a norm: least microseconds as it is, of the pass before it, and what the kernel would take
    more."""

    taps: int
    kernel_us: float
    pass_us: float
    more_us: float

    @property
    def gain_us(self) -> float:
        return self.pass_us - self.more_us


def behind(program: Program) -> dict[str, str]:
    """Of values that a norm's last pass writes, by name what is done to what is normalised there."""
    found: dict[str, str] = {}
    for rows, steps in behind_norms(program):
        numbers = [*rows, *(i for i, _, _ in steps)]
        if numbers:
            names = [op.name for _, op, _ in steps if op.name in ACTIVATIONS]
            found[program.rows[numbers[-1]].bound.makes[0]] = names[-1] if names else ""
    return found


def more_us(kernel: Kernel, activation: str) -> tuple[float, float] | None:
    """Least microseconds of a kernel, and how many more with what is done to each element of its tiles."""
    p = largest(kernel.problems)
    main = next((one for one in launches(kernel, p) if one.name == kernel.name), None)
    if main is None:
        return None
    b, work = bound(kernel, p, main, facts(main, SM_90, loops=True)), of_gpu(kernel.config).work(p, kernel.config)
    if b is None or work is None:
        return None
    elements = work.multiplied / kernel.config.tile["BF"]
    added = elements * (AFFINE + ACTIVATIONS.get(activation, 0)) / WARP / ISSUES
    cycles = dict(b.step_cycles)
    cycles["issue"] += added
    loop = b.times_us["loop"] * max(cycles.values()) / max(b.step_cycles.values())
    t = b.times_us
    return b.us, max(loop + t["adding"], t["memory"], t["floor"]) + t["around"] - b.us


def rows_of(name: str, batch: int, rows: int, training: bool) -> Iterator[Row]:
    module, shape = NETWORKS[name](batch, rows)
    graph, _ = graph_of(module.train(training), (torch.zeros(*shape),))
    one = compile_network(with_dtype(graph, "bfloat16"), Grid((("N", 1),)), statistics="local", target=SM_90)
    normed, sheet = behind(one.program), data_sheet(SM_90, "bfloat16")
    by_label = {label(row): row for row in one.program.rows}
    readers = [value for row in one.program.rows for value in row.bound.reads]
    done: set[str] = set()  # a row whose kernel makes moments in training has another for evaluation
    for file in one.kernels:
        kernels = {k.problem.phase: k for k in file.kernels}
        for of, phase in file.uses:
            x = by_label[of].bound.reads[0]
            if phase != "forward" or "forward" not in kernels or of in done:
                continue
            done.add(of)
            taken = more_us(kernels["forward"], normed.get(x, ""))
            if taken is None:
                continue
            alone = x in normed and readers.count(x) == 1 and x not in dict(one.program.outputs).values()
            elements = torch.Size(one.program.values[x].shape).numel()
            once = max(4 * elements / sheet.bytes_per_s, sheet.floor_s) * 1e6 if alone else 0.0
            yield Row(kernels["forward"].problem.taps, taken[0], once, taken[1] if alone else 0.0)


def main() -> None:
    args = options(__doc__, networks=[*NETWORKS], batch=16, rows=224, inference=False)
    print(f"{'network':14} convolutions  behind norms  gains  of these one tap       us     of us")
    for name in args.networks:
        found = [*rows_of(name, args.batch, args.rows, not args.inference)]
        gains = [row for row in found if row.pass_us and row.gain_us > 0]
        saved, of = sum(row.gain_us for row in gains), sum(row.kernel_us + row.pass_us for row in found)
        print(
            f"{name:14} {len(found):12} {sum(row.pass_us > 0 for row in found):13} {len(gains):6}"
            f" {sum(row.taps == 1 for row in gains):17} {saved:8.1f} {of:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
