"""The programs that an SW26010's CPEs run for a layer, and what each counts."""

from __future__ import annotations

from typing import Any

from convgen.compiler import Compiled
from convgen.spec.text import aligned
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.target.programs import CpeProgram, local_programs

EVENTS = ("putr", "putc", "getr", "getc", "vmad", "vadd", "convert", "shuffle")


def mesh_kernels_json(compiled: Compiled) -> list[dict[str, Any]]:
    """A record for each program that some rank's CPEs run, in one call. It has the keys of GPUs' records where a mesh
    has the same thing."""
    return [_record(compiled, *found) for found in _found(compiled)]


def _found(compiled: Compiled) -> list[tuple[str, tuple[int, ...], CpeProgram]]:
    return [
        (phase, ranks, program)
        for phase, plans in compiled.mesh_plans().items()
        for ranks, plan in plans
        for program in local_programs(plan)
    ]


def _record(compiled: Compiled, phase: str, ranks: tuple[int, ...], program: CpeProgram) -> dict[str, Any]:
    counts: Counts = program.counts
    return {
        "layer": compiled.layer.name,
        "name": program.name,
        "phase": phase,
        "family": program.name.removeprefix(f"{phase}_"),
        "config": program.config,
        "registers": program.registers,
        "shared_bytes": program.ldm_bytes,
        "widest_global_load_bytes": max(counts.get, default=0),
        "runs": program.runs,
        **{name: getattr(counts, name) for name in EVENTS},
        "issued_flops": counts.issued_flops,
        "cycles_per_run": counts.cycles // program.runs,
        "get_bytes_by_block": {str(b): counts.get[b] for b in sorted(counts.get)},
        "put_bytes_by_block": {str(b): counts.put[b] for b in sorted(counts.put)},
        "get_operations": counts.get_ops,
        "put_operations": counts.put_ops,
        "ranks": list(ranks),
    }


def mesh_kernels_text(compiled: Compiled) -> str:
    """The programs, below a table of what they count; a program that several ranks share is printed once."""
    found = _found(compiled)
    head = ("program", "runs", "LDM B", "messages", "DMA B", "vmad", "cycles/run", "ranks")
    rows = [
        (p.name, p.runs, p.ldm_bytes, p.counts.messages, p.counts.dma_bytes, p.counts.vmad, p.counts.cycles // p.runs,
         " ".join(map(str, ranks)))
        for _, ranks, p in found
    ]  # fmt: skip
    shown = [tuple(f"{cell:,}" if isinstance(cell, int) else cell for cell in row) for row in (head, *rows)]
    lines = [f"# {compiled.layer.name} for sw26010: the programs of one CPE, and their events on a rank in one call"]
    lines += aligned(shown, range(1, 7), "# ")
    texts: dict[str, str] = {}
    for _, _, program in found:
        names = texts.get(program.text, "")
        if program.name not in names.split(", "):
            texts[program.text] = f"{names}, {program.name}" if names else program.name
    blocks = [f"\n# ---- {name} {'-' * max(4, 112 - len(name))}\n{text.rstrip()}" for text, name in texts.items()]
    return "\n".join([*lines, *blocks])
