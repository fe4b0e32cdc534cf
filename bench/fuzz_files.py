"""Files as input: mutations of every format, by lines and by fields, against what a command promises.

    python bench/fuzz_files.py --minutes 10 [--format graph] [--seed 0]

A run ends with exit 0, or with exit 2 and a line; no traceback, nothing written beside -o, no more than a minute and
4 GiB. What breaks that is printed with its seed. `tests/test_files_fuzz.py` draws a few.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS, BYTES = 60, 4 << 30
FORMATS = (
    "graph",
    "network",
    "layer",
    "plan",
    "layers",
    "schedule",
    "program",
    "machine",
    "database",
    "csv",
    "tensors",
)
MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.fc, self.drop = nn.Linear(8, 4), nn.Dropout(0.1)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.stem(x)))).mean((2, 3))
        x = torch.cat([x, x], 1)[:, :8]
        return self.drop(self.fc(x)).softmax(1) * self.scale + torch.arange(4)
"""
NETWORK = """name: tiny
input: [4, 3, 16, 16]
nodes:
- {name: a, kind: conv, out_channels: 8, kernel_size: 3, padding: 1}
- {name: n, kind: batch_norm}
- {name: r, kind: relu}
- {name: p, kind: max_pool, kernel_size: 2, stride: 2}
- {name: b, kind: conv, out_channels: 8, kernel_size: 1}
- {name: s, kind: add, from: [b, p]}
- {name: g, kind: global_avg_pool}
- {name: f, kind: linear, out_features: 5}
"""
LAYER = """name: tiny
layer: conv2d
input: [4, 4, 8, 8]
out_channels: 6
kernel_size: 3
stride: 1
padding: 1
bias: true
grid: {N: 2, H: 2}
algorithm: spatial
"""
MACHINE = """name: mine
ranks_per_node: 4
levels:
  - {name: node, ranks: 4, latency_s: 8e-6, bytes_per_s: 3e+10}
  - {name: machine, latency_s: 8e-6, bytes_per_s: 1e+10, shared_bytes_per_s: 2e+10}
memory_bytes: 1.6e+10
memory_bytes_per_s: 8e+11
peak_flops_per_s: {float64: 7e+12, float32: 1e+13, tfloat32: 1e+13, bfloat16: 1e+13, float16: 1e+13}
efficiency: 0.5
launch_s: 1e-5
collectives: {all_reduce: best}
measured_collectives:
  - {collective: all_gather, ranks: 2, bytes: [2048, 131072], over_model: [1.6, 2.1]}
measured_convolutions:
  - {channels: 64, filters: 64, taps: 9, pixels: 3136, efficiency: [0.8, 0.7, 0.6]}
"""
CSV = "name,N,C,H,W,F,K,S,P,groups\none,4,4,8,8,6,3,1,1,1\ntwo,4,8,8,8,8,1,2,0,2\n"
ATOMS = (
    "null", "true", "0", "-1", "7", "1.5", ".nan", ".inf", "4611686018427387904", "9223372036854775807", "99999999",
    '""', "[]", "{}", "[0]", "[1, 2]", "{x: 3}", "soon", "../x", "/tmp/x", '"x\\"; boom() #"', "N", "3*N", '"%x"',
    "cpu", "float64", "int64", "[N, 3]", "relu", "from_file", "add_.Tensor", "é", "1e400", "*", "[[1]]",
)  # fmt: skip
TOKEN = re.compile(r'"[^"]*"|%?[\w.*-]+|[\[\]{}:,=()+]')


@dataclass(frozen=True)
class Given:
    """A file to change, the other files that stand beside it, and the commands that read it."""

    file: str
    text: str
    beside: Mapping[str, str | bytes]
    commands: tuple[tuple[str, ...], ...]


def call(words: list[str]) -> tuple[int, str]:
    """Exit code and what was printed, as the program's own main has it; 3 is a bug."""
    import click

    from convgen.commands.main import cli
    from convgen.errors import InputError

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code: Any = cli.main(words, standalone_mode=False)
            return (code if isinstance(code, int) else 0), out.getvalue()
        except InputError as error:
            return 2, f"{out.getvalue()}{error}"
        except click.ClickException as error:
            return 2, f"{out.getvalue()}{error.format_message()}"
        except MemoryError as error:
            return 2, f"{out.getvalue()}too little memory: {error}"
        except SystemExit as error:
            return int(error.code or 0), out.getvalue()
        except Exception:
            return 3, f"{out.getvalue()}{traceback.format_exc()}"


