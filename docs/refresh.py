"""Run the commands in docs/ again and write what they print under them.

    python docs/refresh.py [PAGE...]            # rewrite the console blocks, of all pages and README.md by default
    python docs/refresh.py --check [PAGE...]    # change nothing; exit 1 where a block is out of date

A block is fenced as ```console, and its lines that begin with `$ ` are commands, run in the repository's root.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What hangs on how a processor rounds: an error of 1e-8 or less, and which tensor has the largest.
ERROR = re.compile(r" *\b\d(?:\.\d+)?e-(?:0[89]|[1-9]\d)\b")
WORST = re.compile(r"(?<= ERROR) (.*)\(.*\)$")


def run(command: str) -> str:
    """What a `convgen` or `python` command prints, both streams; in this process, where that starts none."""
    program, *arguments = shlex.split(command)
    if "--processes" not in arguments and (program == "convgen" or arguments[0].endswith(".py")):
        printed, code = _here(program, arguments)
    else:
        start = {"convgen": [sys.executable, "-m", "convgen.cli"], "python": [sys.executable]}[program]
        done = subprocess.run([*start, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        printed, code = done.stdout + done.stderr, done.returncode
    lines = [line.rstrip() for line in printed.splitlines()]
    return "\n".join([*lines, *([f"(exit code {code})"] if code else [])]).strip("\n")


def _here(program: str, arguments: list[str]) -> tuple[str, int]:
    from convgen.commands.main import main as convgen

    out, err, argv, path = io.StringIO(), io.StringIO(), sys.argv, sys.path
    code: object = 0
    sys.argv = ["convgen", *arguments] if program == "convgen" else arguments
    try:
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            if program == "convgen":
                convgen()
            else:
                sys.path = [str(Path(arguments[0]).resolve().parent), *path]
                runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv, sys.path = argv, path
    return out.getvalue() + err.getvalue(), code if isinstance(code, int) else 0


def unrounded(text: str) -> str:
    """A block without what another processor would print otherwise."""
    return "\n".join(WORST.sub(r" \1", ERROR.sub(" ERROR", line)) for line in text.splitlines())


def refreshed(text: str) -> str:
    """A page with what its commands print today. Blocks that differ in how a processor rounds stay as they are."""

    def again(match: re.Match[str]) -> str:
        commands = [line for line in match[1].splitlines() if line.startswith("$ ")]
        new = "```console\n" + "".join(f"{c}\n{run(c[2:])}\n" for c in commands) + "```"
        return match[0] if unrounded(new) == unrounded(match[0]) else new

    return BLOCK.sub(again, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    given = parser.parse_args()
    check: bool = given.check
    (ROOT / "build").mkdir(exist_ok=True)  # where blocks write
    stale: list[str] = []
    for path in given.pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
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
