"""Every kernel that the layers of networks launch four ways: what its loop compiles to, and what bounds its time.

    python bench/kernel_bounds.py ROWS.jsonl.gz              # compile and count; goes on where the file ends
    python bench/kernel_bounds.py ROWS.jsonl.gz --table      # what was counted, by network, split and phase
    python bench/kernel_bounds.py ROWS.jsonl.gz --short 0.8  # launches that reach less of their ideal time, and why
    python bench/kernel_bounds.py ROWS.jsonl.gz --why        # how many reach what is asked, and what the others lack
    python bench/kernel_bounds.py ROWS.jsonl.gz --beside     # what launches side by side could save at most
    python bench/kernel_bounds.py ROWS.jsonl.gz --waits      # loops that wait for all of their matrix instructions

No GPU: kernels are compiled for sm_90, and nothing is timed. `units` is the share of the matrix units' peak that a step
of the loop allows by its instructions, and with shared memory; `ideal` the least time of the problem (its products, its
bytes, or a launch; tuning/machines/cuda.yaml) over the least time of the launch.

Asked of `ideal`: 0.9; of halos and TF32 0.8, float32 0.7, few channels (under 16) and channels not last 0.5. What a
launch lacks most: `launches` before and behind it take more than its loop loses, or `adding` what programs that share a
tile have summed; of the loop, `shared` memory, `issue`, or `waits` for all matrix instructions keep their units idle,
`edges` of tiles and zeros are multiplied for nothing, or programs are too few or uneven for the processors' `waves`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click
from rows import add, packed, rows_of

from convgen.compiler import compile_layer
from convgen.errors import ConvgenError
from convgen.kernels.config import largest
from convgen.kernels.facts import bound, facts, launches
from convgen.kernels.source import Kernel
from convgen.resources import data_file
from convgen.spec.layer import Layer
from convgen.spec.reader import read_csv
from convgen.spec.target import read_target

NETWORKS = ("resnet50", "resnet50_v15", "vgg16", "wrn50_2", "wrn50_4", "alexnet", "mesh1k_assumed", "mesh2k_assumed")
GRIDS = {"C": "stationary-x", "F": "stationary-y", "H": "spatial", "N": "sample"}
WAYS = 4
PHASES = ("forward", "backward_data", "backward_filter")
REASONS = ("launches", "adding", "shared", "issue", "waits", "edges", "waves")
FEW = 16  # channels of a group
PROCESSORS = read_target("cuda:sm_90").processors


def kernels_of(network: str, split: str, dtype: str, memory_format: str) -> Iterator[tuple[str, Kernel]]:
    """A layer's name and each kernel of its module, for layers that four ranks can share this way."""
    grid, algorithm = {split: WAYS}, GRIDS[split]
    path = data_file("tuning", "layers", f"{network}.csv")
    target = read_target("cuda:sm_90").known()
    for read in read_csv(path, grid=grid, algorithm=algorithm, dtype=dtype):
        layer: Layer = replace(read, memory_format=memory_format, target=target)  # type: ignore[arg-type]
        conv = layer.conv
        if {"C": conv.channels, "F": conv.filters, "N": conv.batch, "H": conv.spatial[0].out}[split] < WAYS:
            continue
        try:
            found = compile_layer(layer).kernels()
        except ConvgenError as error:
            click.echo(f"{network}.{layer.name} {split}: {error}", err=True)
            continue
        for kernel in found:
            yield layer.name, kernel


def count(network: str, layer: str, split: str, kernel: Kernel) -> dict[str, Any] | None:
    """A row of the rank with most to do; None where ATen or plain products convolve."""
    p = largest(kernel.problems)
    launched = launches(kernel, p)
    if not launched:
        return None
    (main,) = [one for one in launched if one.name == kernel.name]
    found = facts(main, kernel.target, loops=True)
    b = bound(kernel, p, main, found)
    row = {
        "network": network, "layer": layer, "split": split, "phase": p.phase, "dtype": p.dtype,
        "format": p.memory_format, "kernel": str(kernel.config), "taps": p.taps, "channels": p.channels,
        "registers": found.registers, "spilled": found.spill_bytes,
    }  # fmt: skip
    if b is None or found.loop is None:
        return row
    return row | {
        "instructions": found.loop.instructions, "exposed": found.loop.exposed,
        "narrowest": found.loop.narrowest_copy, "programs": b.programs, "waves": b.waves, "steps": b.steps,
        "issue_share": round(b.share_by_issue, 3), "share": round(b.share, 3), "limit": b.limit,
        "useful": round(b.useful, 3), "us": round(b.us, 2), "ideal_us": round(b.ideal_us, 2),
        "around_us": round(b.times_us["around"], 2), "adding_us": round(b.times_us["adding"], 2),
    }  # fmt: skip


