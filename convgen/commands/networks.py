"""Graph files (`convgen import`) in commands that also take layer files: reading, refusing options, compiling."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from convgen.commands.compiled_file import CompiledFile
from convgen.commands.inputs import need, need_device, need_kernels, parse_grid, read_schedule
from convgen.commands.outputs import draw, show
from convgen.commands.progress import progress
from convgen.errors import InputError
from convgen.spec.graph_reader import is_graph_file
from convgen.spec.network_plan import PlanFile, is_plan_file, read_plan
from convgen.spec.network_reader import is_network_file
from convgen.spec.source import locate
from convgen.spec.target import read_target
from convgen.spec.text import shown

if TYPE_CHECKING:
    from convgen.cost.machine import Machine
    from convgen.passes.contract import After, NetworkPass

LAYERS_ONLY = {
    "memory_format": "is of layers",
    "objective": "is of layers: a network's plan is for the least seconds",
}
FLAGS = {"memory_format": "--memory-format"}
DEFAULTS: Mapping[str, Any] = {"objective": "seconds"}


def are_graphs(files: Sequence[str]) -> bool:
    """Whether the files are networks' (graphs, plans of them, or written by hand). Raises InputError: some are, others
    not."""
    graphs = [is_graph_file(file) or is_plan_file(file) or is_network_file(file) for file in files]
    if any(graphs) and not all(graphs):
        one, other = files[graphs.index(True)], files[graphs.index(False)]
        raise InputError(f"{one} is a network's file and {other} a layer's file", hint="a command for each")
    return any(graphs)


def compile_graphs(
    files: Sequence[str],
    *,
    grid: str | None,
    algorithm: str | None,
    dtype: str | None,
    target: str | None,
    machine: str | None = None,
    statistics: str | None = None,
    reduce_dtype: str | None = None,
    autocast: str | None = None,
    recompute: str | None = None,
    schedule: str | None = None,
    passes: Sequence[str] = (),
    after: Sequence[After] = (),
    **others: Any,
) -> list[CompiledFile]:
    """Every network of the files, compiled: laid out by the letters of the grid, by price, or as a plan or a program's
    text says.

    Args:
        machine: the machine for which what travels meanwhile is chosen, and which `auto` models; by default the one for
            which a plan was priced, else one of the target's.
        schedule: the file of a program's text, for one network.
        passes: passes that decide what travels meanwhile, such as "bucket-gradients{mebibytes=1}", instead of a
            timeline; they run in the pipeline's order.
        after: told each stage when it is done.
        others: options that only layers have; they are refused if given.
    """
    name = files[0]
    _refuse(name, others)
    made_for = read_target(target or "cpu").for_networks()
    check_meanwhile(schedule, machine, passes)
    plans = [file for file in files if is_plan_file(file)]
    options = {"--grid": grid, "--algorithm": algorithm, "--statistics": statistics, "--recompute": recompute}
    _refuse_twice(files, plans, schedule, [flag for flag, value in options.items() if value is not None])
    for key, kind in (("reduce_dtype", reduce_dtype), ("autocast", autocast)):
        if schedule is not None and kind is not None:
            flag = f"--{key.replace('_', '-')}"
            raise InputError(f"{flag}: {schedule} says it", hint=f"without {flag}, or {key}: there")
    if grid is None and schedule is None and len(plans) < len(files):
        fact = f"{name} is a network, and says no grid: its dimensions' letters are N, C, F, D, H and W"
        raise InputError(fact, hint="--grid N=2,H=2")
    need("torch", "a network's operators are ATen's, which needs torch")
    from convgen.algebra.blocks import size_text
    from convgen.cost.machines import load_machine
    from convgen.network_compiler import compile_network, compile_plan, compile_text
    from convgen.passes.contract import tell
    from convgen.plan.program.edited import read_text
    from convgen.spec.graph_edit import with_dtype
    from convgen.spec.graph_file import read_constants, read_graph
    from convgen.spec.network_graph import read_network_graph
    from convgen.spec.placement import build_grid

    axes = parse_grid(grid, "N=2,H=2") if grid is not None else {}
    chosen = load_machine(machine) if machine is not None else None
    named = {
        "algorithm": algorithm, "machine": machine, "dtype": dtype, "statistics": statistics,
        "reduce-dtype": reduce_dtype, "autocast": autocast, "recompute": recompute,
        "schedule": schedule and Path(schedule).name, "target": target,
    }  # fmt: skip
    said = f" --grid {','.join(f'{a}={size_text(n)}' for a, n in axes.items())}" * bool(axes)
    said += "".join(f" --{k} {v}" for k, v in named.items() if v)
    said += "".join(f" --pass '{text}'" for text in passes)
    chain = named_passes(passes)
    found: list[CompiledFile] = []
    seen: dict[str, str] = {}
    for file in files:
        plan = read_plan(file) if file in plans else None
        priced_for = _machine_of(plan, file) if plan is not None else None
        beside = file if plan is None else str(Path(file).parent / plan.graph)
        if plan is not None and not os.path.isfile(beside):
            fact = f"the plan's graph {shown(plan.graph)} is no file: a plan stands beside it"
            raise InputError(fact, where=plan.source.where(("graph",)), hint="convgen plan NETWORK -o, again")
        graph = read_network_graph(beside) if is_network_file(beside) else read_graph(beside)
        if graph.name in seen:
            fact = f"two networks are named {graph.name}: {seen[graph.name]} and {file}"
            raise InputError(fact, hint="another name for one")
        seen[graph.name] = file
        tensors = read_constants(beside, graph)
        if kind := dtype or (plan.dtype if plan is not None else ""):
            graph = with_dtype(graph, kind)
        tell(after, "read", None)
        try:
            command = f"convgen compile {Path(file).name}{said}"
            with progress(f"compiling {graph.name}"):
                if schedule is not None:
                    made = compile_text(
                        graph, read_text(read_schedule(schedule), schedule), command=command, target=made_for
                    )
                elif plan is not None:
                    made = compile_plan(
                        graph,
                        plan,
                        overlap=chosen or priced_for,
                        reduce_dtype=reduce_dtype,
                        autocast=autocast,
                        command=command,
                        target=made_for,
                        passes=chain,
                        after=after,
                    )
                else:
                    where = build_grid(axes)
                    made = compile_network(
                        graph,
                        where,
                        algorithm,
                        machine=chosen,
                        statistics=statistics or "global",
                        reduce_dtype=reduce_dtype or "",
                        autocast=autocast or "",
                        again=[path.strip() for path in recompute.split(",")] if recompute else (),
                        command=command,
                        target=made_for,
                        passes=chain,
                        after=after,
                    )
        except InputError as error:
            raise locate(error, graph.source_file) from None
        found.append(CompiledFile(file, made, tensors))
    return found


def _with_measured(found: Sequence[CompiledFile], *, quiet: bool) -> list[CompiledFile]:
    from convgen.tune.apply import with_measured_networks

    made, remarks = with_measured_networks([one.compiled for one in found])
    for remark in [] if quiet else remarks:
        click.echo(remark, err=True)
    return [replace(one, compiled=network) for one, network in zip(found, made, strict=True)]


def check_meanwhile(schedule: str | None, machine: str | None, passes: Sequence[str]) -> None:
    """Check the options on what travels meanwhile. Raises InputError: two of them decide it."""
    if schedule is not None and machine is not None:
        fact = f"--machine chooses what travels meanwhile, and {schedule} says it"
        raise InputError(fact, hint="without --machine")
    if passes and (schedule is not None or machine is not None):
        other = f"{schedule} says it" if schedule is not None else f"so does --machine {machine}"
        raise InputError(f"--pass {passes[0]} says what travels meanwhile, and {other}", hint="one of the two")


def named_passes(texts: Sequence[str]) -> list[NetworkPass] | None:
    """The passes that texts name, in the order in which each finds what it needs; None for none.

    Raises:
        InputError: there is no such pass, or one is given twice.
    """
    if not texts:
        return None
    from convgen.network_compiler import MEANWHILE
    from convgen.passes.contract import read_pass

    given = [read_pass(MEANWHILE, text) for text in texts]
    names = [one.name for one in given]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--pass {name} is given {names.count(name)} times", hint=f"--pass '{name}{{...}}', once")
    by_name = dict(zip(names, given, strict=True))
    return [by_name[one.name] for one in MEANWHILE if one.name in by_name]


def _machine_of(plan: PlanFile, file: str) -> Machine | None:
    """The machine for which a plan was priced: one of tuning/machines, or a file relative to the plan's; None if the
    plan names none.

    Raises:
        InputError: there is no such machine.
    """
    from convgen.cost.machines import load_machine

    if not plan.machine:
        return None
    is_file = plan.machine.endswith((".yaml", ".yml")) or "/" in plan.machine
    try:
        return load_machine(str(Path(file).parent / plan.machine) if is_file else plan.machine)
    except InputError as error:
        fact = f"the plan's machine {shown(plan.machine)}: {error.fact}"
        hint = "the machine's name or file; or without machine and milliseconds, which say what priced the plan"
        raise locate(InputError(fact, ("machine",), hint=hint), plan.source) from None


def _refuse(file: str, options: Mapping[str, Any]) -> None:
    for name, why in LAYERS_ONLY.items():
        if options.get(name) and options[name] != DEFAULTS.get(name):
            flag = FLAGS.get(name, f"--{name}")
            raise InputError(f"{flag} {why}; {file} is a network's graph", hint=f"without {flag}")


def _refuse_twice(files: Sequence[str], plans: Sequence[str], schedule: str | None, flags: Sequence[str]) -> None:
    """Refuse a second layout. Raises InputError: a plan or a program's text says the layout, and so does something
    else.

    Args:
        plans: those of the files that are plans.
        flags: the given options that say a layout.
    """
    if schedule is not None and (len(files) != 1 or plans):
        fact = f"--schedule is of one network's graph, {f'{plans[0]} is a plan' if plans else f'here are {len(files)}'}"
        raise InputError(fact, hint="convgen compile GRAPH --schedule FILE")
    if flags and (plans or schedule is not None):
        said_by = f"{plans[0]} is a plan" if plans else f"{schedule} is a program's text"
        raise InputError(f"{flags[0]}: {said_by}, which says the layout and the statistics", hint=f"without {flags[0]}")


# ---- convgen compile ----


def compile_networks(
    files: Sequence[str],
    folder: Path | None,
    emit: str | None,
    as_json: bool,
    overlap: bool,
    after: Sequence[After] = (),
    *,
    untuned: bool,
    **options: Any,
) -> None:
    """Write the packages DIR/NAME, or print the stage asked for.

    Args:
        overlap: whether the files are of layers, each compiled as a network of one row.
        untuned: whether a GPU's kernels are the default ones.
        after: told each stage when it is done.
    """
    from convgen.passes.contract import tell

    tuned: Any = emit in (None, "module", "kernels") and not untuned
    found = networks_of(
        files, overlap=overlap, measured="quietly" if tuned and as_json else tuned, after=after, **options
    )
    _warn(found)
    for one in found if emit == "kernels" else ():
        need_kernels(one.compiled.target)
    if emit == "module":
        click.echo("\n".join(one.compiled.package().files["network.py"] for one in found), nl=False)
    elif emit == "schedule":
        click.echo("\n".join(one.compiled.package().files["schedule.txt"] for one in found), nl=False)
    elif emit == "cost":
        _echo_cost(found, as_json)
    elif emit == "kernels":
        echo_kernels(found, as_json)
    else:
        _write(found, folder or Path())
    tell(after, "emit", None)


def _warn(found: Sequence[CompiledFile]) -> None:
    """Warn on stderr of axes that split nothing."""
    for line in [line for one in found for line in one.compiled.idle_lines]:
        click.echo(f"warning: {line}", err=True)


def networks_of(
    files: Sequence[str], *, overlap: bool, measured: bool | Literal["quietly"] = False, **options: Any
) -> list[CompiledFile]:
    """The networks of files.

    Args:
        overlap: whether the files are of layers, each compiled as a network of one row.
        measured: whether a GPU's kernels come from the tuner's databases; remarks on missing ones go to stderr.
    """
    if not overlap:
        found = compile_graphs(files, **options)
    elif are_graphs(files):
        raise InputError(f"--overlap is of layers: {files[0]} is a network, which overlaps", hint="without --overlap")
    else:
        from convgen.commands.one_row import compile_one_rows

        found = compile_one_rows(files, command=f"convgen compile --overlap {Path(files[0]).name}", **options)
    return _with_measured(found, quiet=measured == "quietly") if measured else found


def echo_kernels(found: Sequence[CompiledFile], as_json: bool) -> None:
    """Print what ranks run in the place of ATen: a GPU's kernels, or a core group's rows."""
    from convgen.explain.kernels import network_kernels_json, network_kernels_text

    if found[0].compiled.target.is_mesh:
        from convgen.sw26010.training.compiled import compiled_step, step_json, step_text

        steps = [compiled_step(c.program, c.graph.modes, c.graph.batch) for c in (one.compiled for one in found)]
        show(as_json, lambda: [step_json(step) for step in steps], lambda: "\n\n".join(map(step_text, steps)))
        return
    show(
        as_json,
        lambda: [record for one in found for record in network_kernels_json(one.compiled)],
        lambda: "\n".join(network_kernels_text(one.compiled) for one in found),
    )


def _echo_cost(found: Sequence[CompiledFile], as_json: bool) -> None:
    from convgen.explain.program import program_cost_json, program_cost_text

    show(
        as_json,
        lambda: [program_cost_json(one.compiled) for one in found],
        lambda: "\n".join(program_cost_text(one.compiled) for one in found),
    )


def _write(found: Sequence[CompiledFile], folder: Path) -> None:
    """Write all packages or none: they are made, and their folders checked, before the first is written."""
    from convgen.packages import check_package, files_of, write_package

    paths = [folder / one.compiled.graph.name for one in found]
    for one, path in zip(found, paths, strict=True):
        try:
            check_package(path, "-o")
        except InputError as error:
            if error.path:  # the name, which the network's file says
                source = one.compiled.graph.source_file
                error.path = next((key for key in (error.path, ("name",)) if key in source.lines), ())
                locate(error, source)
            raise
    files = [files_of(one.compiled, one.tensors) for one in found]
    for path, package in zip(paths, files, strict=True):
        write_package(path, package, "-o")
    for path in paths:
        click.echo(str(path))


# ---- convgen check, convgen explain ----


def compile_one(file: str, **options: Any) -> CompiledFile:
    """The network of a file that has exactly one; options are those of `networks_of`."""
    found = networks_of([file], **options)
    if len(found) != 1:
        raise InputError(
            f"{file} has {len(found)} layers, and this command takes one at a time", hint="a YAML file of one layer"
        )
    return found[0]


def check_network_file(
    one: CompiledFile, processes: bool, interpret: bool, as_json: bool, timeout: float, derived: bool
) -> None:
    """Run every rank on this machine, and compare with the graph on one device."""
    _warn([one])
    need_device(one.compiled.target, processes, interpret)
    from convgen.verify.fits import check_network_fits
    from convgen.verify.network import check_network, report_json, report_text
    from convgen.verify.processes import TooLate

    try:
        check_network_fits(one.compiled, "processes" if processes else "virtual")
    except InputError as error:
        raise locate(error, one.compiled.graph.source_file) from None
    try:
        with progress() as told:
            report = check_network(
                one.compiled,
                one.tensors,
                transport="processes" if processes else "virtual",
                timeout_s=timeout,
                interpret=interpret,
                told=told,
            )
    except TooLate as error:
        click.echo(f"{error}\nerror: the processes did not finish in {timeout:g} s", err=True)
        click.echo("  try     --timeout with more seconds", err=True)
        raise SystemExit(1) from None
    show(as_json, lambda: [report_json(report)], lambda: report_text(report, derived=derived))
    if not report.ok:
        raise SystemExit(1)


def explain_network(one: CompiledFile, plot: Path | None, as_json: bool) -> None:
    """Print, and draw if a plot is asked for, what moves for each row, forward and backward, and what runs whole."""
    from convgen.explain.program import program_cost_json, program_text

    page = None
    if plot is not None:
        from convgen.explain.network_plot import draw_network

        page = draw_network(one.compiled)  # it refuses what can't be drawn before anything is printed
    show(as_json, lambda: [program_cost_json(one.compiled)], lambda: program_text(one.compiled))
    if page is not None:
        draw(plot, lambda: page)
