"""The inputs of commands: layer files, CSV tables, and the options that say how they are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import click

from convgen.commands.completion import algorithms, grids, machines, targets
from convgen.errors import InputError, installing
from convgen.spec.formats import check_text_format
from convgen.spec.reader import locate
from convgen.spec.target import WRITTEN
from convgen.spec.text import LONGEST, MAX_FILE_BYTES, parse_grid, read_text

if TYPE_CHECKING:
    from convgen.compiler import Compiled
    from convgen.passes.contract import After
    from convgen.spec.layer import Layer
    from convgen.spec.target import Target

LONGEST_LINE = 20_000  # the most characters of a schedule's line
OBJECTIVES = ("seconds", "bytes")


class Finite(click.FloatRange):
    """A range of finite numbers: click's own lets `nan` pass any bound, and `inf` any lower bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isfinite(click.FLOAT.convert(value, param, ctx)):
            self.fail(f"{value} is no finite number.", param, ctx)
        return super().convert(value, param, ctx)


STATISTICS = ("global", "spatial", "local")
reduce_dtype_option = click.option(
    "--reduce-dtype", type=click.Choice(("float32", "bfloat16", "float16")),
    help="For a network: in which parameters' gradients travel to be summed; their own type by default.",
)  # fmt: skip
autocast_option = click.option(
    "--autocast",
    type=click.Choice(("bfloat16", "float16")),
    help="For a network: the type of the torch.autocast that it will be run under.",
)
statistics_option = click.option(
    "--statistics", type=click.Choice(STATISTICS),
    help="Of a network's batch norms: over the whole batch, a sample's ranks, or a rank's block; global by default.",
)  # fmt: skip


