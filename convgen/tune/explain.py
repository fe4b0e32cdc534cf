"""Why a problem has its kernel: its bound, the runners-up, what each parameter was worth, and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from convgen.errors import InputError
from convgen.kernels.choose import describe
from convgen.kernels.config import Config, parse_config
from convgen.spec.names import did_you_mean
from convgen.spec.target import Target
from convgen.tune.candidates import candidates, ranked
from convgen.tune.database import Ceilings, Entry, read_database, shipped_folder, user_folder
from convgen.tune.device import Device, versions, versions_text
from convgen.tune.lookup import stale
from convgen.tune.model import assumed_ceilings, bounds_us
from convgen.tune.report import causes_text, rate_text, time_text
from convgen.tune.trials import Trial, read_trials, trials_path
from convgen.tune.wanted import Wanted

RUNNERS_UP = 6


def pick(wanted: Sequence[Wanted], name: str) -> Wanted:
    """The problem of a phase, of LAYER.PHASE, or with this key.

    Raises:
        InputError: there is none, or several.
    """
    found = [w for w in wanted if name == w.key or any(name in (str(u), u.phase) for u in w.uses)]
    if len(found) == 1:
        return found[0]
    known = [str(u) for w in wanted for u in w.uses]
    if found:
        raise InputError(f"--explain {name}: {len(found)} problems", hint=f"one of {', '.join(known[:6])}")
    raise InputError(
        f"--explain {name}: there is none", hint=did_you_mean(name, known, f"one of {', '.join(known[:6])}")
    )


def explain_text(one: Wanted, target: Target, device: Device | None, folder: Path | None) -> str:
    """The explanation, in several lines. Nothing is measured for it.

    Args:
        folder: the database's; by default the user's, then convgen's own.
    """
    p = one.problem
    lines = [f"{one}: {describe(p)}", f"  key       {one.key}"]
    entry, ceilings, path = _entry(one.key, device, folder)
    known = ceilings or assumed_ceilings(target)
    bounds = bounds_us(p, known)
    bound = max(bounds, key=lambda b: bounds[b])
    texts = ", ".join(f"{name} {us:.3g} us" for name, us in bounds.items())
    origin = "measured ceilings" if ceilings else "data sheet, not measured"
    lines.append(f"  bounds    {texts}: {bound} ({origin})")
    order = ranked(candidates(p, target), known)
    rank = {c.label: i + 1 for i, (_, c) in enumerate(order)}
    modelled = {c.label: us for us, c in order}
    if entry is None or device is None:
        lines.append(f"  kernel    not measured{f' on {device.name}' if device else ''}; convgen tune measures it")
        lines += [f"  model     {i}. {c.label}  {us:.1f} us, not measured" for i, (us, c) in enumerate(order[:3], 1)]
        return "\n".join(lines)
    lines.append(
        f"  kernel    {entry.kernel}  {time_text(entry.ms)} ({time_text(entry.p20)} to {time_text(entry.p80)})"
    )
    lines.append(
        f"            {rate_text(one, entry)}, {entry.share:.0%} of what {entry.bound} allows; on {device.name}"
    )
    if why := stale(entry, p, target):
        lines.append(f"  stale     {why}")
    lines.append(f"  why       {_why(entry)}")
    lines += _surely(entry)
    if entry.kernel in rank:
        lines.append(f"  model     ranked it {rank[entry.kernel]} of {len(order)}, {modelled[entry.kernel]:.1f} us")
    lines.append(
        f"  search    {entry.effort}: {entry.tried} of {entry.of} legal configurations; {versions_text(entry.versions)}"
    )
    lines.append(f"  error     {entry.error:.2g} of the largest |result|, against float64")
    lines.append(f'  kept in   {path}; to pin it: options: {{kernels: {{{p.phase}: "{entry.kernel}"}}}}')
    trials = _trials(one.key, device, target)
    return "\n".join([*lines, *_runners_up(entry, trials, rank), *_parameters(entry, trials), *_failures(trials)])


def _entry(key: str, device: Device | None, folder: Path | None) -> tuple[Entry | None, Ceilings | None, Path | None]:
    if device is None:
        return None, None, None
    ceilings: Ceilings | None = None
    for place in [folder] if folder is not None else [user_folder(), shipped_folder()]:
        path = place / device.file_name
        made = read_database(path)
        if made is not None:
            ceilings = ceilings or made.ceilings
            if key in made.entries:
                return made.entries[key], made.ceilings, path
    return None, ceilings, None


def _why(entry: Entry) -> str:
    if entry.aten_ms is None:
        return "ATen has no way to this problem; it was the fastest"
    if entry.kernel.split()[0] == "aten":
        return "nothing that was tried beat ATen beyond noise"
    return f"{entry.aten_ms / entry.ms:.2f} times as fast as ATen ({time_text(entry.aten_ms)}), in turn with it"


def _surely(entry: Entry) -> list[str]:
    """The lines of intervals, and of the doubt."""
    found: list[str] = []
    who = "the best kernel" if entry.kernel.split()[0] == "aten" else "it"
    if entry.gain is not None:
        median, low, high = entry.gain
        found.append(f"            {who}: {median:.2f} times as fast as ATen, between {low:.2f} and {high:.2f}")
    if entry.module is not None:
        median, low, high = entry.module
        found.append(f"            its module: {median:.2f} times as fast, between {low:.2f} and {high:.2f}")
    return [*found, *([f"  in doubt  {entry.doubt}; measured again next time"] if entry.doubt else [])]


def _trials(key: str, device: Device, target: Target) -> list[Trial]:
    """The last trial of each configuration, with today's versions."""
    here = versions(target)
    found = {t.kernel: t for t in read_trials(trials_path(device)) if t.key == key and t.versions == here}
    return list(found.values())


def _runners_up(entry: Entry, trials: Sequence[Trial], rank: dict[str, int]) -> list[str]:
    measured = sorted((t.us, t.kernel) for t in trials if t.us is not None and t.kernel != entry.kernel)
    lines = [
        f"  {'next' if i == 0 else '':<9} {time_text(us / 1e3):>10}  {kernel}  (model: {rank.get(kernel, '-')})"
        for i, (us, kernel) in enumerate(measured[:RUNNERS_UP])
    ]
    return [*lines, "            (runners-up by a few launches each, not in turn with the winner)"] if lines else []


def _parameters(entry: Entry, trials: Sequence[Trial]) -> list[str]:
    """The lines of what changing one parameter alone did, where that was measured."""
    winner = parse_config(entry.kernel)
    own = next((t.us for t in trials if t.kernel == entry.kernel and t.us is not None), None)
    lines: list[str] = []
    for t in trials:
        if t.us is None or own is None:
            continue
        changed = _one_change(winner, parse_config(t.kernel))
        if changed:
            lines.append(f"  {'' if lines else 'alone':<9} {changed}: {t.us / own:.2f} times its time")
    return lines


def _one_change(a: Config, b: Config) -> str:
    """The difference of two configurations, as `BP 64 -> 128`, if it is a single one; else None."""
    if a.family != b.family or a.tile.keys() != b.tile.keys():
        return ""
    mine, other = a.as_dict(), b.as_dict()
    names = [n for n in mine if mine[n] != other[n]]
    return f"{names[0]} {mine[names[0]]} -> {other[names[0]]}" if len(names) == 1 else ""


def _failures(trials: Sequence[Trial]) -> list[str]:
    failed = Counter(t.cause for t in trials if t.us is None)
    return [f"  failed    {causes_text(failed)}"] if failed else []
