"""The kernels that the compiler takes from the databases: measured ones, or for want of one the nearest neighbour's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from convgen.errors import InputError
from convgen.kernels.choose import misfit
from convgen.kernels.config import Config, largest, parse_config
from convgen.kernels.families import family
from convgen.kernels.problem import Problem
from convgen.spec.target import Target
from convgen.tune.candidates import source_of
from convgen.tune.database import Ceilings, Database, Entry, read_database, shipped_folder, user_folder
from convgen.tune.device import Device, minor, this_cpu, this_gpu_name, versions, versions_text
from convgen.tune.key import key_of, problem_of
from convgen.tune.search import distance

NEAR = 3.0  # a neighbour may differ by so many doublings, over all extents together
How = Literal["measured", "neighbour", "default"]


@dataclass(frozen=True, slots=True)
class Found:
    """A problem's kernel, and its origin.

    Attributes:
        said: from which device and which neighbour it is, or why there is none.
        doubt: for a measured kernel, why it is not sure.
    """

    config: Config | None
    how: How
    said: str = ""
    doubt: str = ""


@dataclass
class Remembered:
    """The entries for a device, the user's before those that convgen ships.

    Attributes:
        device: None if none is known for the target.
        said: why there is no device.
        stale: by key, why an entry that was found is not used.
    """

    target: Target
    device: Device | None
    files: tuple[tuple[Path, Database], ...] = ()
    said: str = ""
    stale: dict[str, str] = field(default_factory=dict[str, str])
    _fresh: dict[str, tuple[Problem, Entry, Path] | None] = field(
        default_factory=dict[str, "tuple[Problem, Entry, Path] | None"]
    )

    def kernel(self, problems: Sequence[Problem]) -> Found:
        """The configuration for a step with these problems, one for each rank; None where the databases say nothing of
        it."""
        if self.device is None:
            return Found(None, "default", self.said)
        problem = largest(problems)
        if (found := self._entry(key_of(problem))) is not None:
            config = parse_config(found[1].kernel)
            if self._serves(config, problems) and self._fits(config, problems):
                return Found(config, "measured", self.device.name, found[1].doubt)
        near = self._nearest(problem, problems)
        return near or Found(None, "default", f"nothing like it was measured on {self.device.name}")

    @property
    def identity(self) -> str:
        """A text of everything on which the answers depend."""
        return repr((self.device, versions(self.target), [database for _, database in self.files]))

    def measured_s(self, problem: Problem) -> float | None:
        """Seconds of the fastest kernel of exactly this problem; None if it was not measured."""
        found = self._entry(key_of(problem))
        return None if found is None else found[1].ms / 1e3

    def entries(self, dtype: str) -> list[Entry]:
        """All entries of one dtype that can be used."""
        found = (self._entry(key) for key, problem in self._problems.items() if problem.dtype == dtype)
        return [one[1] for one in found if one is not None]

    def ceilings(self) -> Ceilings | None:
        """The best ceilings that were measured on the device."""
        best: Ceilings | None = None
        for _, database in self.files:
            if database.ceilings is not None:
                best = database.ceilings.best(best)
        return best

    @cached_property
    def _problems(self) -> dict[str, Problem]:
        """The problems of all entries, by key."""
        return {key: problem_of(key) for _, database in self.files for key in database.entries}

    def _entry(self, key: str) -> tuple[Problem, Entry, Path] | None:
        """The entry of a key that isn't stale, of the first file that has one."""
        if key not in self._fresh:
            self._fresh[key] = None
            for path, database in self.files:
                entry = database.entries.get(key)
                if entry is None:
                    continue
                problem = problem_of(key)
                if why := stale(entry, problem, self.target):
                    self.stale[key] = f"{path}: {why}"
                    continue
                self._fresh[key] = problem, entry, path
                break
        return self._fresh[key]

    def _serves(self, config: Config, problems: Sequence[Problem]) -> bool:
        made = family(config.family, self.target)
        return made is not None and all(made.refusal(p, self.target) is None for p in problems)

    def _fits(self, config: Config, problems: Sequence[Problem]) -> bool:
        """Whether a configuration of the rank with most to do is one for every rank."""
        made = family(config.family, self.target)
        example = None if made is None else made.default(largest(problems), self.target)
        return example is not None and misfit(config, example, problems, self.target) is None

    def _nearest(self, problem: Problem, problems: Sequence[Problem]) -> Found | None:
        """The kernel of the most similar measured problem, or the legal configuration of this problem that is nearest
        to it."""
        apart = ((_apart(other, problem), key) for key, other in self._problems.items() if _alike(other, problem))
        for _, key in sorted(pair for pair in apart if pair[0] <= NEAR):
            known = self._entry(key)
            if known is None or known[1].doubt:
                continue
            wanted = parse_config(known[1].kernel)
            made = family(wanted.family, self.target)
            if made is None or not self._serves(wanted, problems):
                continue
            legal = [c for c in made.configs(problem, self.target) if c.tile.keys() == wanted.tile.keys()]
            if legal:
                config = min(legal, key=lambda c: distance(c.as_dict(), wanted.as_dict()))
                if self._fits(config, problems):
                    return Found(config, "neighbour", key)
        return None


