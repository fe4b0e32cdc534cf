"""`convgen check`: run a module and compare it with a reference."""

from __future__ import annotations

import json
from typing import Any

import click

from convgen.commands import completion
from convgen.commands.inputs import (
    Finite,
    compile_files,
    layer_options,
    need_device,
    overlap_option,
    schedule_options,
    untuned_option,
)
from convgen.commands.networks import are_graphs, check_network_file, compile_one
from convgen.commands.progress import progress
from convgen.errors import InputError
from convgen.spec.source import locate

LONGEST_S = 10**6  # the largest --timeout: the clocks behind it overflow somewhere above


@click.command("check")
@click.argument("file", shell_complete=completion.files)
@click.option("--processes", is_flag=True, help="One process a rank, torch.distributed with gloo between them.")
@click.option("--interpret", is_flag=True, help="A GPU target's Triton kernels in Triton's interpreter.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
@click.option(
    "--timeout", type=Finite(0, LONGEST_S, min_open=True), default=120.0, show_default=True,
    help="Seconds after which processes are given up.",
)  # fmt: skip
@click.option("--tolerance", "derived", is_flag=True, help="Say, too, what tolerances are derived from.")
@overlap_option
@untuned_option
@schedule_options
@layer_options
def check_command(
    file: str,
    processes: bool,
    interpret: bool,
    as_json: bool,
    timeout: float,
    derived: bool,
    overlap: bool,
    untuned: bool,
    **options: Any,
) -> None:
    """Compile, run every rank on this machine, and compare with a single-device float64 reference."""
    measured: Any = "quietly" if as_json and not untuned else not untuned
    if are_graphs([file]) or overlap:
        one = compile_one(file, overlap=overlap, measured=measured, **options)
        check_network_file(one, processes, interpret, as_json, timeout, derived)
        return
    all_compiled = compile_files([file], **options, measured=measured)
    for one in all_compiled:
        one.module()  # refuses a target without an emitter before torch is needed
    layer = all_compiled[0].layer
    need_device(layer.target, processes, interpret)
    from convgen.verify.fits import check_fits

    transport = "processes" if processes else "virtual"
    for one in all_compiled:
        try:
            check_fits(one, transport)
        except InputError as error:
            raise locate(error, one.layer.source) from None
    from convgen.verify.check import check as run_check
    from convgen.verify.processes import TooLate
    from convgen.verify.report import report_json, report_text

    try:
        with progress() as told:
            reports = [
                run_check(c, transport=transport, timeout_s=timeout, interpret=interpret, told=told)
                for c in all_compiled
            ]
    except TooLate as error:
        click.echo(f"{error}\nerror: the processes did not finish in {timeout:g} s", err=True)
        click.echo(
            "  try     --timeout with more seconds; where that does not help, one rank waits for another", err=True
        )
        raise SystemExit(1) from None
    if as_json:
        click.echo(json.dumps([report_json(c, r) for c, r in zip(all_compiled, reports, strict=True)], indent=1))
    else:
        click.echo("\n".join(report_text(c, r, derived=derived) for c, r in zip(all_compiled, reports, strict=True)))
    if not all(r.ok for r in reports):
        raise SystemExit(1)
