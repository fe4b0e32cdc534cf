"""`convgen sw26010 gemm|conv|pool`: what runs on the mesh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from convgen.commands.outputs import Picture, draw
from convgen.errors import InputError
from convgen.free_memory import check_memory

MOST = 2**31 - 1  # the largest extent
MOST_ELEMENTS = 2**22  # the most elements of a transformation that is emulated without being asked for
MOST_FLOPS = 2**34  # the most flops that a command emulates without being asked to
Command = TypeVar("Command", bound=Callable[..., Any])


def extents(*names: str) -> Callable[[Command], Command]:
    """Arguments in this order, whole numbers from 1."""

    def with_arguments(command: Command) -> Command:
        for name in reversed(names):
            command = click.argument(name, type=click.IntRange(1, MOST))(command)
        return command

    return with_arguments


@click.command("gemm")
@extents("m", "n", "k")
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--blocks", metavar="BM,BN,BK", help="Instead of the fastest by the model.")
@click.option(
    "--level", type=click.Choice(["fast", "exact", "messages"]), default="fast", show_default=True,
    help="The mesh at once, the same in the order of the messages, or message by message.",
)  # fmt: skip
@click.option(
    "--vectors", type=click.Choice(["m", "n", "best"]), default="m", show_default=True,
    help="Along M, of column-major matrices; along N, of row-major ones; or what the model says is faster.",
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
@click.option("--strip", type=Picture(), metavar="FILE", help="Draw a small GEMM at work: buses, waits, registers.")
def gemm_command(
    m: int, n: int, k: int, dtype: Any, blocks: str | None, level: Any, vectors: str, swap_buses: bool,
    emit: str | None, run: bool | None, as_json: bool, plot: Path | None, strip: Path | None,
) -> None:  # fmt: skip
    """C += A B of M x N x K on one core group: plan, program, events, time."""
    from convgen.sw26010.gemm.orientation import oriented
    from convgen.sw26010.gemm.program import gemm_program
    from convgen.sw26010.gemm.strip import strip_page
    from convgen.sw26010.gemm.triton import triton_gemm
    from convgen.sw26010.machine.rates import taken_rates

    both = oriented(m, n, k, dtype, None if blocks is None else _three(blocks), vectors, taken_rates())
    plan = both.plan
    if emit == "triton":
        click.echo(triton_gemm(plan), nl=False)
        return
    if emit is not None:
        click.echo(gemm_program(plan, messages=emit == "program"), nl=False)
        return
    if swap_buses:
        _gemm_with_swapped_buses(plan)
    draw(strip, lambda: strip_page(plan))
    _gemm(plan, level, (plan.useful_flops <= MOST_FLOPS) if run is None else run, as_json, plot, both)


def _gemm_with_swapped_buses(plan: Any) -> None:
    """Run the GEMM message by message, and report how it ends."""
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


def _gemm(plan: Any, level: Any, run: bool, as_json: bool, plot: Path | None, both: Any) -> None:
    import numpy as np

    from convgen.sw26010.gemm.cost import clock_seconds, gemm_seconds
    from convgen.sw26010.gemm.counts import gemm_counts
    from convgen.sw26010.gemm.plot import gemm_page
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
        click.echo(json.dumps(gemm_json(plan, counts, seconds, by_cycles) | both.json | {"check": verdict}, indent=1))
    else:
        click.echo(gemm_text(plan, counts, seconds, by_cycles))
        click.echo(f"vectors   {both.text}")
        click.echo(f"check     {verdict}")
    draw(plot, lambda: gemm_page(plan, seconds))
    if wrong:
        raise SystemExit(1)


@click.command("conv")
@extents("n", "c", "h", "w", "f")
@click.option("--kernel", metavar="K[,K]", default="3", show_default=True, help="Rows, columns.")
@click.option("--stride", metavar="S[,S]", default="1", show_default=True)
@click.option("--padding", metavar="P[,P]", default="1", show_default=True)
@click.option("--dilation", metavar="D[,D]", default="1", show_default=True)
@click.option("--groups", type=click.IntRange(1, MOST), default=1, show_default=True)
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float32", show_default=True)
@click.option(
    "--emit", type=click.Choice(["forward", "backward_data", "backward_filter"]), help="Print the programs of a phase."
)
@click.option(
    "--plan", "kind", type=click.Choice(["implicit", "explicit"]), default="implicit", show_default=True,
    help="Whose programs --emit prints.",
)  # fmt: skip
@click.option("--run", is_flag=True, help="Emulate all plans of all phases, against float64.")
@click.option(
    "--level", type=click.Choice(["fast", "exact", "messages"]), default="fast", show_default=True,
    help="Of --run: the mesh at once, the same in the order of the messages, or message by message.",
)  # fmt: skip
@click.option(
    "--images", metavar="B,B,...", help="The explicit plan with so many images a product ([SW] 4.2.1); with --run, dw."
)
@click.option("--causes", is_flag=True, help="Seconds of every plan by what they are counted for.")
@click.option("--json", "as_json", is_flag=True, help="All events of both plans as JSON.")
def conv_command(
    n: int, c: int, h: int, w: int, f: int, kernel: str, stride: str, padding: str, dilation: str, groups: int,
    dtype: Any, emit: Any, kind: str, run: bool, level: Any, images: str | None, causes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Plans of a convolution's phases on one core group: which is possible, its events, which is faster."""
    from convgen.program.nodes import PHASES, Phase
    from convgen.sw26010.conv.check import check_conv, checked_text
    from convgen.sw26010.conv.cost import Choice, choose_plan
    from convgen.sw26010.conv.report import causes_text, conv_json, conv_text
    from convgen.sw26010.machine.rates import load_rates, taken_rates

    options = (("kernel", kernel, 1), ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
    problem = _conv_problem(n, c, h, w, f, groups, [_pair(*option) for option in options])
    if emit is not None:
        _emit_conv(problem, emit, kind, dtype)
        return
    if as_json and (images is not None or causes):
        raise InputError("--images and --causes print a table alone", hint="without --json")
    if images is not None:
        _images(problem, images, dtype, groups, run)
        return
    rates, fitted = taken_rates(), load_rates().fitted()
    choices: dict[Phase, Choice] = {p: choose_plan(problem, p, rates, fitted, dtype) for p in PHASES}
    if causes:
        click.echo(causes_text(problem, choices, groups))
        return
    report = conv_json if as_json else conv_text
    found = report(problem, choices, groups)
    if run:
        sizes = problem.n * (problem.c * problem.h * problem.w + problem.f * problem.h_out * problem.w_out)
        columns = problem.c * problem.taps * problem.h_out * problem.w_out
        check_memory(8 * (6 * sizes + 2 * columns), "emulating it", "without --run, which counts; or a smaller layer")
        checked = check_conv(problem, dtype, groups, level)
        if isinstance(found, dict):
            found["run"] = [
                {"phase": one.phase, "plan": one.plan, "error": one.error, "allowed": one.allowed,
                 "events_equal": one.counted}
                for one in checked
            ]  # fmt: skip
        else:
            found += f"\n{checked_text(checked, level)}"
        click.echo(json.dumps(found, indent=1) if as_json else found)
        if not all(one.right for one in checked):
            raise SystemExit(1)
        return
    click.echo(json.dumps(found, indent=1) if as_json else found)


def _images(problem: Any, given: str, dtype: Any, groups: int, run: bool) -> None:
    """Print, and with `run` emulate, the convolution by these numbers of images. Raises InputError: they are none."""
    from convgen.sw26010.conv.batch_report import blocked_run, blocked_text

    parts = given.split(",")
    if not all(part.isdecimal() and len(part) < 6 and 1 <= int(part) <= problem.n for part in parts):
        hint = f"--images 1,{problem.n}"
        raise InputError(f"--images {given}: whole numbers from 1 to {problem.n}, which is N", hint=hint)
    sizes = [int(part) for part in parts]
    click.echo(blocked_text(problem, sizes, dtype, groups))
    if run:
        text, right = blocked_run(problem, max(sizes))
        click.echo(text)
        if not right:
            raise SystemExit(1)


def _pair(name: str, text: str, least: int) -> tuple[int, int]:
    """A pair of numbers, from one for rows and columns, or from two. Raises InputError: the text is something else."""
    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 2 or not all(p.isdecimal() and len(p) < 6 and int(p) >= least for p in parts):
        fact = f"--{name} {text}: one or two whole numbers from {least} to 99999, of rows and columns"
        raise InputError(fact, hint=f"--{name} {max(least, 1)}, or --{name} {max(least, 1)},{max(least, 1)}")
    return int(parts[0]), int(parts[-1])


def _conv_problem(n: int, c: int, h: int, w: int, f: int, groups: int, pairs: list[tuple[int, int]]) -> Any:
    """The problem of one group. Raises InputError: groups don't divide channels, or the output has no rows."""
    from convgen.sw26010.conv.problem import Axis, ConvProblem

    if c % groups or f % groups:
        raise InputError(f"--groups {groups} doesn't divide C={c} and F={f}", hint="--groups 1")
    axes: list[Axis] = []
    for extent, kernel, stride, padding, dilation in zip((h, w), *pairs, strict=True):
        reach = dilation * (kernel - 1) + 1
        if extent + 2 * padding < reach:
            fact = f"a kernel that reaches over {reach} is larger than the padded image of {extent}, padding {padding}"
            raise InputError(fact, hint=f"--padding {-(-(reach - extent) // 2)}, or a smaller --kernel")
        axes.append(Axis(extent, (extent + 2 * padding - reach) // stride + 1, kernel, stride, padding, dilation))
    return ConvProblem(n, c // groups, f // groups, axes[0], axes[1])


def _emit_conv(problem: Any, phase: Any, kind: str, dtype: Any) -> None:
    """Print the programs that one CPE runs, in their order."""
    from convgen.sw26010.conv.cost import explicit_plan
    from convgen.sw26010.conv.implicit_plan import implicit_plan
    from convgen.sw26010.conv.programs import columns_program, implicit_program
    from convgen.sw26010.gemm.program import gemm_program
    from convgen.sw26010.machine.rates import taken_rates

    if kind == "implicit":
        click.echo(implicit_program(implicit_plan(problem, phase, dtype), messages=True), nl=False)
        return
    plan = explicit_plan(problem, phase, taken_rates(), dtype)
    texts = [gemm_program(plan.gemm, messages=True)]
    if plan.moves and phase == "backward_data":
        texts.append(columns_program("col2im", problem, dtype))
    elif plan.moves:
        texts.insert(0, columns_program("im2col", problem, dtype))
    click.echo(f"\n\n# ---- and then, for the same image {'-' * 78}\n".join(texts), nl=False)


@click.command("transform")
@extents("n", "c", "h", "w")
@click.option(
    "--direction", type=click.Choice(["to_implicit", "to_explicit"]), default="to_implicit", show_default=True,
    help="(N, C, H, W) to (H, W, C, N), or back.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float32", show_default=True)
@click.option("--emit", is_flag=True, help="Print the program of a CPE.")
@click.option("--run/--no-run", default=None, help="Emulate it, or only count.  [default: up to 2^22 elements]")
def transform_command(
    n: int, c: int, h: int, w: int, direction: Any, dtype: str, emit: bool, run: bool | None
) -> None:  # fmt: skip
    """The tensor transformation layer between the layouts of the two plans ([SW] 4.3)."""
    from convgen.sw26010.conv.layouts import Transform, transform_program
    from convgen.sw26010.conv.transform_report import transform_text

    transform = Transform(n, c, h, w, dtype, direction)
    if emit:
        click.echo(transform_program(transform), nl=False)
        return
    running = n * c * h * w <= MOST_ELEMENTS if run is None else run
    if running:
        check_memory(4 * 8 * n * c * h * w, "emulating it", "--no-run, which counts; or a smaller tensor")
    text, right = transform_text(transform, run=running)
    click.echo(text)
    if not right:
        raise SystemExit(1)


@click.command("operations")
@extents("n", "c", "h", "w")
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float32", show_default=True)
@click.option("--emit", metavar="OPERATION", help="Print the program of one CPE.")
def operations_command(n: int, c: int, h: int, w: int, dtype: Any, emit: str | None) -> None:
    """Operations of a training step between convolutions, emulated on random numbers: their events and seconds."""
    from convgen.sw26010.operations.report import operation_program, operations_of, operations_text

    operations = operations_of(n, c, h * w, dtype)
    if emit is not None:
        click.echo(operation_program(operations, emit), nl=False)
        return
    check_memory(6 * 8 * n * c * h * w, "emulating them", "fewer samples")
    click.echo(operations_text(operations))


@click.command("pool")
@extents("n", "c", "h", "w", "kernel")
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
    from convgen.sw26010.pooling.windows import Pool, Windows

    if padding or stride not in (None, kernel):
        windows = Windows(n, c, h, w, kernel, stride or kernel, padding, kind, dtype)
        if emit is not None:
            click.echo(Pool(windows, backward=emit == "backward").program(), nl=False)
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
    if len(parts) != 3 or not all(part.strip().isdecimal() and len(part.strip()) < 20 for part in parts):
        raise InputError(f"--blocks {text}: cannot read three numbers", hint="--blocks 512,512,128")
    first, second, third = (int(part) for part in parts)
    return first, second, third
