"""`convgen bench`: run on every rank by a launcher; rank 0 prints, draws and writes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convgen.commands import completion
from convgen.commands.correct import machine_file, put_back
from convgen.commands.inputs import STATISTICS, autocast_option, need, reduce_dtype_option
from convgen.commands.launched import refused_once
from convgen.commands.networks import are_graphs, networks_of
from convgen.commands.outputs import OutputFile, Picture
from convgen.errors import InputError
from convgen.files import write_file

if TYPE_CHECKING:
    from convgen.bench.run import Benched, Subject
    from convgen.calibrate.team import Team
    from convgen.commands.compiled_file import CompiledFile

ITS_OWN = "a layer's file and a plan say theirs, and take no --grid"
LAUNCH = f"torchrun --nproc-per-node 4 -m convgen bench FILE --grid N=4; {ITS_OWN}"
TORCHS = ("ddp", "module")


@click.command("bench")
@click.argument("file", shell_complete=completion.files)
@click.option(
    "--grid", "grids", multiple=True, shell_complete=completion.grids,
    help="Axes and ranks, e.g. N=2,H=2; several: scaling over them, each on the first of the ranks.",
)  # fmt: skip
@click.option("--weak", is_flag=True, help="With several grids: also with as many samples a rank as on the most ranks.")
@click.option("--algorithm", shell_complete=completion.algorithms, help="A named algorithm, or auto.")
@click.option("--dtype", help="Of the network, its own by default.")
@click.option("--statistics", type=click.Choice(STATISTICS), help="Of batch norms; global by default.")
@reduce_dtype_option
@autocast_option
@click.option("--schedule", metavar="FILE", help="A network's program as compile prints it, or edited.")
@click.option("--pass", "passes", multiple=True, metavar="NAME{OPTION=VALUE}", help="As convgen compile has it.")
@click.option(
    "--machine", shell_complete=completion.machines,
    help="The step simulated on it stands beside the measured one; and what travels meanwhile is chosen for it.",
)  # fmt: skip
@click.option(
    "--correct", metavar="FILE",
    help="A machine's file, as --machine: steps of which it is off are written into it, as they were measured.",
)  # fmt: skip
@click.option(
    "--skip", multiple=True, type=click.Choice(("collectives", "compute", "overlap")),
    help="Also without: computing alone, collectives alone, or with every collective waited for at once.",
)  # fmt: skip
@click.option(
    "--against", multiple=True, metavar="FILE|ddp|module",
    help="In the same rounds: another file (of this grid, or a plan), torch's DDP, or the module on every rank alone.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 10_000), default=15, show_default=True, help="That count.")
@click.option("--warm", type=click.IntRange(1, 1000), default=3, show_default=True, help="Rounds before.")
@click.option(
    "--device", type=click.Choice(("cpu", "cuda")), help="cuda: HIP's too.  [default: cuda where torch sees a GPU]"
)
@click.option(
    "--trace", "trace_file", type=OutputFile(), metavar="FILE",
    help="What every rank did in a step, above the simulated one: trace events, for ui.perfetto.dev.",
)  # fmt: skip
@click.option("--plot", type=Picture(), metavar="FILE", help="Of several grids: steps over ranks (png, svg, pdf).")
@click.option("--json", "as_json", is_flag=True, help="Everything measured as JSON.")
def bench_command(
    file: str,
    grids: tuple[str, ...],
    weak: bool,
    machine: str | None,
    correct: str | None,
    skip: tuple[str, ...],
    against: tuple[str, ...],
    rounds: int,
    warm: int,
    device: str | None,
    trace_file: Path | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Time a step of training on these processes: forward, backward, every collective, every step of the list.

    A network, a plan, or a layer's file, which is a network of one row. Every rank runs it:

      torchrun --nproc-per-node 4 -m convgen bench FILE --grid N=2,H=2
    """
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal():
        raise InputError("convgen bench measures ranks, and no launcher has started any", hint=LAUNCH)
    need("torch", "measuring runs what torch runs")
    if plot is not None and len(grids) < 2:
        raise InputError("--plot draws steps over ranks, and there is one grid", hint="--grid N=1 --grid N=2")
    if weak and len(grids) < 2:
        raise InputError("--weak: scaling wants several grids", hint="--grid N=1 --grid N=2 --weak")
    if options["statistics"] is not None and not are_graphs([file]):
        raise InputError(f"--statistics is of batch norms, and {file} is a layer's file", hint="without --statistics")
    if trace_file is not None and len(grids) > 1:
        raise InputError("--trace is of one grid", hint="without the others")
    if correct is not None and machine not in (None, correct):
        raise InputError(f"--correct {correct} and --machine {machine}", hint="--correct alone: it is the machine")
    machine = machine if correct is None else correct
    path = None if correct is None else machine_file(correct)
    import torch

    from convgen.bench.report import bench_json, bench_text, bench_trace, scaling_text
    from convgen.bench.run import Effort, bench
    from convgen.calibrate.team import joined
    from convgen.cost.machines import load_machine

    chosen = None if machine is None else load_machine(machine)
    with refused_once(), joined(device or ("cuda" if torch.cuda.is_available() else "cpu")) as team:
        first = team.rank == 0
        strong, growing = _subjects(team, file, grids, machine, against, options, weak=weak)
        found: list[list[Benched]] = []
        for several in (strong, growing):
            measured: list[Benched] = []
            for subject in several:
                with tempfile.TemporaryDirectory(prefix="convgen-bench-") as folder:
                    one = bench(
                        team, subject, Path(folder), chosen, Effort(rounds, warm), skip,
                        lambda line: click.echo(line, err=True) if first else None,
                    )  # fmt: skip
                measured.append(one)
            found.append(measured)
    if not first:
        return
    every, scales = [*found[0], *found[1]], len(grids) > 1
    if as_json:
        click.echo(json.dumps({"strong": [*map(bench_json, found[0])], "weak": [*map(bench_json, found[1])]}, indent=1))
    else:
        click.echo("\n\n".join([*map(bench_text, every), *([scaling_text(*found)] if scales else [])]))
    if path is not None:
        put_back(path, [step for one in every for step in one.corrected])
    if trace_file is not None:
        write_file(trace_file, bench_trace(every[0]), "--trace")
        click.echo(str(trace_file), err=True)
    if plot is not None:
        _draw(found[0], found[1], plot)
        click.echo(str(plot), err=True)


