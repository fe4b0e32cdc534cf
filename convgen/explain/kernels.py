"""Local kernels of a layer, or of a network for a GPU: their sources, and what each compiles to for its target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from convgen.compiler import Compiled
from convgen.cost.traffic import elements_summed
from convgen.emit.local import copied_tensors, copy_dims, summed_steps
from convgen.kernels.add import add_arguments, add_module, moved_bytes
from convgen.kernels.config import ceil_div
from convgen.kernels.estimate import data_sheet
from convgen.kernels.facts import Launch, facts, records
from convgen.kernels.load import load_text
from convgen.kernels.pack import copy_launches, copy_module
from convgen.kernels.source import kernel_module
from convgen.spec.target import Target

if TYPE_CHECKING:
    from convgen.kernels.of_rows import ConvolutionFile
    from convgen.network_compiler import CompiledNetwork

FIELDS = ("registers", "spill_bytes", "shared_bytes", "matrix_instructions", "widest_global_load_bytes")

BOUND = "  loop: instructions  matrix units at most  by        programs  waves  us at least"


def _bound(r: dict[str, Any]) -> str:
    """The text of a record's loop, and of the bound on its launch's time that follows from it."""
    loop, b = r.get("loop"), r.get("bound")
    if b is None:
        return ""
    if loop is None:  # a sum has no loop of products
        limit = "memory" if b["memory_us"] > b["floor_us"] else "launch"
        return f"  {'':>18}  {'':>20}  {limit:<8}  {b['programs']:>8}  {b['waves']:>5}  {b['us']:>11.1f}"
    share = f"{b['share']:>20.0%}  {b['limit']:<8}"
    return f"  {loop['instructions']:>18}  {share}  {b['programs']:>8}  {b['waves']:>5}  {b['us']:>11.1f}"


def kernels_json(compiled: Compiled) -> list[dict[str, Any]]:
    """A record for each kernel that the layer's ranks launch; ordered sums and packing and unpacking kernels last."""
    layer = compiled.layer
    found = list(records(layer.name, compiled.kernels()))
    target = layer.known_target()
    found += _sums(compiled, target)
    ranks = {copy_dims(t, len(layer.conv.spatial)) for t in copied_tensors(compiled.schedule)}
    for dims in sorted(ranks):
        module = load_text(copy_module(dims))
        for phase, args, constants in copy_launches(dims, layer.dtype):
            launch = Launch(module.kernel, (1, 1, 1), args, constants)
            config = {n: v for n, v in constants.items() if n != "UNPACK"}
            head = {"layer": layer.name, "name": launch.name, "phase": phase, "family": "copy", "config": config}
            found.append(head | facts(launch, target).as_dict() | {"ranks": list(range(layer.grid.ranks))})
    return found


def _sums(compiled: Compiled, target: Target) -> Iterator[dict[str, Any]]:
    """A record for each step whose addends a rank adds itself; equal ranks share one."""
    layer, grid = compiled.layer, compiled.layer.grid
    kernel = load_text(add_module(layer.dtype)).kernel
    device = data_sheet(target, layer.dtype)
    types = compiled.schedule.types()
    for phase, step in summed_steps(compiled.schedule, layer.options.sums, layer.dtype):
        counts = elements_summed(compiled.space, step.kind, step.over, types[step.source], step.type)
        ranks: dict[int, list[int]] = {}
        for rank, elements in enumerate(counts.tolist()):
            ranks.setdefault(elements, []).append(rank)
        for elements, alike in ranks.items():
            if not elements:
                continue
            pieces = grid.over(step.over)
            args, constants = add_arguments(elements, pieces, layer.dtype)
            programs, moved = ceil_div(elements, constants["BLOCK"]), moved_bytes(elements, pieces, layer.element_bytes)
            memory, floor = moved / device.bytes_per_s * 1e6, device.floor_s * 1e6
            launch = Launch(kernel, (programs, 1, 1), args, constants)
            yield {
                "layer": layer.name,
                "name": launch.name,
                "phase": phase,
                "family": "sum",
                "step": step.result,
                "config": constants,
                **facts(launch, target).as_dict(),
                "bound": {
                    "programs": programs,
                    "waves": ceil_div(programs, target.processors),
                    "moved_bytes": moved,
                    "memory_us": memory,
                    "floor_us": floor,
                    "us": max(memory, floor),
                },
                "ranks": alike,
            }


def kernels_text(compiled: Compiled) -> str:
    """The source of the convolution kernels, below a table of what they compile to."""
    head = f"{compiled.layer.name} for {compiled.layer.target.text}"
    return "\n".join(_table(head, kernels_json(compiled))) + "\n" + kernel_module(compiled.kernels())


def network_kernels_json(compiled: CompiledNetwork) -> list[dict[str, Any]]:
    """A record for each kernel of a network's files, with the rows that run it."""
    name = compiled.graph.name
    return [{"network": name} | record for file in compiled.kernels for record in _records_of(file)]


def _records_of(file: ConvolutionFile) -> Iterator[dict[str, Any]]:
    for record in records(file.name, file.kernels):
        del record["ranks"]
        yield record | {"rows": [row for row, phase in file.uses if phase == record["phase"]]}


def network_kernels_text(compiled: CompiledNetwork) -> str:
    """The source of each file of kernels, below a table of what they compile to, and which rows run them."""
    texts: list[str] = []
    for file in compiled.kernels:
        own = list(_records_of(file))
        lines = _table(f"{compiled.graph.name}/{file.name}.py for {compiled.target.text}", own)
        runs = {r["phase"]: f"#   {r['phase']}: {', '.join(r['rows'])}" for r in own if r["rows"]}
        texts.append("\n".join([*lines, *runs.values()]) + f"\n{kernel_module(file.kernels)}")
    return "\n".join(texts)


def _table(head: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of what kernels compile to, as comments."""
    width = max(len(r["name"]) for r in rows)
    lines = [f"# {head}"]
    lines.append(f"# {'kernel':<{width}}  registers  spilled  shared  matrix instructions  widest load{BOUND}")
    for r in rows:
        columns = zip(FIELDS, (9, 7, 6, 19, 11), strict=True)
        facts = "  ".join(f"{r[field]:>{wide}}" for field, wide in columns)
        lines.append(f"# {r['name']:<{width}}  {facts}{_bound(r)}".rstrip())
    return lines
