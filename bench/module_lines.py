"""How long ResNet-50's modules are: each with its runtime pasted in, and together with one beside them.

    python bench/module_lines.py

The layouts are those of `convgen plan examples/networks/resnet50.yaml --machine lassen --ranks 64 -o plan.yaml`, the
modules those of `convgen compile plan.yaml -o build`, and of a command for each. Alike are lines that every module has,
blank ones aside.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import reduce
from pathlib import Path

from convgen.commands.inputs import compile_files
from convgen.commands.main import cli
from convgen.emit.paste import shared_runtime

ROOT = Path(__file__).resolve().parent.parent
NETWORK = ROOT / "examples/networks/resnet50.yaml"
NO_OPTIONS = dict.fromkeys(("target", "machine", "grid", "algorithm", "dtype", "memory_format"))


def main() -> None:
    nowhere = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(nowhere), redirect_stderr(nowhere):
        plan = str(Path(folder) / "plan.yaml")
        cli(["plan", str(NETWORK), "--machine", "lassen", "--ranks", "64", "-o", plan], standalone_mode=False)
        layers = compile_files([plan], objective="seconds", **NO_OPTIONS)
    beside = shared_runtime()
    show("one by one", [c.module() for c in layers])
    show("together", [c.module(beside) for c in layers], [beside.text])


def show(what: str, modules: Sequence[str], others: Sequence[str] = ()) -> None:
    lines = [len(text.splitlines()) for text in modules]
    beside = sum(len(text.splitlines()) for text in others)
    written = [[line for line in text.splitlines() if line] for text in modules]
    common = reduce(set[str].intersection, map(set, written))
    alike = [sum(line in common for line in text) / len(text) for text in written]
    share = f"{100 * sum(alike) / len(alike):.0f} % of one alike"
    each = f"{len(modules)} modules of {min(lines)} to {max(lines)} lines, {share}"
    print(f"{what:<10}  {each}; {beside} lines beside; {sum(lines) + beside} in all")


if __name__ == "__main__":
    main()