def givens(work: Path) -> dict[str, Given]:
    """A right file of each format; `work` is written to."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "fuzzed_net.py").write_text(MODULE, encoding="utf-8")
    here, path = Path.cwd(), list(sys.path)
    os.chdir(work)
    try:
        sys.modules.pop("fuzzed_net", None)
        _done(["import", "fuzzed_net:Net", "--input", "4,3,16,16", "-o", "net.yaml"])
        _done(["plan", "net.yaml", "--machine", "cpu", "--ranks", "4", "--grid", "a=2,b=2", "-o", "plan.yaml"])
        _done(["compile", "net.yaml", "--grid", "N=2,H=2", "-o", "out"])
        Path("layer.yaml").write_text(LAYER, encoding="utf-8")
        Path("hand.yaml").write_text(NETWORK, encoding="utf-8")
        _done(["plan", "hand.yaml", "--machine", "cpu", "--ranks", "2", "-o", "layers.yaml"])
        schedule = _done(["compile", "layer.yaml", "--emit", "schedule"])
        names = ("net.yaml", "plan.yaml", "layers.yaml", "out/Net/schedule.txt")
        graph, plan, layers, program = (Path(n).read_text(encoding="utf-8") for n in names)
        tensors = Path("net.constants.safetensors").read_bytes()
    finally:
        os.chdir(here)
        sys.path[:] = path
    constants: dict[str, str | bytes] = {"net.constants.safetensors": tensors}
    of_graph = {"net.yaml": graph, **constants}
    grid = ("--grid", "N=2,H=2")
    found = {
        "graph": Given(
            "net.yaml", graph, constants,
            (("compile", "net.yaml", *grid, "-o", "o"), ("explain", "net.yaml", *grid), ("check", "net.yaml", *grid),
             ("plan", "net.yaml", "--machine", "cpu", "--ranks", "2", "-o", "o/p.yaml"), ("network", "net.yaml")),
        ),
        "network": Given(
            "hand.yaml", NETWORK, {},
            (("plan", "hand.yaml", "--machine", "cpu", "--ranks", "2", "-o", "o/p.yaml"), ("check", "hand.yaml", *grid),
             ("compile", "hand.yaml", *grid, "-o", "o"), ("import", "hand.yaml", "-o", "o/net.yaml")),
        ),
        "layer": Given(
            "layer.yaml", LAYER, {},
            (("compile", "layer.yaml", "-o", "o"), ("explain", "layer.yaml"), ("check", "layer.yaml")),
        ),
        "plan": Given(
            "plan.yaml", plan, of_graph,
            (("compile", "plan.yaml", "-o", "o"), ("check", "plan.yaml"), ("explain", "plan.yaml")),
        ),
        "layers": Given("layers.yaml", layers, {}, (("compile", "layers.yaml", "-o", "o"), ("check", "layers.yaml"))),
        "schedule": Given(
            "s.txt", schedule, {"layer.yaml": LAYER},
            (("check", "layer.yaml", "--schedule", "s.txt"),
             ("compile", "layer.yaml", "--schedule", "s.txt", "-o", "o")),
        ),
        "program": Given(
            "s.txt", program, of_graph,
            (("check", "net.yaml", "--schedule", "s.txt"), ("compile", "net.yaml", "--schedule", "s.txt", "-o", "o")),
        ),
        "machine": Given(
            "m.yaml", MACHINE,
            {"layer.yaml": LAYER.replace("algorithm: spatial", "algorithm: auto"), "hand.yaml": NETWORK},
            (("explain", "layer.yaml", "--machine", "m.yaml"),
             ("plan", "hand.yaml", "--machine", "./m.yaml", "--ranks", "4", "-o", "o/p.yaml")),
        ),
        "csv": Given(
            "l.csv", CSV, {}, (("compile", "l.csv", "--grid", "N=2", "-o", "o"), ("explain", "l.csv", "--grid", "N=2"))
        ),
        "tensors": Given(
            "net.constants.safetensors", "", of_graph,
            (("compile", "net.yaml", *grid, "-o", "o"), ("check", "net.yaml", *grid)),
        ),
        "database": Given("d.json", _database(), {}, ((),)),
    }  # fmt: skip
    assert set(found) == set(FORMATS)
    return found


def _done(words: list[str]) -> str:
    code, said = call(words)
    assert code == 0, said
    return said


def _database() -> str:
    folder = ROOT / "tuning" / "devices"
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    data = json.loads(files[0].read_text(encoding="utf-8")) if files else {}
    for key, value in data.items():
        if isinstance(value, dict) and len(value) > 3:  # a few entries
            data[key] = dict(list(value.items())[:3])
    return json.dumps(data, indent=1)


# ---------------------------------------------------------------- mutations
def mutated(text: str, draw: random.Random) -> str:
    """One to three changes, of lines or of fields."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        text = draw.choice((_line, _field, _field, _field, _number, _swap))(text, draw)
    return text


