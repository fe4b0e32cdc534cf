"""`convgen sw26010 gemm|conv|pool`: what runs on the mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from convgen.commands.outputs import Picture
from convgen.errors import InputError
from convgen.free_memory import check_memory

MOST = 2**31 - 1  # of an extent
MOST_FLOPS = 2**34  # that a command emulates without being asked to


@click.command("gemm")
@click.argument("m", type=click.IntRange(1, MOST))
@click.argument("n", type=click.IntRange(1, MOST))
@click.argument("k", type=click.IntRange(1, MOST))
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--blocks", metavar="BM,BN,BK", help="Instead of the fastest by the model.")
@click.option(
    "--level", type=click.Choice(["fast", "exact", "messages"]), default="fast", show_default=True,
    help="The mesh at once, the same in the order of the messages, or message by message.",
)  # fmt: skip
@click.option("--swap-buses", is_flag=True, help="Run it as the text of [SW] 4.1 says: A along columns, B along rows.")
@click.option(
    "--emit", type=click.Choice(["program", "mesh-program", "triton"]),
    help="Print what one CPE, or the mesh, runs; or the blocking as a Triton kernel.",
)  # fmt: skip
@click.option("--run/--no-run", default=None, help="Emulate it, or only count.  [default: up to 2^34 flops]")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option(
    "--plot", type=Picture(), metavar="FILE", help="Draw the traffic of each step and the roofline (png, svg, pdf)."
)
def gemm_command(
    m: int, n: int, k: int, dtype: Any, blocks: str | None, level: Any, swap_buses: bool, emit: str | None,
    run: bool | None, as_json: bool, plot: Path | None,
) -> None:  # fmt: skip
    """C += A B of M x N x K on one core group: plan, program, events, time."""
    from convgen.sw26010.gemm.cost import search_blocks
    from convgen.sw26010.gemm.plan import GemmPlan
    from convgen.sw26010.gemm.program import gemm_program
    from convgen.sw26010.gemm.triton import triton_gemm
    from convgen.sw26010.machine.rates import taken_rates

    plan = GemmPlan(m=m, n=n, k=k, bm=32, bn=8, bk=8, dtype=dtype)
    if blocks is None:
        plan = search_blocks(plan, taken_rates(), 32)
    else:
        bm, bn, bk = _three(blocks)
        plan = GemmPlan(m=m, n=n, k=k, bm=bm, bn=bn, bk=bk, dtype=dtype)
        plan.check_ldm()
    if emit == "triton":
        click.echo(triton_gemm(plan), nl=False)
        return
    if emit is not None:
        click.echo(gemm_program(plan, messages=emit == "program"), nl=False)
        return
    if swap_buses:
        _gemm_with_swapped_buses(plan)
    _gemm(plan, level, (plan.useful_flops <= MOST_FLOPS) if run is None else run, as_json, plot)


def _gemm_with_swapped_buses(plan: Any) -> None:
    """Run it message by message and report how it ends."""
    import numpy as np

    from convgen.sw26010.gemm.program import gemm_program, swap_buses
    from convgen.sw26010.machine.emulator import MessageMesh
    from convgen.sw26010.machine.faults import MeshFault
    from convgen.sw26010.machine.memory import Dram
    from convgen.sw26010.machine.printing import load_program

    program = load_program(swap_buses(gemm_program(plan, messages=True)))
    shapes = (("A", (plan.k, plan.m)), ("B", (plan.n, plan.k)), ("C", (plan.n, plan.m)))
    try:
        MessageMesh().run(program, *(Dram(name, np.ones(shape, plan.dtype)) for name, shape in shapes))
    except MeshFault as fault:
        click.echo(str(fault))
        raise SystemExit(1) from None


def _gemm(plan: Any, level: Any, run: bool, as_json: bool, plot: Path | None) -> None:
    import numpy as np

    from convgen.sw26010.gemm.cost import clock_seconds, gemm_seconds
    from convgen.sw26010.gemm.counts import gemm_counts
    from convgen.sw26010.gemm.report import gemm_json, gemm_text
    from convgen.sw26010.gemm.run import run_gemm
    from convgen.sw26010.machine.rates import taken_rates

    rates = taken_rates()
    counts, by_cycles, verdict, wrong = gemm_counts(plan), None, "not run: events by closed form", False
    if run:
        elements = plan.m * plan.k + plan.k * plan.n + plan.m * plan.n
        check_memory(6 * 8 * elements, "emulating it", "--no-run, which counts; or smaller matrices")
        rng = np.random.default_rng(0)
        shapes = ((plan.m, plan.k), (plan.k, plan.n), (plan.m, plan.n))
        a, b, c = (rng.standard_normal(shape).astype(plan.dtype).astype(np.float64) for shape in shapes)
        result = run_gemm(plan, a, b, c, level=level, log=level != "messages")
        by_cycles = clock_seconds(result.events, rates, by_cycles=True) if level != "messages" else None
        error = float(np.abs(result.c - (c + a @ b)).max())
        unit = 1e-12 if plan.dtype == "float64" else 2.0**-23
        bound = unit * float(np.sqrt(plan.k) * np.abs(a).max() * np.abs(b).max() + np.abs(c).max())
        wrong = error > bound or result.counts != counts
        same = "equal" if result.counts == counts else "DIFFER FROM"
        waits = f", {result.stalls:,} stalls" if level == "messages" else ""
        verdict = f"run ({level}{waits}): largest error {error:.1e}, allowed {bound:.1e}; events {same} the closed form"
    seconds = gemm_seconds(plan, rates)
    if as_json:
        click.echo(json.dumps(gemm_json(plan, counts, seconds, by_cycles) | {"check": verdict}, indent=1))
    else:
        click.echo(gemm_text(plan, counts, seconds, by_cycles))
        click.echo(f"check     {verdict}")
    if plot is not None:
        from convgen.sw26010.gemm.plot import gemm_page

        gemm_page(plan, seconds).save(plot)
        click.echo(str(plot), err=True)
    if wrong:
        raise SystemExit(1)


@click.command("conv")
@click.argument("n", type=click.IntRange(1, MOST))
@click.argument("c", type=click.IntRange(1, MOST))
@click.argument("h", type=click.IntRange(1, MOST))
@click.argument("w", type=click.IntRange(1, MOST))
@click.argument("f", type=click.IntRange(1, MOST))
@click.option("--kernel", type=click.IntRange(max=2**15), default=3, show_default=True)
@click.option("--stride", type=click.IntRange(max=2**15), default=1, show_default=True)
@click.option("--padding", type=click.IntRange(max=2**15), default=1, show_default=True)
@click.option(
    "--emit", type=click.Choice(["forward", "backward_data", "backward_filter"]),
    help="Print the program of the implicit plan of a phase.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="All events of both plans as JSON.")
def conv_command(
    n: int, c: int, h: int, w: int, f: int, kernel: int, stride: int, padding: int, emit: Any, as_json: bool
) -> None:  # fmt: skip
    """Plans of a convolution's phases on one core group, float32: which is possible, its events, which is faster."""
    from convgen.program.nodes import PHASES
    from convgen.sw26010.conv.cost import choose_plan
    from convgen.sw26010.conv.implicit_plan import implicit_plan
    from convgen.sw26010.conv.problem import ConvProblem
    from convgen.sw26010.conv.programs import implicit_program
    from convgen.sw26010.conv.report import conv_json, conv_text
    from convgen.sw26010.machine.rates import load_rates, taken_rates

    problem = ConvProblem.square(n, c, h, w, f, kernel, stride, padding)
    if emit is not None:
        click.echo(implicit_program(implicit_plan(problem, emit), messages=True), nl=False)
        return
    choices = {phase: choose_plan(problem, phase, taken_rates(), load_rates().fitted()) for phase in PHASES}
    click.echo(json.dumps(conv_json(problem, choices), indent=1) if as_json else conv_text(problem, choices))