def name_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[n] for n in ("network", "layer", "split", "phase", "dtype", "format"))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines by network, split and phase: median and worst shares, mean and worst of the ideal time."""
    yield "network        split phase            kernels  units by issue   with shared   ideal: mean  worst (of)"
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "share" in row:
            groups[row["network"], row["split"], row["phase"]].append(row)
    for (network, split, phase), found in sorted(
        groups.items(), key=lambda g: (g[0][0], g[0][1], PHASES.index(g[0][2]))
    ):
        ideal = [ideal_of(r) for r in found]
        worst = min(range(len(found)), key=lambda i: ideal[i])
        mean = math.exp(sum(map(math.log, ideal)) / len(ideal))
        issue, share = ([r[n] for r in found] for n in ("issue_share", "share"))
        yield (
            f"{network:14} {split:5} {phase:15} {len(found):8}   {middle(issue):5.2f} ({min(issue):.2f})"
            f"  {middle(share):5.2f} ({min(share):.2f})  {mean:8.2f}  {ideal[worst]:10.2f} {found[worst]['layer']}"
        )


def ideal_of(row: dict[str, Any]) -> float:
    return min(1.0, row["ideal_us"] / row["us"])


def asked(row: dict[str, Any]) -> float:
    """Of the ideal, at least."""
    if row["format"] != "channels_last" or row["channels"] < FEW:
        return 0.5
    if row["dtype"] != "bfloat16":
        return {"tfloat32": 0.8, "float32": 0.7}[row["dtype"]]
    return 0.8 if row["split"] == "H" and row["taps"] > 1 else 0.9


def lacks(row: dict[str, Any]) -> str:
    """What a launch that reaches less than is asked lacks most, a word of REASONS."""
    around, adding = row["around_us"], row["adding_us"]
    if max(around, adding) > row["us"] - around - adding - row["ideal_us"]:
        return "launches" if around >= adding else "adding"
    factors = {
        row["limit"]: 1 / row["share"],
        "edges": 1 / row["useful"],
        "waves": row["waves"] * PROCESSORS / row["programs"],
    }
    return max(factors, key=lambda n: factors[n])


def why(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines by network, type and phase: how many launches reach what is asked, and what the others lack."""
    yield f"network        dtype     phase            kernels  reach it   {'  '.join(f'{n:>8}' for n in REASONS)}"
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "share" in row:
            words = row["dtype"] if row["format"] == "channels_last" else row["format"]
            groups[row["network"], words, row["phase"]].append(row)
    ordered = sorted(groups.items(), key=lambda g: (g[0][0], g[0][1], PHASES.index(g[0][2])))
    if len({network for (network, *_), _ in ordered}) > 1:
        ordered.append((("all", "", ""), [r for _, found in ordered for r in found]))
    for (network, words, phase), found in ordered:
        short = Counter(lacks(r) for r in found if ideal_of(r) < asked(r))
        counts = "  ".join(f"{short[n] or '':>8}" for n in REASONS)
        yield f"{network:14} {words:10} {phase:15} {len(found):7}  {len(found) - short.total():8}   {counts}".rstrip()


