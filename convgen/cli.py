"""The command line (DESIGN section 5).

Results go to stdout, progress and remarks to stderr. Exit codes: 0 done, 1 a check failed, 2 the input is
wrong, 3 a bug of ours.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convgen import __version__
from convgen.calibrate.cli import calibrate_command
from convgen.errors import InputError
from convgen.inputs import Finite, compile_files, layer_options, need, untuned_option
from convgen.plan.cli import network_command, plan_command
from convgen.spec.source import locate
from convgen.sw26010.cli import sw26010
from convgen.tune.cli import INTERRUPTED, tune

if TYPE_CHECKING:
    from convgen.compiler import Compiled

LONGEST_S = 10**6  # of --timeout: the clocks behind it overflow somewhere above
STAGES = ("module", "schedule", "cost", "kernels")


class Commands(click.Group):
    """An interrupted command failed no check: exit code 130, where click has 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="convgen")
def cli() -> None:
    """A compiler for distributed convolutions."""


@cli.command("compile")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", default=".", metavar="DIR", help="Where NAME.py is written.  [default: .]")
@click.option("--emit", type=click.Choice(STAGES), help="Print a stage to stdout instead of writing modules.")
@click.option("--json", "as_json", is_flag=True, help="With --emit cost or kernels: JSON.")
@untuned_option
@layer_options
def compile_command(
    files: Sequence[str], output: str, emit: str | None, as_json: bool, untuned: bool, **options: Any
) -> None:
    """Write DIR/NAME.py for each layer, or print the stage asked for. Needs no GPU and no process group."""
    tuned = emit in (None, "module", "kernels") and not untuned
    all_compiled = compile_files(files, **options, measured="quietly" if tuned and as_json else tuned)
    if emit == "kernels":
        _emit_kernels(all_compiled, as_json)
        return
    if emit == "cost":
        from convgen.explain.text import cost_json, cost_text

        if as_json:
            click.echo(json.dumps([cost_json(c) for c in all_compiled], indent=1))
        else:
            click.echo("\n".join(cost_text(c) for c in all_compiled))
    elif emit == "schedule":
        from convgen.schedule.text import show

        click.echo("\n".join(show(c.schedule) for c in all_compiled), nl=False)
    elif emit == "module":
        click.echo("\n".join(c.module() for c in all_compiled), nl=False)
    else:
        _write_modules(all_compiled, Path(output))


def _emit_kernels(all_compiled: Sequence[Compiled], as_json: bool) -> None:
    """Sources of the local kernels, and what each compiles to for the target."""
    for one in all_compiled:
        if not one.layer.virtual_padding:
            raise InputError(
                f"target {one.layer.target} has no generated kernels: its local convolution is ATen's",
                path=("target",),
                hint="--target cuda:sm_90, hip:gfx942 or sw26010; or --emit module, schedule or cost",
            )
    records: list[dict[str, Any]] = []
    for one in all_compiled:
        if one.layer.on_gpu:
            need("torch", "kernels are compiled as torch would launch them")
            need("triton", "compiling kernels needs triton, though no GPU")
            from convgen.explain.kernels import kernels_json, kernels_text
        else:
            from convgen.explain.mesh import mesh_kernels_json as kernels_json
            from convgen.explain.mesh import mesh_kernels_text as kernels_text
        if as_json:
            records += kernels_json(one)
        else:
            click.echo(kernels_text(one))
    if as_json:
        click.echo(json.dumps(records, indent=1))


def _write_modules(all_compiled: Sequence[Compiled], folder: Path) -> None:
    """All or nothing: modules are printed before the first is written."""
    texts = [(folder / f"{c.layer.name}.py", c.module()) for c in all_compiled]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts:
            path.write_text(text, encoding="utf-8")
            click.echo(str(path))
    except OSError as error:
        fact = f"cannot write to {folder}: {error.strerror}"
        raise InputError(fact, hint="-o DIR with a folder you may write to") from error