def stale(entry: Entry, problem: Problem, target: Target) -> str:
    """Why an entry can't be used: measured with other versions than are installed, or printed otherwise by now."""
    here = versions(target)
    other = {n: v for n, v in entry.versions.items() if n in here and minor(here[n]) != minor(v)}
    if other:
        return f"measured with {versions_text(other)}, here are {versions_text({n: here[n] for n in other})}"
    config = parse_config(entry.kernel)
    made = family(config.family, target)
    if made is None or made.refusal(problem, target) is not None:
        return f"{config.family} can't this problem any more"
    if why := misfit(config, made.default(problem, target), (problem,), target):
        return f"{entry.kernel} is no configuration of {config.family} any more: {why}"
    source = source_of(problem, config, target)
    return "" if source == entry.source else f"its kernel was printed as {entry.source}, now as {source}"


def _alike(a: Problem, b: Problem) -> bool:
    """Whether one problem's configuration can mean something for the other."""
    return (
        (a.phase, a.dtype, a.memory_format, len(a.dims), a.is_pointwise, a.groups > 1)
        == (b.phase, b.dtype, b.memory_format, len(b.dims), b.is_pointwise, b.groups > 1)
        and (a.channels == 1) == (b.channels == 1)
        and [d.stride > 1 for d in a.dims] == [d.stride > 1 for d in b.dims]
    )


def _apart(a: Problem, b: Problem) -> float:
    """The distance of two problems: doublings between pixels, channels, filters, taps, groups and parts."""
    pairs = (
        (a.pixels, b.pixels), (a.channels, b.channels), (a.filters, b.filters), (a.taps, b.taps), (a.groups, b.groups),
        (a.x_parts, b.x_parts), (a.y_parts, b.y_parts), ((a.rim or 0) + 1, (b.rim or 0) + 1),
    )  # fmt: skip
    return sum(abs(math.log2(m / n)) for m, n in pairs if m and n)


def remembered(wanted: Target) -> Remembered:
    """The entries for a target on the device for which it is compiled.

    Raises:
        InputError: a database is broken.
    """
    target = wanted.known()
    device, said = _find_device(target)
    if device is None:
        return Remembered(target, None, said=said)
    files: list[tuple[Path, Database]] = []
    for folder in (user_folder(), shipped_folder()):
        path = folder / device.file_name
        made = read_database(path)
        if made is not None:
            if (made.device, made.target) != (device.name, device.target):
                raise InputError(
                    f"{path} is of {made.device} ({made.target}), not of {device.name} ({device.target})",
                    hint="move it away, or give it its device's name",
                )
            files.append((path, made))
    return Remembered(target, device, tuple(files), "" if files else f"nothing was measured on {device.name}")


def device_for(target: Target) -> Device | None:
    """The device whose measurements a target is compiled with; None where none is known."""
    return _find_device(target)[0]


def _find_device(target: Target) -> tuple[Device | None, str]:
    """This machine's device; if it has none of the target's kind, the only one that was measured for the target; and
    why there is none."""
    if target.is_cpu:
        return this_cpu(), ""
    known: dict[str, Device] = {}
    for folder in (user_folder(), shipped_folder()):
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
            made = read_database(path)
            if made is not None and made.target == str(target):
                known.setdefault(made.device, Device(made.device, made.target))
    here = this_gpu_name()
    if here in known:
        return known[here], ""
    if len(known) == 1 and not here:
        return next(iter(known.values())), ""
    names = ", ".join(sorted(known))
    return None, f"nothing was measured for {target}" + (
        f" but on {names}, which this machine has not" if names else ""
    )
