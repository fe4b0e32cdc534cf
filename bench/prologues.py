"""What it would bring that a convolution's kernel normalises and activates what it reads, instead of a pass before it.

    python bench/prologues.py [--networks resnet50 kl_decoder ...] [--batch 16] [--rows 224] [--inference]
    python bench/prologues.py --done [--networks resnet50] [--batch 16] [--rows 224]

By the bound of kernels compiled for sm_90, bfloat16, of one rank; nothing is timed. Of each convolution that alone
reads what a norm's last pass writes: that pass reads and writes it once, at the memory's rate, or takes a launch. The
kernel that does it instead is compiled, too, in the same sizes: its text widens, scales, shifts, activates and rounds
what it has copied before it multiplies, with zeros around images, so operands come by registers. `gains` are
convolutions that are faster so by the bound, `us` what they would save together, of the least time of all of the
network's convolutions forward and of these passes. `other` are kernels whose text is not one of boxes or of a product.

`--done`: what packages have of it, forward and backward: kernels of products that do what a batch norm does last, and
write it; `apart` are the least times of the products' own kernels and of the norms' passes before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import torch
from options import options
from step_traffic import NETWORKS, SM_90

from convgen.algebra.grid import Grid
from convgen.kernels.choose import choose
from convgen.kernels.config import largest
from convgen.kernels.estimate import data_sheet
from convgen.kernels.facts import bound, facts, launches
from convgen.kernels.source import Kernel, kernel_module
from convgen.network_compiler import compile_network
from convgen.program.behind_norms import behind_norms
from convgen.program.network import Program, label
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype

ACTIVATIONS = {"relu": "tl.maximum(v, 0.0)", "silu": "v / (1 + tl.exp(-v))", "": "v"}
# By family the line behind which operands have been copied, and channels and zeros there.
COPIED = {
    "box": ("        b = w.load([f, tap * C + c])\n", "c + tl.arange(0, BC)"),
    "gemm": ("        b = tl.load(w + (f * C)[None, :] + c[:, None])\n", "c"),
}
INSIDE = """        px = tl.arange(0, TN * TH * TW)
        xw, xh = yw - pad_w + kw + px % TW, yh - pad_h + kh + px // TW % TH
        v = tl.where(((xw >= 0) & (xw < YW) & (xh >= 0) & (xh < YH))[:, None], v, 0.0)
"""


class Row(NamedTuple):
    """A convolution: least microseconds of its kernel, of the pass before it that it alone reads, and of a kernel that
    does that pass; None where that isn't known."""

    taps: int
    kernel_us: float
    pass_us: float
    both_us: float | None

    @property
    def gain_us(self) -> float:
        return 0.0 if self.both_us is None else max(0.0, self.pass_us + self.kernel_us - self.both_us)


def behind(program: Program) -> dict[str, str]:
    """Of values that a norm's last pass writes, by name what is done to what is normalised there."""
    found: dict[str, str] = {}
    for rows, steps in behind_norms(program):
        numbers = [*rows, *(i for i, _, _ in steps)]
        if numbers:
            found[program.rows[numbers[-1]].bound.makes[0]] = steps[-1][1].name if steps else ""
    return found


def with_prologue(text: str, family: str, activation: str) -> str:
    """A kernel's text that normalises and activates what it reads; "" of a text that isn't known."""
    copied, channels = COPIED.get(family, ("", ""))
    if not copied or copied not in text or activation not in ACTIVATIONS:
        return ""
    lines = f"        cs = {channels}\n"
    lines += "        v = a.to(tl.float32) * tl.load(vec + cs)[None, :] + tl.load(vec + C + cs)[None, :]\n"
    lines += f"        v = {ACTIVATIONS[activation]}\n{INSIDE * (family == 'box')}        a = v.to(a.dtype)\n"
    text = text.replace(copied, lines + copied)
    for old, new in (
        ("tl.zeros((BF, TN * TH * TW)", "tl.zeros((TN * TH * TW, BF)"),
        ("tl.dot(b, a.T, acc)", "tl.dot(a, b.T, acc)"),
        ("    acc = acc.T\n", ""),
    ):
        text = text.replace(old, new)
    head, body = text.split("def forward(", 1)
    jit = head.rindex("@triton.jit")
    head = head[:jit] + head[jit:].replace(" N, ", " vec, N, ", 1)
    vector = "torch.empty(2 * s.channels, dtype=torch.float32, device='meta')"
    return f"{head}def forward({body.replace(' s.n, ', f' {vector}, s.n, ', 1)}"