@cli.command()
@click.argument("file")
@click.option("--processes", is_flag=True, help="One process a rank, torch.distributed with gloo between them.")
@click.option("--interpret", is_flag=True, help="A GPU target's Triton kernels in Triton's interpreter.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
@click.option(
    "--timeout", type=Finite(0, LONGEST_S, min_open=True), default=120.0, show_default=True,
    help="Seconds after which processes are given up.",
)  # fmt: skip
@untuned_option
@layer_options
def check(
    file: str, processes: bool, interpret: bool, as_json: bool, timeout: float, untuned: bool, **options: Any
) -> None:
    """Compile, run every rank on this machine, and compare with a single-device float64 reference."""
    all_compiled = compile_files([file], **options, measured="quietly" if as_json and not untuned else not untuned)
    for one in all_compiled:
        one.module()  # refuses a target without an emitter before torch is needed
    layer = all_compiled[0].layer
    if interpret and not layer.on_gpu:
        raise InputError(
            f"target {layer.target} has no Triton kernels to interpret",
            path=("target",),
            hint="check without --interpret",
        )
    need("torch", "convgen check runs the module, which needs torch")
    if layer.on_gpu:
        need("triton", f"a module for {layer.target} imports triton")
        if not interpret:
            _need_gpu(layer.target, processes)
    from convgen.verify.fits import check_fits

    transport = "processes" if processes else "virtual"
    for one in all_compiled:
        try:
            check_fits(one, transport)
        except InputError as error:
            raise locate(error, one.layer.source) from None
    from convgen.verify.check import check as run_check
    from convgen.verify.report import report_json, report_text

    reports = [run_check(c, transport=transport, timeout_s=timeout, interpret=interpret) for c in all_compiled]
    if as_json:
        click.echo(json.dumps([report_json(c, r) for c, r in zip(all_compiled, reports, strict=True)], indent=1))
    else:
        click.echo("\n".join(report_text(c, r) for c, r in zip(all_compiled, reports, strict=True)))
    if not all(r.ok for r in reports):
        raise SystemExit(1)


def _need_gpu(target: str, processes: bool) -> None:
    """Virtual ranks of a GPU target share one GPU; processes would need one each."""
    import torch

    hint = "--interpret runs its kernels on the CPU, in Triton's interpreter"
    if processes:
        raise InputError(f"--processes with target {target}: ranks as processes would need a GPU each", hint=hint)
    if not torch.cuda.is_available():
        raise InputError(f"target {target}: torch sees no GPU here", path=("target",), hint=hint)


@cli.command()
@click.argument("file")
@click.option("--plot", metavar="FILE", help="Draw who owns and needs what, and the steps as lanes (png, svg, pdf).")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@layer_options
def explain(file: str, plot: str | None, as_json: bool, **options: Any) -> None:
    """Roles, schedule, and per step its elements, bytes, seconds and formula."""
    from convgen.explain.text import cost_json, explain_text

    all_compiled = compile_files([file], **options)
    if plot is not None and len(all_compiled) != 1:
        raise InputError(f"--plot draws one layer, {file} has {len(all_compiled)}", hint="a YAML file of one layer")
    if as_json:
        click.echo(json.dumps([cost_json(c) for c in all_compiled], indent=1))
    else:
        click.echo("\n".join(explain_text(c) for c in all_compiled))
    if plot is not None:
        from convgen.explain.plot import plot as draw

        draw(all_compiled[0], Path(plot))
        click.echo(plot, err=True)


cli.add_command(calibrate_command)
cli.add_command(network_command)
cli.add_command(plan_command)
cli.add_command(sw26010)
cli.add_command(tune)


def main() -> None:
    """Entry point: errors of the input in one message, ours with how to report them."""
    try:
        cli(standalone_mode=True)
    except InputError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    except Exception:
        click.echo(traceback.format_exc(), err=True)
        click.echo(
            f"convgen {__version__}: this is a bug of convgen. Please report the text above with the layer file and "
            f"this command: convgen {' '.join(sys.argv[1:])}",
            err=True,
        )
        sys.exit(3)


if __name__ == "__main__":
    main()