@click.command("pool")
@click.argument("n", type=click.IntRange(1, MOST))
@click.argument("c", type=click.IntRange(1, MOST))
@click.argument("h", type=click.IntRange(1, MOST))
@click.argument("w", type=click.IntRange(1, MOST))
@click.argument("kernel", type=click.IntRange(1, MOST))
@click.option("--stride", type=click.IntRange(1, MOST), help="Between windows.  [default: KERNEL]")
@click.option("--padding", type=click.IntRange(0, MOST), default=0, show_default=True)
@click.option("--kind", type=click.Choice(["max", "average"]), default="max", show_default=True)
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float32", show_default=True)
@click.option("--emit", type=click.Choice(["forward", "backward"]), help="Print the program of a CPE.")
def pool_command(
    n: int, c: int, h: int, w: int, kernel: int, stride: int | None, padding: int, kind: Any, dtype: Any,
    emit: str | None,
) -> None:  # fmt: skip
    """Pooling by K x K windows, forward and backward, emulated on random numbers."""
    from convgen.sw26010.pooling.report import pooling_text, windows_text
    from convgen.sw26010.pooling.run import Pooling, pooling_backward_program, pooling_program
    from convgen.sw26010.pooling.windows import Windows, windows_program

    if padding or stride not in (None, kernel):
        windows = Windows(n, c, h, w, kernel, stride or kernel, padding, kind, dtype)
        if emit is not None:
            click.echo(windows_program(windows, backward=emit == "backward"), nl=False)
            return
        check_memory(20 * 8 * n * c * h * w, "emulating it", "a smaller image, or fewer of them")
        text, right = windows_text(windows)
        click.echo(text)
        if not right:
            raise SystemExit(1)
        return
    pooling = Pooling(n, c, h, w, kernel, kind, dtype)
    if emit is not None:
        program = pooling_program if emit == "forward" else pooling_backward_program
        click.echo(program(pooling), nl=False)
        return
    check_memory(10 * 8 * n * c * h * w, "emulating it", "a smaller image, or fewer of them")
    text, right = pooling_text(pooling)
    click.echo(text)
    if not right:
        raise SystemExit(1)


def _three(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--blocks {text}: cannot read three numbers", hint="--blocks 512,512,128")
    first, second, third = (int(part) for part in parts)
    return first, second, third