def _subjects(
    team: Team, file: str, grids: Sequence[str], machine: str | None, against: Sequence[str],
    options: Mapping[str, Any], *, weak: bool,
) -> tuple[list[Subject], list[Subject]]:  # fmt: skip
    """The subjects to measure: with the file's number of samples, and with samples that grow with the ranks.

    Raises:
        InputError: files can't be compiled, or no grid has as many ranks as there are processes.
    """
    from convgen.bench.run import Subject, weak_batch
    from convgen.bench.samples import of_samples

    of_layers = not are_graphs([file])
    target = options.get("target") or _target(team)

    def compiled(name: str, grid: str | None) -> list[CompiledFile]:
        given: dict[str, Any] = {**options, "grid": grid, "target": target}
        if of_layers:
            given.pop("statistics")
        return networks_of([name], overlap=not are_graphs([name]), machine=_machine(machine, given), **given)

    torchs = tuple(one for one in against if one in TORCHS)
    files = [one for one in against if one not in TORCHS]
    strong: list[Subject] = []
    for grid in grids or (None,):
        found = compiled(file, grid)
        others = {one: compiled(one, grid) for one in files}
        for name, several in others.items():
            if len(several) != 1 or len(found) != 1:
                raise InputError(f"--against {name} compares one network with one", hint="a file of each")
            ranks = several[0].compiled.program.grid.ranks
            if ranks != found[0].compiled.program.grid.ranks:
                raise InputError(f"--against {name} has {ranks} ranks, and {file} has others", hint="as many ranks")
        beside = {f"{name}": (some[0].compiled, some[0].tensors) for name, some in others.items()}
        strong += [Subject(c.compiled, c.tensors, of_layers, beside, torchs) for c in found]
    most = max(one.ranks for one in strong)
    if most != team.size:
        fact = f"{file} is compiled for {most} ranks, and here are {team.size} processes"
        raise InputError(fact, hint=f"torchrun --nproc-per-node {most}, or another --grid; {ITS_OWN}")
    growing: list[Subject] = []
    for one in strong if weak else ():
        batch = weak_batch(one.compiled.graph.batch, one.ranks, most)
        if batch is not None:
            growing.append(replace(one, compiled=of_samples(one.compiled, batch), against={}, torchs=()))
    return strong, growing


def _machine(machine: str | None, options: Mapping[str, Any]) -> str | None:
    """The machine by which it is chosen what travels meanwhile; None if a text or passes say that."""
    return None if options["schedule"] is not None or options["passes"] else machine


def _target(team: Team) -> str:
    from convgen.tune.gpu import this_gpu

    gpu = this_gpu() if team.device.type == "cuda" else None
    return "cpu" if gpu is None else gpu.target


def _draw(strong: Sequence[Benched], weak: Sequence[Benched], plot: Path) -> None:
    from convgen.bench.run import STEP
    from convgen.pictures.scaling import draw_measured

    def points(several: Sequence[Benched], simulated: bool) -> list[tuple[int, float]]:
        if simulated:
            return [(one.subject.ranks, one.simulated[STEP][1]) for one in several if STEP in one.simulated]
        return [(one.subject.ranks, one.ways[STEP]["step"].median) for one in several]

    panels = {"strong scaling": strong, "weak scaling": weak}
    name = strong[0].subject.compiled.graph.name
    drawn = {f"{name}: {k}": (points(v, False), points(v, True)) for k, v in panels.items() if v}
    draw_measured(drawn, strong[0].device, plot)