def layer_options(command: Any) -> Any:
    """The options that say what is compiled, which commands share."""
    for option in (
        click.option(
            "--target", shell_complete=targets,
            help=f"Instead of the file's: {WRITTEN}.",
        ),
        click.option(
            "--machine", shell_complete=machines,
            help="What `algorithm: auto` models, and for which is chosen what of a network travels meanwhile: a name "
            "in tuning/machines, or a YAML file.",
        ),
        click.option(
            "--objective", type=click.Choice(OBJECTIVES), default="seconds", show_default=True,
            help="What `algorithm: auto` and unstated roles minimise.",
        ),
        click.option(
            "--grid", shell_complete=grids, help="For a CSV of layers, or a network: axes and ranks, e.g. N=2,C=2."
        ),
        click.option(
            "--algorithm", shell_complete=algorithms,
            help="For a CSV of layers, or a network: a named algorithm, or auto.",
        ),
        click.option("--dtype", help="For a CSV of layers, float32 by default; or a network, its own by default."),
        click.option(
            "--memory-format", type=click.Choice(("contiguous", "channels_last")),
            help="For a CSV of layers; channels_last by default on a GPU, else contiguous.",
        ),
        statistics_option,
        reduce_dtype_option,
        autocast_option,
        click.option(
            "--recompute", metavar="BLOCKS",
            help="For a network: blocks of the source that backward computes again, e.g. layer1,layer2.0.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def schedule_options(command: Any) -> Any:
    """The options by which a person gives a schedule, or the passes that make it."""
    for option in (
        click.option("--schedule", metavar="FILE", help="An edited schedule of the layer, or network: verified, used."),
        click.option(
            "--pass", "passes", multiple=True, metavar="NAME{OPTION=VALUE}",
            help="Options of a layer's pass, e.g. 'fuse-layouts{least_part=32}'; a network's, instead of those that a "
            "timeline finds.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


overlap_option = click.option(
    "--overlap", is_flag=True, help="A layer as a network of one row, whose communication travels while it computes."
)
untuned_option = click.option("--untuned", is_flag=True, help="Default kernels, without the tuner's databases.")


def need(package: str, why: str, *, extra: str = "") -> None:
    """Raises InputError where a package is not installed."""
    if find_spec(package) is None:
        raise InputError(why, hint=installing(package, extra))


def compile_files(
    files: Sequence[str],
    *,
    target: str | None,
    machine: str | None,
    objective: str,
    grid: str | None,
    algorithm: str | None,
    dtype: str | None,
    memory_format: str | None,
    statistics: str | None = None,
    reduce_dtype: str | None = None,
    autocast: str | None = None,
    recompute: str | None = None,
    schedule: str | None = None,
    passes: Sequence[str] = (),
    measured: bool | Literal["quietly"] = False,
    after: Sequence[After] = (),
) -> list[Compiled]:
    """Every layer of the files, compiled; errors say the file and the line.

    Args:
        schedule: the file of an edited schedule, for one layer.
        passes: passes with their options, such as "fuse-layouts{least_part=32}".
        measured: whether local kernels come from the tuner's databases; remarks on missing ones go to stderr.
        after: is told each stage when it is done.
    """
    from convgen.compiler import compile_layer, pipeline
    from convgen.cost.machines import load_machine
    from convgen.passes.contract import tell, with_options
    from convgen.spec.target import read_target

    if target is not None:
        read_target(target)
    check_only_of_networks(files[0], statistics, recompute, reduce_dtype, autocast)
    options = "".join(
        f" --{name} {value}"
        for name, value in (("target", target), ("machine", machine), ("objective", objective))
        if value is not None and (name, value) != ("objective", "seconds")
    )
    options += "".join(f" --pass '{text}'" for text in passes)
    chosen = load_machine(machine) if machine is not None else None
    compiled: list[Compiled] = []
    layers = read_files(files, grid, algorithm, dtype, memory_format)
    if schedule is not None and len(layers) != 1:
        raise InputError(f"--schedule is of one layer, here are {len(layers)}", hint="a YAML file of one layer")
    tell(after, "read", None)
    for layer in layers:
        pipe = pipeline(layer)
        for text in passes:
            pipe = with_options(pipe, text)
        try:
            one = compile_layer(
                layer, target=target, machine=chosen, objective="bytes" if objective == "bytes" else "seconds",
                passes=pipe, after=after,
            )  # fmt: skip
        except InputError as error:
            raise locate(error, layer.source) from None
        one = replace(one, options=options)
        compiled.append(one if schedule is None else one.with_schedule(read_schedule(schedule), schedule))
    _refuse_same_names(compiled)
    return _with_measured(compiled, quiet=measured == "quietly") if measured else compiled


def need_kernels(target: Target) -> None:
    """Check that kernels can be compiled. Raises InputError: the target has none, or their compiler is not
    installed."""
    if not target.has_programs:
        fact = f"target {target.text} has no generated kernels: its local convolution is ATen's"
        hint = "--target cuda:sm_90, hip:gfx942 or sw26010; or --emit module, schedule or cost"
        raise InputError(fact, path=("target",), hint=hint)
    if target.is_gpu:
        need("torch", "kernels are compiled as torch would launch them")
        need("triton", "compiling kernels needs triton, though no GPU")


def check_only_of_networks(
    file: str, statistics: str | None, recompute: str | None, reduce_dtype: str | None, autocast: str | None
) -> None:
    """Refuse options that only networks have. Raises InputError: one is given for a layer's file."""
    if statistics is not None:
        raise InputError(f"--statistics {statistics} is of a network's batch norms; {file} is a layer's file")
    if recompute is not None:
        raise InputError(f"--recompute {recompute} is of a network's blocks; {file} is a layer's file")
    if reduce_dtype is not None:
        raise InputError(f"--reduce-dtype {reduce_dtype} is of a network's parameters; {file} is a layer's file")
    if autocast is not None:
        raise InputError(
            f"--autocast {autocast} is of a network; {file} is a layer's file, which says its dtype",
            hint=f"dtype: {autocast} there",
        )


def _check_there(file: str) -> None:
    """Check that a file is there, before its options are. Raises InputError: it can't be read."""
    from convgen.spec.yaml import read_yaml

    if not file.lower().endswith(".csv"):
        read_yaml(file)


def read_schedule(file: str) -> str:
    """The text of the file of `--schedule`. Raises InputError: it can't be read."""
    try:
        text = read_text(file, MAX_FILE_BYTES * LONGEST)
    except InputError as error:
        error.fact, error.hint = f"--schedule: {error.fact}", "a schedule as convgen compile --emit schedule prints it"
        raise
    check_text_format(text, file)
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE:
            fact = f"--schedule: a line of {len(line)} characters, more than {LONGEST_LINE}"
            raise InputError(fact, where=f"{file}:{number}", hint="a step a line, as it is printed")
    return text


def _with_measured(compiled: list[Compiled], *, quiet: bool) -> list[Compiled]:
    """The layers with kernels from the tuner's databases; remarks go to stderr."""
    from convgen.tune.apply import with_measured

    made, remarks = with_measured(compiled)
    for remark in [] if quiet else remarks:
        click.echo(remark, err=True)
    return made


def _refuse_same_names(compiled: Sequence[Compiled]) -> None:
    seen: dict[str, str] = {}
    for one in compiled:
        where = one.layer.source.where(("name",))
        if one.layer.name in seen:
            raise InputError(
                f"two layers are named {one.layer.name}: {seen[one.layer.name]} and {where}",
                hint="another name for one",
            )
        seen[one.layer.name] = where


def read_files(
    files: Sequence[str], grid: str | None, algorithm: str | None, dtype: str | None, memory_format: str | None
) -> list[Layer]:
    """The layers of YAML files, and of CSV tables on a grid."""
    from convgen.spec.reader import read_csv, read_layers

    tables = [f for f in files if f.lower().endswith(".csv")]
    if tables and grid is None:
        raise InputError(f"{tables[0]} has no grid of its own", hint="--grid N=2,C=2")
    given = {"--grid": grid, "--algorithm": algorithm, "--dtype": dtype, "--memory-format": memory_format}
    if len(tables) < len(files) and any(given.values()):
        for file in files:
            _check_there(file)
        option = next(name for name, value in given.items() if value)
        one = next(f for f in files if f not in tables)
        fact = f"{option} is for a CSV of layers; a layer file says it itself"
        raise InputError(fact, where=one, hint="edit the layer file")
    layers: list[Layer] = []
    for file in files:
        if file in tables and grid is not None:
            layers += read_csv(
                file,
                grid=parse_grid(grid),
                algorithm=algorithm or "auto",
                dtype=dtype or "float32",
                memory_format=memory_format,
            )
        else:
            layers += read_layers(file)
    return layers


def need_device(target: Target, processes: bool, interpret: bool) -> None:
    """Check that a check of a target's module can run: with torch, triton, and a GPU or the interpreter.

    Virtual ranks of a GPU target share one GPU; processes would need one each.

    Raises:
        InputError: one of these is missing, or there is nothing to interpret.
    """
    if interpret and not target.is_gpu:
        fact = f"target {target.text} has no Triton kernels to interpret"
        raise InputError(fact, path=("target",), hint="check without --interpret")
    need("torch", "convgen check runs the module, which needs torch")
    if not target.is_gpu:
        return
    need("triton", f"a module for {target.text} imports triton")
    if interpret:
        return
    import torch

    hint = "--interpret runs its kernels on the CPU, in Triton's interpreter"
    if processes:
        raise InputError(f"--processes with target {target.text}: ranks as processes would need a GPU each", hint=hint)
    if not torch.cuda.is_available():
        raise InputError(f"target {target.text}: torch sees no GPU here", path=("target",), hint=hint)