def waits(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines by family and phase: loops of several steps, those that wait for all of their matrix instructions, the most
    instructions that are issued then, and launches that this bounds."""
    yield "family    phase            loops  wait for all  most exposed  bound by it"
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("steps", 0) > 1 and "exposed" in row:
            groups[row["kernel"].split()[0], row["phase"]].append(row)
    for (family, phase), found in sorted(groups.items(), key=lambda g: (g[0][0], PHASES.index(g[0][1]))):
        serial = [r["exposed"] for r in found if r["exposed"]]
        bound_by = sum(r["limit"] == "waits" for r in found)
        counts = f"{len(found):6} {len(serial):13} {max(serial, default=0):13} {bound_by:12}"
        yield f"{family:9} {phase:15} {counts}"


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def beside(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Pairs of launches of which one has fewer programs than there are processors, and neither reads what the other
    makes: side by side they take as long as the longer one, or as their programs on all processors, at the least."""
    yield "network        split kernels     us  smaller than the GPU    dx, dw: saved at most   branches: saved at most"
    groups: dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if "share" in row:
            groups[row["network"], row["split"]][row["layer"], row["phase"]] = row
    for (network, split), of in sorted(groups.items()):
        pairs: dict[str, list[tuple[Any, Any]]] = {"gradients": [], "branches": []}
        for (layer, phase), row in of.items():
            other = of.get((layer, "backward_filter")) if phase == "backward_data" else None
            pairs["gradients"] += [(row, other)] if other else []
            other = of.get((layer.replace("branch1", "branch2a"), phase)) if layer.endswith("branch1") else None
            pairs["branches"] += [(row, other)] if other else []
        whole, small = sum(r["us"] for r in of.values()), [r for r in of.values() if r["programs"] < PROCESSORS]
        words = [
            f"{network:14} {split:5} {len(of):7} {whole:6.0f}  {len(small):3}, {sum(r['us'] for r in small):5.0f} us"
        ]
        for found in pairs.values():
            few = [pair for pair in found if min(r["programs"] for r in pair) < PROCESSORS]
            gain = sum(map(gained, few))
            words.append(f"{len(few):10} pairs, {gain:3.0f} us, {gain / whole:4.1%}")
        yield "  ".join(words)


def gained(pair: tuple[dict[str, Any], dict[str, Any]]) -> float:
    """Microseconds, of the launches without those before and behind them."""
    own = [r["us"] - r["around_us"] for r in pair]
    spread = sum(t * min(1.0, r["programs"] / PROCESSORS) for t, r in zip(own, pair, strict=True))
    return sum(own) - max(*own, spread)


@click.command(help=__doc__)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--networks", default=",".join(NETWORKS))
@click.option("--splits", default=",".join(GRIDS))
@click.option("--dtypes", default="bfloat16")
@click.option("--formats", default="channels_last")
@click.option("--table", "as_table", is_flag=True)
@click.option("--why", "as_why", is_flag=True)
@click.option("--beside", "as_pairs", is_flag=True)
@click.option("--waits", "as_waits", is_flag=True)
@click.option("--short", type=float)
def main(
    path: Path,
    networks: str,
    splits: str,
    dtypes: str,
    formats: str,
    as_table: bool,
    as_why: bool,
    as_pairs: bool,
    as_waits: bool,
    short: float | None,
) -> None:
    rows = rows_of(path)
    wanted = [r for r in rows if r["dtype"] in dtypes.split(",") and r["format"] in formats.split(",")]
    wanted = [r for r in wanted if r["network"] in networks.split(",") and r["split"] in splits.split(",")]
    if as_table:
        click.echo("\n".join(table(wanted)))
    if as_why:
        click.echo("\n".join(why(wanted)))
    if as_pairs:
        click.echo("\n".join(beside(wanted)))
    if as_waits:
        click.echo("\n".join(waits(wanted)))
    if short is not None:
        for r in sorted((r for r in wanted if "us" in r and ideal_of(r) < short), key=ideal_of):
            words = (*name_of(r)[:4], f"{ideal_of(r):.2f}", f"share {r['share']}", lacks(r), r["kernel"])
            click.echo("  ".join(map(str, words)))
    if as_table or as_why or as_pairs or as_waits or short is not None:
        return
    done = {name_of(r) for r in rows}
    alike: dict[Any, dict[str, Any] | None] = {}  # by problem and configuration: layers of a network are often alike
    for dtype, memory_format, network, split in product(*(w.split(",") for w in (dtypes, formats, networks, splits))):
        for layer, kernel in kernels_of(network, split, dtype, memory_format):
            if (network, layer, split, kernel.problem.phase, dtype, memory_format) in done:
                continue
            key = largest(kernel.problems), kernel.config
            if key not in alike:
                alike[key] = count(network, layer, split, kernel)
            if (row := alike[key]) is not None:
                add(path, row | {"network": network, "layer": layer, "split": split})
    packed(path)


if __name__ == "__main__":
    main()
