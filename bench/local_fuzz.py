"""What ATen's convolutions get wrong on a CPU, and that a module's local convolutions don't.

    python bench/local_fuzz.py [--seconds 120] [--cases 1000000] [--seed 0] [--show CASE]

Small layers at random: 1-D to 3-D, both memory formats and odd strides where an extent is 1, float64 float32 bfloat16
float16, one channel, groups, strides, dilations, padding; all three phases. Each result of aten.convolution and
aten.convolution_backward, and of the text that convgen prints for the same problem, is compared with sums tap by tap in
float64, within what rounding explains. Memory is filled with NaN before each call, so that what is not written is
seen; a child process does the work, so that a crash is a line of the report. Prints the wrong ones by kind; the exit
status says whether the module had any.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from drawn_layers import PHASES, WAYS, Case, draw, over_limit


def work(way: str, seed: int, first: int, last: int, seconds: float) -> None:
    """Results first to last, three a case, on one thread: what is at work goes to stderr, what is wrong to stdout."""
    torch.set_num_threads(1)
    end, number = time.monotonic() + seconds, first
    while number < last and time.monotonic() < end:
        sys.stderr.write(f"{number}\n")
        over = over_limit(draw(seed, number // 3), PHASES[number % 3], way)
        if not over <= 1:
            print(number, over, flush=True)
        number += 1
    sys.stderr.write(f"{number}\n")


def collect(way: str, seed: int, last: int, seconds: float) -> tuple[int, dict[int, float]]:
    """How many results there were, and the wrong ones, over what rounding explains; a crash is -1.

    After a crash a new child goes on behind it: a call that writes where it should not may bring down a later one.
    """
    end, number, wrong = time.monotonic() + seconds, 0, dict[int, float]()
    while number < last and (left := end - time.monotonic()) > 0:
        child = [sys.executable, __file__, "--worker", way, "--first", str(number)]
        limits = ["--seed", str(seed), "--cases", str(-(-last // 3)), "--seconds", str(left)]
        ran = subprocess.run([*child, *limits], check=False, capture_output=True, text=True)
        wrong |= {int(n): float(over) for n, over in (line.split() for line in ran.stdout.splitlines())}
        if ran.returncode > 0:
            raise SystemExit(ran.stderr[-3000:])
        at = [line for line in ran.stderr.splitlines() if line.isdigit()]
        number = int(at[-1])
        if ran.returncode == 0:
            break
        wrong[number] = -1
        number += 1
    return number, wrong


def kinds(seed: int, wrong: dict[int, float]) -> list[tuple[str, ...]]:
    """A line a kind: what it is, how many, of which types, dimensions and formats, and the worst."""
    found: dict[tuple[str, str, str], list[tuple[Case, float]]] = defaultdict(list)
    for number, over in wrong.items():
        case = draw(seed, number // 3)
        one = " of one channel a group" if case.channels == 1 else ""
        what = "a crash" if over < 0 else "wrong" if over > 10 else "rounded more"
        found[case.kind, PHASES[number % 3] + one, what].append((case, over))

    def several(values: list[str]) -> str:
        return " ".join(sorted(set(values)))

    lines: list[tuple[str, ...]] = []
    for (kind, phase, what), pairs in sorted(found.items()):
        cases, worst = [case for case, _ in pairs], max(over for _, over in pairs)
        types = several([f"{len(c.x)}-D {c.dtype}" for c in cases])
        forms = several([c.form for c in cases])
        lines.append((kind, phase, types, forms, str(len(cases)), what, f"{worst:.2g}" if worst > 0 else ""))
    return lines


HEADINGS = ("kind", "phase", "types", "memory", "results", "what", "worst over the limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="for each of ATen and the module")
    parser.add_argument("--cases", type=int, default=10**6, help="at most; three results each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, metavar="N", help="print case N and its three results' errors, and no more")
    parser.add_argument("--worker", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.seed, options.first, 3 * options.cases, options.seconds)
        return
    if options.show is not None:
        case = draw(options.seed, options.show)
        print(case)
        for phase in PHASES:
            print(f"module {phase}: {over_limit(case, phase, 'module'):.3g} of what rounding explains", flush=True)
            print(f"ATen   {phase}: {over_limit(case, phase, 'ATen'):.3g}", flush=True)
        return
    broken = 0
    for way in WAYS:
        count, wrong = collect(way, options.seed, 3 * options.cases, options.seconds)
        print(f"{way}: {len(wrong)} of {count} results wrong, seed {options.seed}, torch {torch.__version__}, "
              f"{torch.backends.cpu.get_cpu_capability()}")  # fmt: skip
        if wrong:
            print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
            print("\n".join("| " + " | ".join(line) + " |" for line in kinds(options.seed, wrong)))
            print(f"cases, for --show: {' '.join(str(n // 3) for n in list(wrong)[:20])}")
        broken += len(wrong) if way == "module" else 0
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
