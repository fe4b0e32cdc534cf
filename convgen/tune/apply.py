"""Puts measured kernels into what is compiled, with remarks on problems for which there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from convgen.kernels.choose import local_problems
from convgen.kernels.config import Config
from convgen.kernels.problem import Problem
from convgen.program.nodes import is_convolution
from convgen.spec.target import Target
from convgen.tune.lookup import Found, Remembered, remembered

if TYPE_CHECKING:
    from convgen.compiler import Compiled
    from convgen.network_compiler import CompiledNetwork


SHOWN = 3  # the most remarks of one kind


@dataclass(frozen=True, slots=True)
class Looked:
    """The kernel that was found for a phase of a layer, or of a network's row."""

    layer: str
    phase: str
    found: Found


def with_measured(compiled: Sequence[Compiled]) -> tuple[list[Compiled], list[str]]:
    """Layers whose phases name the kernels that were measured for them, or for their nearest neighbours.

    A phase that names one already keeps it. Ranks without work, and targets without a tuner, are passed over.

    Returns:
        The layers, and remarks on what was not found, or not used.
    Raises:
        InputError: a database is broken.
    """
    known: dict[Target, Remembered] = {}
    made: list[Compiled] = []
    looked: list[Looked] = []
    for one in compiled:
        target = one.layer.target
        if not target.has_families:
            made.append(one)
            continue
        if target not in known:
            known[target] = remembered(one.layer.known_target())
        memory = known[target]
        if memory.target.is_cpu and not memory.files:
            made.append(one)
            continue
        named = dict(one.layer.options.kernels)
        for _, step in one.schedule.steps():
            if is_convolution(step) and step.phase not in named:
                problems = local_problems(one.layer, one.schedule, one.space, step)
                if any(p.flops for p in problems):
                    found = memory.kernel([p for p in problems if p.flops] if target.is_cpu else problems)
                    looked.append(Looked(one.layer.name, step.phase, found))
                    if found.config is not None and str(found.config) != "aten":
                        named[step.phase] = str(found.config)
                    elif found.config is not None and one.layer.target.is_gpu:
                        named[step.phase] = "aten"
        options = replace(one.layer.options, kernels=tuple(named.items()))
        made.append(replace(one, layer=replace(one.layer, options=options)))
    return made, _remarks(looked, known)


def with_measured_networks(compiled: Sequence[CompiledNetwork]) -> tuple[list[CompiledNetwork], list[str]]:
    """Networks whose kernels on a GPU are those that were measured for them, or for their nearest neighbours.

    A kernel with steps behind its sum has the configuration of the sum.

    Returns:
        The networks, and remarks on what was not found, or not used.
    Raises:
        InputError: a database is broken.
    """
    known: dict[Target, Remembered] = {}
    made: list[CompiledNetwork] = []
    looked: list[Looked] = []
    for one in compiled:
        measured: dict[tuple[Problem, ...], Config] = {}
        for file in one.kernels:
            if (memory := known.get(one.target)) is None:
                memory = known[one.target] = remembered(one.target)
            for problems in file.problems:
                found = memory.kernel(problems)
                uses = [row for row, phase in file.uses if phase == problems[0].phase]
                looked += [Looked(uses[0], problems[0].phase, found)] if uses else []
                measured |= {problems: found.config} if found.config is not None else {}
        made.append(replace(one, measured=measured) if measured else one)
    return made, _remarks(looked, known)


def _remarks(looked: Sequence[Looked], known: dict[Target, Remembered]) -> list[str]:
    """The remarks: a line on problems that weren't measured, and a line each for a few stale entries. None for a CPU
    that was never tuned."""
    lines: list[str] = []
    for memory in known.values():
        stale = list(memory.stale.items())
        lines += [f"stale, not used: {key}: {why}" for key, why in stale[:SHOWN]]
        lines += [f"... and {len(stale) - SHOWN} more stale entries; convgen tune measures them again"] * (
            len(stale) > SHOWN
        )
    doubtful = [f"{one.layer}.{one.phase} ({one.found.doubt})" for one in looked if one.found.doubt]
    if doubtful:
        names = ", ".join(doubtful[:SHOWN]) + (", ..." if len(doubtful) > SHOWN else "")
        lines.append(f"local kernels in doubt: {len(doubtful)} of {len(looked)}: {names}; convgen tune measures again")
    counts = Counter(one.found.how for one in looked)
    if not (counts["default"] or counts["neighbour"]):
        return lines
    words = [f"{counts['measured']} of {len(looked)} measured"]
    words += [f"{counts['neighbour']} like their nearest neighbour"] if counts["neighbour"] else []
    if counts["default"]:
        reasons = Counter(one.found.said for one in looked if one.found.how == "default")
        words.append(f"{counts['default']} by default ({reasons.most_common(1)[0][0]})")
    open_ = [f"{one.layer}.{one.phase}" for one in looked if one.found.how != "measured"]
    names = ", ".join(open_[:SHOWN]) + (", ..." if len(open_) > SHOWN else "")
    return [*lines, f"local kernels: {', '.join(words)}; not measured: {names}; convgen tune measures them"]