@cache
def least_us(kernel: Kernel, activation: str | None = None) -> float | None:
    """Least microseconds of a kernel as it is, or of one that does this to what it reads."""
    p, text = largest(kernel.problems), kernel_module([kernel])
    if activation is not None and not (text := with_prologue(text, kernel.config.family, activation)):
        return None
    with patch("convgen.kernels.facts.kernel_module", lambda _: text):
        main = next((one for one in launches(kernel, p) if one.name == kernel.name), None)
    b = None if main is None else bound(kernel, p, main, facts(main, SM_90, loops=True))
    return None if b is None else b.us


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
            kernel = kernels["forward"]
            if (own := least_us(kernel)) is None:
                continue
            alone = x in normed and readers.count(x) == 1 and x not in dict(one.program.outputs).values()
            elements = torch.Size(one.program.values[x].shape).numel()
            once = max(4 * elements / sheet.bytes_per_s, sheet.floor_s) * 1e6 if alone else 0.0
            yield Row(kernel.problem.taps, own, once, least_us(kernel, normed[x]) if alone else None)


def done(name: str, batch: int, rows: int) -> Iterator[str]:
    """A line a phase of the kernels that do what batch norms do last."""
    module, shape = NETWORKS[name](batch, rows)
    graph, _ = graph_of(module.train(), (torch.zeros(*shape),))
    one = compile_network(with_dtype(graph, "bfloat16"), Grid((("N", 1),)), statistics="local", target=SM_90)
    found: dict[str, list[tuple[float, float]]] = {"forward": [], "backward_data": []}
    sheet = data_sheet(SM_90, "bfloat16")
    for file in one.kernels:
        for kernel in file.kernels if file.before else ():
            p = kernel.problem
            alone = choose((replace(p, before=None, moments=""),), SM_90)
            both, own = least_us(kernel), least_us(replace(alone, problems=(replace(p, before=None),)))
            assert file.before is not None and both is not None and own is not None
            read = p.elements["y" if p.phase == "backward_data" else "x"] * p.element_bytes
            once = max((file.before.operands + 2) * read / sheet.bytes_per_s, sheet.floor_s) * 1e6
            found[p.phase] += [(own + once, both)] * len(file.uses)
    for phase, times in found.items():
        apart, together = (sum(t[k] for t in times) for k in (0, 1))
        yield f"{name:14} {phase:14} {len(times):8} {apart:9.1f} {together:9.1f}"


def main() -> None:
    args = options(__doc__, networks=[*NETWORKS], batch=16, rows=224, inference=False, done=False)
    if args.done:
        print(f"{'network':14} {'phase':14} {'kernels':>8} {'apart, us':>9} {'done, us':>9}")
        for name in args.networks:
            print(*done(name, args.batch, args.rows), sep="\n", flush=True)
        return
    print(f"{'network':14} convolutions  behind norms  other  gains  of these one tap       us     of us")
    for name in args.networks:
        found = [*rows_of(name, args.batch, args.rows, not args.inference)]
        normed, gains = ([row for row in found if one(row)] for one in (lambda r: r.pass_us, lambda r: r.gain_us))
        saved, of = sum(row.gain_us for row in gains), sum(row.kernel_us + row.pass_us for row in found)
        print(
            f"{name:14} {len(found):12} {len(normed):13} {sum(row.both_us is None for row in normed):6} {len(gains):6}"
            f" {sum(row.taps == 1 for row in gains):17} {saved:8.1f} {of:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
