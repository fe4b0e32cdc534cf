"""Same inputs, same bytes: whatever the hash seed and the directory, in processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from modules import draw
from test_cli import LAYER
from test_plan_by_hand import branched
from test_schedule_text import random_schedule

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.compiler import compile_layer
from convgen.emit.paste import shared_runtime
from convgen.network_compiler import compile_network
from convgen.program.text import show
from convgen.resources import data_file
from convgen.spec.network_graph import network_graph
from convgen.spec.reader import layer_from_dict, read_csv, read_layer

ROOT = Path(__file__).resolve().parent.parent
SPATIAL = {
    "name": "spatial", "layer": "conv2d", "input": [4, 4, 8, 8], "out_channels": 6, "kernel_size": 3, "padding": 1,
    "grid": {"H": 2}, "algorithm": "spatial",
}  # fmt: skip


def schedules() -> Iterator[str]:
    return (show(random_schedule(seed)) for seed in range(30))


def searched() -> Iterator[str]:
    for layer in read_csv(data_file("tuning", "layers", "resnet50.csv"), grid={"a": 2, "b": 2})[1:54:14]:
        for objective in ("seconds", "bytes"):
            yield show(compile_layer(layer, objective=objective).schedule)  # type: ignore[arg-type]


def modules() -> Iterator[str]:
    return (draw(seed).source for seed in range(10))


def with_their_runtime() -> Iterator[str]:
    shared = shared_runtime()
    yield shared.name
    for beside in (None, shared):
        yield compile_layer(layer_from_dict(SPATIAL)).module(beside)


def of_a_mesh() -> Iterator[str]:
    yield compile_layer(read_layer(ROOT / "examples" / "sw26010_rows.yaml")).module()


def network() -> Iterator[str]:
    """Planned: its package, and in it the program's text."""
    compiled = compile_network(network_graph(branched(Random(3), 4)), Grid((("a", 2), ("b", 2))), "auto")
    for name, data in sorted(compiled.package().files.items()):
        yield f"{name} {data!r}"


def written() -> Iterator[str]:
    """By the command, in the directory that there is."""
    Path("small.yaml").write_text(LAYER.replace("stationary-x", "auto").replace("C: 2", "C: 2, F: 2"))
    assert CliRunner().invoke(cli, ["compile", "small.yaml"]).exit_code == 0
    yield Path("small.py").read_text()


KINDS = (schedules, searched, modules, with_their_runtime, of_a_mesh, network, written)


def digests() -> dict[str, str]:
    return {kind.__name__: hashlib.sha256("\n".join(kind()).encode()).hexdigest() for kind in KINDS}


@pytest.mark.slow
def test_whatever_the_hash_seed_and_the_directory(tmp_path: Path) -> None:
    found: list[dict[str, str]] = []
    for seed in ("1", "77"):
        folder = tmp_path / seed
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", "import json, test_same_bytes; print(json.dumps(test_same_bytes.digests()))"],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0].keys() == {kind.__name__ for kind in KINDS}
    assert found[0] == found[1]
