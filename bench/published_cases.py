"""The convolutions that PyTorch and ONNX publish to test with, by every family of kernels.

    python bench/published_cases.py [--seconds 120] [--problems N] [--seed 0] [--only onnx|opinfo]
    pip install --target build/onnx --no-deps onnx protobuf ml_dtypes
    PYTHONPATH=build/onnx python bench/published_cases.py --seconds 7200     # ONNX's, too

OpInfo's samples of conv1d to conv3d and conv_transpose1d to conv_transpose3d, and the test cases of ONNX's backends
that are one Conv or one ConvTranspose. Each is a local problem in three phases, a transposed convolution the one whose
gradient of x it is; in both memory formats (1-D has one), in float32, tfloat32, bfloat16 and float64. Every family that
takes it runs in Triton's interpreter with its default configuration and two others by chance, twice: a run. It is
wrong if the two differ, if something is written beside the result, or if the result is farther from float64's than
rounding explains; where the operands are published in the type, farther from the published one, too. Operands lie
between NaN.

All cases and families have their turn before one has its next; problems that take the interpreter minutes come last,
with their default configurations alone. The exit status says whether a run was wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from published_convolutions import SOURCES, Case, MissingError, Tallies, problems, run_all

SHOWN = 5  # wrong runs in full


def table(tallies: Tallies) -> Iterator[str]:
    yield "source  family      cases    runs  wrong"
    for (source, family), tally in sorted(tallies.items()):
        yield f"{source:6}  {family:10} {len(tally.cases):6} {tally.runs:7} {len(tally.wrong):6}"


@click.command(help=__doc__)
@click.option("--seconds", type=float, default=120.0, show_default=True, help="Of runs, after the cases are read.")
@click.option("--problems", "most", type=int, help="At most; a case has about forty.")
@click.option("--seed", default=0, show_default=True, help="Of OpInfo's values, the order and the configurations.")
@click.option("--only", type=click.Choice(list(SOURCES)))
def main(seconds: float, most: int | None, seed: int, only: str | None) -> None:
    cases: list[Case] = []
    for source in [only] if only else SOURCES:
        try:
            cases += SOURCES[source](seed)
        except MissingError as error:
            if only:
                raise
            click.echo(f"{error.message}; its cases are left out", err=True)
    every = problems(cases, seed)
    tallies, ran = run_all(every[:most], seed, seconds)
    click.echo(f"torch {torch.__version__}, triton {triton.__version__}, seed {seed}: {ran} of {len(every)} problems")
    click.echo("\n".join(table(tallies)))
    wrong = [text for tally in tallies.values() for text in tally.wrong]
    click.echo("".join(f"{text}\n" for text in wrong[:SHOWN]), nl=False)
    names = {(source, name) for (source, _), tally in tallies.items() for name in tally.cases}
    click.echo(f"{len(names)} cases, {sum(t.runs for t in tallies.values())} runs, {len(wrong)} wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
