"""Run the commands in docs/ again and write what they print under them.

    python docs/refresh.py [PAGE...]            # rewrite the console blocks, of all pages by default
    python docs/refresh.py --check [PAGE...]    # change nothing; exit 1 where a block is out of date

A block is fenced as ```console, and its lines that begin with `$ ` are commands, run in the repository's root.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: str) -> str:
    """What a `convgen` or `python` command prints, both streams; `convgen` in this process, where that starts none."""
    program, *arguments = shlex.split(command)
    if program == "convgen" and "--processes" not in arguments:
        printed, code = _here(arguments)
    else:
        start = {"convgen": [sys.executable, "-m", "convgen.cli"], "python": [sys.executable]}[program]
        done = subprocess.run([*start, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        printed, code = done.stdout + done.stderr, done.returncode
    lines = [line.rstrip() for line in printed.splitlines()]
    return "\n".join([*lines, *([f"(exit code {code})"] if code else [])]).strip("\n")


def _here(arguments: list[str]) -> tuple[str, int]:
    from convgen.commands.main import main as convgen

    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    code: object = 0
    sys.argv = ["convgen", *arguments]
    try:
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            convgen()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
    return out.getvalue() + err.getvalue(), code if isinstance(code, int) else 0


def refreshed(text: str) -> str:
    def again(match: re.Match[str]) -> str:
        commands = [line for line in match[1].splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"{c}\n{run(c[2:])}\n" for c in commands) + "```"

    return BLOCK.sub(again, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    given = parser.parse_args()
    check: bool = given.check
    (ROOT / "build").mkdir(exist_ok=True)  # where blocks write
    stale: list[str] = []
    for path in given.pages or sorted((ROOT / "docs").rglob("*.md")):
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
