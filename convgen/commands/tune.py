"""`convgen tune`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from convgen.commands import completion
from convgen.commands.inputs import Finite, compile_files, layer_options, need
from convgen.commands.networks import are_graphs, compile_graphs
from convgen.commands.outputs import OutputFolder, Picture
from convgen.errors import InputError
from convgen.kernels.partition import SPLITS, Split
from convgen.spec.target import Target

if TYPE_CHECKING:
    from rich.console import Console

    from convgen.compiler import Compiled
    from convgen.tune.device import Device
    from convgen.tune.search import Effort
    from convgen.tune.tuner import Outcome
    from convgen.tune.wanted import Wanted

WIDE = 200  # columns of a table where no terminal limits it
INTERRUPTED = 130
LONGEST = 10  # the most digits of a number of ranks


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=completion.files)
@click.option("--budget", type=Finite(min=0, min_open=True), metavar="SECONDS", help="For all problems.")
@click.option("--effort", type=click.Choice(("quick", "full")), default="full", show_default=True,
              help="A thirtieth, or a tenth, of the legal configurations is measured.")  # fmt: skip
@click.option("--again", is_flag=True, help="Measure anew what was tuned or tried before.")
@click.option(
    "--into", type=OutputFolder(), metavar="DIR",
    help="Folder of the database, e.g. tuning/devices; by default the user's cache.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), help="Processes that compile for a GPU; one a core by default.")
@click.option("--threads", type=click.IntRange(1), help="Of a CPU; by default OMP_NUM_THREADS, or all there are.")
@click.option("--partitions", metavar="1,2,4,8", help="Layers as one of so many ranks has them, whatever their grids.")
@click.option("--splits", default="channel,filter,spatial", show_default=True, help="Of --partitions.")
@click.option(
    "--plot", type=Picture(), metavar="FILE", help="With --partitions: draw time against ways (png, svg, pdf)."
)
@click.option("--explain", metavar="PHASE", help="Measure nothing: why a phase (LAYER.PHASE) has its kernel.")
@click.option("--json", "as_json", is_flag=True, help="The results as JSON.")
@layer_options
def tune(files: Sequence[str], **given: Any) -> None:
    """Find the fastest correct local kernels, and remember them."""
    own = ("budget", "effort", "again", "into", "jobs", "threads", "partitions", "splits", "plot", "explain", "as_json")
    options = {n: given.pop(n) for n in own}
    target: str | None = given["target"]
    if target is not None and target.startswith(("sm_", "gfx")):
        given["target"] = f"{'cuda' if target.startswith('sm_') else 'hip'}:{target}"
    need("torch", "tuning runs what it tunes, which needs torch")
    need("filelock", "databases are written under a lock", extra="tune")
    if options["plot"] and not options["partitions"]:
        raise InputError("--plot draws partitions", hint="--partitions 1,2,4,8 --plot FILE")
    for other in ("as_json", "plot", "again", "budget"):
        if options["explain"] is not None and options[other]:
            name = "json" if other == "as_json" else other
            raise InputError(f"--explain is text and measures nothing: it takes no --{name}", hint=f"without --{name}")
    wanted, target_of = (_of_networks if are_graphs(files) else _of_layers)(files, given, options)
    if not target_of.is_cpu:
        need("triton", f"kernels for {target_of} are compiled by triton")
    if options["explain"] is not None:
        _explain(wanted, target_of, options)
        return
    device = _device(target_of, options["threads"])
    if device is None:
        _rank(wanted, target_of, options)
    else:
        _measure(wanted, device, target_of, options)


def _of_layers(files: Sequence[str], given: dict[str, Any], options: dict[str, Any]) -> tuple[list[Wanted], Target]:
    compiled = compile_files(files, **given)
    return _wanted(compiled, options), _one_target(compiled)


def _of_networks(files: Sequence[str], given: dict[str, Any], options: dict[str, Any]) -> tuple[list[Wanted], Target]:
    from convgen.tune.wanted import of_networks

    if options["partitions"] is not None:
        fact = f"--partitions is of layers, {files[0]} is a network"
        raise InputError(fact, hint="a grid for each: --grid N=2, --grid N=4")
    compiled = [one.compiled for one in compile_graphs(files, **given)]
    return of_networks(compiled), compiled[0].target


def _wanted(compiled: Sequence[Compiled], options: dict[str, Any]) -> list[Wanted]:
    from convgen.tune.wanted import of_layers, of_partitions

    if options["partitions"] is None:
        return of_layers(compiled)
    if len(compiled) != 1 and options["plot"]:
        raise InputError(f"--plot draws one layer, here are {len(compiled)}", hint="a YAML file of one layer")
    words: list[str] = [w.strip() for w in options["partitions"].split(",")]
    if not all(w.isdecimal() and len(w) < LONGEST and int(w) for w in words):
        raise InputError(
            f"--partitions {options['partitions']}: no list of numbers of ranks", hint="--partitions 1,2,4,8"
        )
    splits: list[str] = [w.strip() for w in options["splits"].split(",")]
    for split in splits:
        if split not in SPLITS:
            raise InputError(f"--splits {options['splits']}: {split!r} is none", hint=", ".join(SPLITS))
    ways = sorted({int(w) for w in words})
    return of_partitions([c.layer for c in compiled], ways, cast("list[Split]", splits))


def _one_target(compiled: Sequence[Compiled]) -> Target:
    found = {str(c.layer.target): c.layer.known_target() for c in compiled}
    if len(found) > 1:
        raise InputError(f"layers for several targets: {', '.join(sorted(found))}", hint="one at a time, or --target")
    return next(iter(found.values()))


def _device(target: Target, threads: int | None) -> Device | None:
    """The device to measure on; None where this machine lacks it."""
    from convgen.tune.device import this_cpu

    if target.is_cpu:
        return this_cpu(threads)
    from convgen.tune.gpu import this_gpu

    found = this_gpu()
    return found if found is not None and found.target == str(target) else None


def _console(stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDE, markup=False)


def _measure(wanted: Sequence[Wanted], device: Device, target: Target, options: dict[str, Any]) -> None:
    from convgen.tune.database import user_folder
    from convgen.tune.report import closing_table, record
    from convgen.tune.trials import trials_path
    from convgen.tune.tuner import Tuner
    from convgen.tune.view import Screen

    folder: Path = options["into"] or user_folder()
    database = folder / device.file_name
    done: list[Outcome] = []
    interrupted = False
    signal.signal(signal.SIGTERM, _interrupt)
    with Screen(_console(stderr=True), options["budget"]) as screen:
        tuner = Tuner(
            device, target, database, trials_path(device), screen,
            effort=cast("Effort", options["effort"]), seconds=options["budget"], again=options["again"],
            jobs=options["jobs"] or os.cpu_count() or 1,
        )  # fmt: skip
        try:
            done.extend(tuner.run(wanted))
        except KeyboardInterrupt:
            interrupted = True
    place = {w.key: i for i, w in enumerate(wanted)}
    done.sort(key=lambda o: place[o.wanted.key])
    if options["as_json"]:
        click.echo(json.dumps([record(o, device.name) for o in done], indent=1))
    else:
        _console(stderr=False).print(closing_table(done, f"{device.name}: {database}"))
    if options["plot"]:
        from convgen.tune.scaling import plot

        plot(done, device.name, options["plot"])
        click.echo(str(options["plot"]), err=True)
    if interrupted:
        click.echo(f"interrupted after {len(done)} of {len(wanted)} problems; the same command goes on", err=True)
        sys.exit(INTERRUPTED)
    if left := sum(o.status == "not reached" for o in done):
        click.echo(f"time is up: {left} problems were not reached; the same command goes on", err=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _rank(wanted: Sequence[Wanted], target: Target, options: dict[str, Any]) -> None:
    """Rank candidates without the device, by the model and the compiler."""
    from convgen.tune.modelled import modelled_records, modelled_table, rank_only

    if options["plot"]:
        raise InputError(f"--plot draws measured times; there is no {target} here", hint="target: cpu, or that device")
    click.echo(f"there is no {target} here: nothing is measured or stored; candidates are ranked by a model", err=True)

    def told(count: int, text: str) -> None:
        click.echo(f"{count}/{len(wanted)} {text}", err=True)

    jobs: int = options["jobs"] or os.cpu_count() or 1
    made = rank_only(wanted, target, cast("Effort", options["effort"]), jobs, options["budget"], told)
    if options["as_json"]:
        click.echo(json.dumps(modelled_records(made, target), indent=1))
    else:
        _console(stderr=False).print(modelled_table(made, target))
    if len(made) < len(wanted):
        click.echo(f"time is up: {len(wanted) - len(made)} problems were not reached", err=True)


def _explain(wanted: Sequence[Wanted], target: Target, options: dict[str, Any]) -> None:
    from convgen.tune.device import this_cpu
    from convgen.tune.explain import explain_text, pick

    one = pick(wanted, options["explain"])
    device: Device | None = this_cpu(options["threads"]) if target.is_cpu else None
    if device is None:
        from convgen.tune.lookup import device_for

        device = device_for(target)
    click.echo(explain_text(one, target, device, options["into"]))