def _line(text: str, draw: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    if not lines:
        return text
    k, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(5)
    if kind == 0:
        del lines[k]
    elif kind == 1:
        lines.insert(other, lines[k])
    elif kind == 2:
        lines[k], lines[other] = lines[other], lines[k]
    elif kind == 3:
        lines[k] = lines[k][: draw.randrange(len(lines[k]) + 1)]
    else:
        lines[k] = " " * draw.randrange(4) + lines[k].lstrip()
    return "".join(lines)


def _places(text: str) -> list[re.Match[str]]:
    return list(TOKEN.finditer(text))


def _replaced(text: str, found: re.Match[str], new: str) -> str:
    return text[: found.start()] + new + text[found.end() :]


def _field(text: str, draw: random.Random) -> str:
    places = [p for p in _places(text) if p[0] not in "[]{}:,=()+"]
    return _replaced(text, draw.choice(places), draw.choice(ATOMS)) if places else text


def _number(text: str, draw: random.Random) -> str:
    places = [p for p in _places(text) if re.fullmatch(r"-?[0-9]+", p[0])]
    if not places:
        return text
    found = draw.choice(places)
    n = int(found[0])
    return _replaced(text, found, str(draw.choice((n + 1, n - 1, -n, 2 * n, 0, n * 10**9, 2**62, 2**63))))


def _swap(text: str, draw: random.Random) -> str:
    places = _places(text)
    if len(places) < 2:
        return text
    a, b = draw.sample(places, 2)
    return _replaced(text, a, b[0])


def of_bytes(raw: bytes, draw: random.Random) -> bytes:
    """Of a file that is no text: cut, a byte changed, or its header's text changed."""
    kind = draw.randrange(3)
    if kind == 0:
        return raw[: draw.randrange(len(raw))]
    if kind == 1:
        k = draw.randrange(len(raw))
        return raw[:k] + bytes([draw.randrange(256)]) + raw[k + 1 :]
    size = int.from_bytes(raw[:8], "little")
    head = mutated(raw[8 : 8 + size].decode(), draw).encode()
    return len(head).to_bytes(8, "little") + head + raw[8 + size :]


# ---------------------------------------------------------------- runs
def tried(name: str, given: Given, seed: int, work: Path) -> tuple[str, str]:
    """What is wrong with a run of one mutation, or ""; and the file."""
    draw = random.Random(f"{name} {seed}")
    folder = work / "run"
    _empty(folder)
    for file, data in given.beside.items():
        (folder / file).write_bytes(data.encode() if isinstance(data, str) else data)
    if name == "tensors":
        source = next(v for k, v in given.beside.items() if k.endswith(".safetensors"))
        assert isinstance(source, bytes)
        new = of_bytes(source, draw)
    else:
        new = mutated(given.text, draw).encode("utf-8", "replace")
    (folder / given.file).write_bytes(new)
    (folder / "o").mkdir()
    words = draw.choice(given.commands)
    before, here = _snapshot(work), Path.cwd()
    os.chdir(folder)
    start = time.monotonic()
    try:
        with _limited():
            code, said = _read_database(given.file) if name == "database" else call(list(words))
    except TimeoutError:
        code, said = 9, ""
    finally:
        os.chdir(here)
    took = time.monotonic() - start
    wrong = ""
    if code == 9:
        wrong = f"took more than {took:.0f} s"
    elif code not in (0, 2):
        wrong = f"exit {code}: {said.strip().splitlines()[-1] if said.strip() else ''}"
    elif code == 2 and not said.strip():
        wrong = "exit 2 without a line"
    elif changed := [p for p in _changed(before, _snapshot(work)) if not p.startswith("run/o/")]:
        wrong = f"wrote {changed[0]}"
    elif _peak() > BYTES:
        wrong = f"took {_peak() / 2**30:.1f} GiB"
    return (f"{' '.join(words)}: {wrong}\n{said[-3000:]}" if wrong else ""), new.decode("utf-8", "replace")


def _read_database(file: str) -> tuple[int, str]:
    from convgen.errors import InputError
    from convgen.tune.database import read_database

    try:
        read_database(Path(file))
    except InputError as error:
        return 2, str(error)
    except Exception:
        return 3, traceback.format_exc()
    return 0, ""


def _empty(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        p.relative_to(folder).as_posix(): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [p for p in sorted(before.keys() | after.keys()) if before.get(p) != after.get(p)]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(_signal: int, _frame: Any) -> None:
        raise TimeoutError

    known: Any = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, known)


def fuzz(formats: tuple[str, ...], more: Callable[[], bool], seed: int, told: Callable[[str], None]) -> dict[str, int]:
    """Runs while `more`, a mutation of each format in turn; how many runs each format had."""
    runs = dict.fromkeys(formats, 0)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        known = givens(work / "given")
        while more():
            for name in formats:
                wrong, text = tried(name, known[name], seed, work)
                runs[name] += 1
                if wrong:
                    told(f"{name} {seed}: {wrong}\n---- {known[name].file}\n{text if len(text) < 4000 else ''}")
            seed += 1
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--format", choices=FORMATS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end, found = time.monotonic() + 60 * options.minutes, list[str]()

    def told(text: str) -> None:
        found.append(text)
        print(text, flush=True)

    runs = fuzz(tuple(options.format or FORMATS), lambda: time.monotonic() < end, options.seed, told)
    print(", ".join(f"{name} {n}" for name, n in runs.items()), "runs;", len(found), "wrong")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
