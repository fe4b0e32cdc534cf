"""Whether a layer is dearer with --overlap, by the models' own prices: as a network of one row, with what travels
meanwhile, beside the same network step after step, and beside the layer's own schedule.

    python bench/overlap_prices.py [--layers 200] [--seed 0] [--machine lassen] [--target cuda:sm_90]

Exits with 1 where one is. tests/test_overlap_prices.py has some of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import click

from convgen.commands.one_row import compile_one_rows
from convgen.compiler import compile_layer
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.cost.timeline import simulate
from convgen.network_compiler import CompiledNetwork
from convgen.spec.layer import Distribution
from convgen.spec.reader import layer_from_dict, layer_to_dict

ALIKE = 1e-9  # of a step, which sums of seconds are off by
WAYS: tuple[tuple[str, dict[str, int]], ...] = (
    ("auto", {"a": 2}), ("auto", {"a": 3}), ("auto", {"a": 4, "b": 2}), ("auto", {"a": 2, "b": 2, "c": 2}),
    ("spatial", {"H": 2, "W": 2}), ("spatial", {"N": 2, "H": 4}), ("stationary-x", {"N": 2, "C": 2}),
    ("stationary-y", {"N": 2, "F": 4}),
)  # fmt: skip


def drawn_to_price(draw: Random) -> dict[str, Any]:
    """A layer's file, of `algorithm: auto` or of a named one, whose layouts move more."""
    named = draw.choice(WAYS)
    k = draw.choice((1, 3, 5))
    return {
        "name": "drawn", "layer": "conv2d", "algorithm": named[0], "out_channels": draw.choice((4, 16, 64)),
        "input": [draw.choice((1, 2, 4, 8)), draw.choice((4, 16, 64)), *draw.choices((8, 15, 32, 256), k=2)],
        "kernel_size": k, "padding": k // 2, "stride": draw.choice((1, 1, 2)),
        "groups": draw.choice((1, 1, 1, 2)) if named[0] == "auto" else 1,
        "bias": draw.random() < 0.3,
        "grid": named[1],
    }  # fmt: skip


def step_seconds(
    said: dict[str, Any], machine: Machine, folder: Path, target: str | None = None
) -> tuple[float, float, float]:
    """Seconds of a step as --overlap has it, of the same network step after step, and of the layer's schedule, on the
    layouts and roles of its module.

    Args:
        target: of the network; by default the layer's.
    """
    made = compile_layer(layer_from_dict(said), machine=machine)
    stored = {tensor: layout.axes for tensor, layout in made.choice.stored.items()}
    roles = tuple((p, tuple((a, i) for i, axes in r.nests for a in axes)) for p, r in made.choice.roles.items())
    layer = replace(made.layer, algorithm=None, distribution=Distribution(**stored), roles=roles)
    file = folder / "layer.yaml"
    file.write_text(json.dumps(layer_to_dict(layer)))
    none: dict[str, Any] = {"grid": None, "algorithm": None, "dtype": None}
    (one,) = compile_one_rows([str(file)], machine=machine.name, target=target, **none)
    network = one.compiled
    assert isinstance(network, CompiledNetwork)
    timelines = (simulate(p, machine, network.dtype, of_inputs=True) for p in (network.program, network.plain))
    overlapped, plain = timelines
    schedule = schedule_cost(made.schedule, Model(made.space, machine, layer.dtype)).total().seconds
    return overlapped.end_s, plain.end_s, schedule


@click.command(help=__doc__.split("\n\n    ")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--layers", default=200, show_default=True, help="That are drawn.")
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
@click.option("--machine", default="lassen", show_default=True, help="That prices are of.")
@click.option("--target", help="Of the networks, instead of the layers'.")
def main(layers: int, seed: int, machine: str, target: str | None) -> None:
    """Print how many are dearer, and by how much at most."""
    on = load_machine(machine)
    ratios: dict[str, list[tuple[float, bool]]] = {"the same network without": [], "its schedule": []}
    with TemporaryDirectory() as folder:
        for number in range(layers):
            said = drawn_to_price(Random(f"overlap prices {seed} {number}"))
            overlapped, plain, schedule = step_seconds(said, on, Path(folder), target)
            for name, other in zip(ratios, (plain, schedule), strict=True):
                ratios[name].append((overlapped / other, said["bias"]))
    dearer: list[int] = []
    for name, found in ratios.items():
        more = [(ratio, bias) for ratio, bias in found if ratio > 1 + ALIKE]
        dearer.append(len(more))
        print(
            f"dearer than {name}: {len(more)} of {layers} layers on {machine}, {sum(bias for _, bias in more)} of them "
            f"with a bias; worst ratio {max(ratio for ratio, _ in found):.4f}"
        )
    sys.exit(any(dearer))


if __name__ == "__main__":
    main()
