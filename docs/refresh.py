"""Run the commands in docs/ again and write what they print under them.

    python docs/refresh.py            # rewrite the console blocks
    python docs/refresh.py --check    # change nothing; exit 1 where a block is out of date

A block is fenced as ```console, and its lines that begin with `$ ` are commands, run in the repository's root.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: str) -> str:
    """What a `convgen` or `python` command prints, both streams, in the environment of this interpreter."""
    program, *arguments = shlex.split(command)
    start = {"convgen": [sys.executable, "-m", "convgen.cli"], "python": [sys.executable]}[program]
    done = subprocess.run([*start, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    return "\n".join([*lines, *([f"(exit code {done.returncode})"] if done.returncode else [])]).strip("\n")


def refreshed(text: str) -> str:
    def again(match: re.Match[str]) -> str:
        commands = [line for line in match[1].splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"{c}\n{run(c[2:])}\n" for c in commands) + "```"

    return BLOCK.sub(again, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    (ROOT / "build").mkdir(exist_ok=True)  # where blocks write
    stale: list[str] = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    print(f"{'out of date' if check else 'rewritten'}: {', '.join(stale) or 'none'}")
    sys.exit(bool(stale and check))


if __name__ == "__main__":
    main()
