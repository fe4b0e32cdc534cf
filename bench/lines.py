"""Lines by room: of a commit, and how many there were at another.

    python bench/lines.py [SINCE] [--at HEAD]

Rooms are those of convgen/ and the folders templates, bench, tests and docs; Python, templates and Markdown count.
SINCE is a commit or a tag. Where git doesn't know it, as in a shallow clone, or isn't there at all, a line says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("templates", "bench", "tests", "docs")
COUNTED = (".py", ".pyi", ".jinja", ".md")


def room_of(path: str) -> str | None:
    """The row in which a file counts."""
    place = PurePosixPath(path)
    if place.suffix not in COUNTED or len(place.parts) < 2:
        return None
    if place.parts[0] == "convgen":
        return f"convgen/{place.parts[1]}" if len(place.parts) > 2 else "convgen/*.py"
    return place.parts[0] if place.parts[0] in OTHERS else None


def git(*words: str, given: bytes = b"") -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, input=given, capture_output=True, check=True).stdout


def lines_at(commit: str) -> Counter[str]:
    """Lines of each room in a commit's tree."""
    found = Counter[str]()
    files = [entry.split("\t", 1) for entry in git("ls-tree", "-rz", commit).decode().split("\0") if entry]
    wanted = [(room, how.split()[2]) for how, path in files if (room := room_of(path)) is not None]
    text = git("cat-file", "--batch", given="".join(f"{blob}\n" for _, blob in wanted).encode())
    at = 0
    for room, _ in wanted:  # of each a line that ends in its size, its bytes, a newline
        start = text.index(b"\n", at) + 1
        at = start + int(text[at:start].split()[2]) + 1
        found[room] += text.count(b"\n", start, at - 1)
    return found


def table(now: Counter[str], then: Counter[str] | None) -> list[str]:
    """A line a room, its own before others; with the difference where there is an earlier count."""
    rooms = sorted(now.keys() | (then or {}).keys(), key=lambda room: (not room.startswith("convgen"), room))
    rows = [(room, now[room], then[room] if then else 0) for room in rooms]
    rows.append(("all", now.total(), then.total() if then else 0))
    return [f"{room:<20}{n:>8,}" + f"{n - before:>+9,}" * (then is not None) for room, n, before in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("since", nargs="?", help="a commit or a tag to compare with")
    parser.add_argument("--at", default="HEAD")
    asked = parser.parse_args()
    try:
        then = lines_at(asked.since) if asked.since else None
        print("\n".join(table(lines_at(asked.at), then)))
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
        print(f"lines by room are not known: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
