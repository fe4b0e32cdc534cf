"""Training scripts on processes, with both kinds of parameters, against the same script on one process.

    python bench/training_scripts.py [--only TEXT] [--grid C=2] [--kind blocks] [--json FILE] [--markdown]

Every script of tests/training_steps.py, training_runs.py, training_mixed.py (torch alone) and training_libraries.py
(timm, Accelerate, Lightning, where they are installed) trains what `convgen.parallelize` gives on 2 or 4 processes with
gloo, in float64 or in mixed precision, by the very lines that train the module on one process. A number is the largest
error, relative to the largest number of its tensor, of parameters, buffers, averages and what the script logs, over all
ranks. `refused`: all ranks raise, with the first line. `WRONG`: another result; `PARTED`: a rank raises while others
wait for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from training_ranks import CASES, KINDS, SCRIPTS, Outcome, installed, run

WORDS = 100  # letters of what is raised, in the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="scripts whose name has this")
    parser.add_argument("--grid", default="", help="the grids of this name alone")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/torch.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    chosen = [s for s in SCRIPTS if given.only in s.name]
    for library in sorted({s.needs for s in chosen if not installed(s)}):
        print(f"without {library}, which is not installed: tests/training_libraries.py says how", flush=True)
    chosen = [s for s in chosen if installed(s)]
    kinds = [given.kind] if given.kind else list(KINDS)
    found: dict[tuple[str, str, str], Outcome] = {}
    for case in CASES:
        if given.grid and case.name != given.grid:
            continue
        runs = [(s, kind) for s in chosen for kind in kinds]
        for (s, kind), outcome in zip(runs, run(case, runs), strict=True):
            found[s.name, kind, case.name] = outcome
            if not given.markdown:
                print(f"{case.name:16s} {kind:8s}  {s.name}: {outcome}", flush=True)
    if given.json:
        rows = [
            {"script": s, "kind": k, "grid": g, "verdict": o.verdict, "error": o.error, "text": o.text}
            for (s, k, g), o in found.items()
        ]
        given.json.write_text(json.dumps(rows, indent=1))
    for line in table(found, [s.name for s in chosen], kinds) if given.markdown else totals(found, kinds):
        print(line)


def of_all_grids(found: dict[tuple[str, str, str], Outcome], name: str, kind: str) -> list[tuple[str, Outcome]]:
    return [(g, o) for (s, k, g), o in found.items() if (s, k) == (name, kind)]


def verdict(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """Of a script on all grids: the worst."""
    order = ("right", "refused", "parted", "wrong")
    return max((o.verdict for _, o in outcomes), key=order.index)


def totals(found: dict[tuple[str, str, str], Outcome], kinds: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for kind in kinds:
        names = dict.fromkeys(s for s, _, _ in found)
        verdicts = [verdict(of_all_grids(found, n, kind)) for n in names]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("right", "refused", "parted", "wrong"))
        lines.append(f"{kind}: of {len(names)} scripts {counts} (on all grids, or on some)")
    return lines


def table(found: dict[tuple[str, str, str], Outcome], names: Sequence[str], kinds: Sequence[str]) -> list[str]:
    lines = [f"| script | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for name in names:
        cells = [cell(of_all_grids(found, name, kind)) for kind in kinds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", *totals(found, kinds)]


def cell(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """What becomes of a script: the largest error where it is right, and else where, with the first words."""
    bad = {v: [(g, o) for g, o in outcomes if o.verdict == v] for v in ("wrong", "parted", "refused")}
    parts = [f"right, {max(o.error for _, o in outcomes):.0e}"] if not any(bad.values()) else []
    for some in filter(None, bad.values()):
        words = str(some[0][1]).replace("|", "/")
        words = words if len(words) < WORDS else words[: WORDS - 4] + " ..."
        where = "" if len(some) == len(outcomes) else f" ({'; '.join(g for g, _ in some)})"
        parts.append(words + where)
    return "; ".join(parts)


if __name__ == "__main__":
    main()
