"""Files of every format, mutated by lines and by fields, and a command in a process with limits that reads one.

`python bench/fuzz_files.py` says what a command promises, and draws many; test_files_named.py has what was found.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS, BYTES = 60, 4 << 30  # of a processor; a clock may go on for HANG, where others use the machine
HANG = 120
FORMATS = (
    "graph", "network", "layer", "plan", "layers", "schedule", "program", "machine", "database", "csv", "tensors",
    "trace",
)  # fmt: skip
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
measured_steps:
  - {row: relu, gradients: [x], extents: {d0: 2}, flops: 0, elements: 8, type: float32, seconds: 1e-3, spread: 0.1}
  - {collective: all_reduce, ranks: 2, links: machine, bytes: 4096, seconds: 1e-3, spread: 0.1}
"""
CSV = "name,N,C,H,W,F,K,S,P,groups\none,4,4,8,8,6,3,1,1,1\ntwo,4,8,8,8,8,1,2,0,2\n"
ATOMS = (
    "null", "true", "0", "-1", "7", "1.5", ".nan", ".inf", "4611686018427387904", "9223372036854775807", "99999999",
    '""', "[]", "{}", "[0]", "[1, 2]", "{x: 3}", "soon", "../x", "/tmp/x", '"x\\"; boom() #"', "N", "3*N", '"%x"',
    "cpu", "sw26010", "cuda:sm_90", "__class__", "self", "torch", "import", "boom.boom()", "ﬁ", "1_000", "0x7", "yes",
    "float64", "int64", "[N, 3]", "relu", "from_file", "add_.Tensor", "é", "1e400", "*", "[[1]]",
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
        _done(["simulate", "net.yaml", "--machine", "cpu", "--grid", "N=2,H=2", "--trace", "trace.json"])
        names = ("net.yaml", "plan.yaml", "layers.yaml", "out/Net/schedule.txt")
        graph, plan, layers, program = (Path(n).read_text(encoding="utf-8") for n in names)
        tensors = Path("net.constants.safetensors").read_bytes()
        trace = _trace(Path("trace.json"))
        database = _database(Path("layer.yaml"), work)
    finally:
        os.chdir(here)
        sys.path[:] = path
    constants: dict[str, str | bytes] = {"net.constants.safetensors": tensors}
    of_graph = {"net.yaml": graph, **constants}
    grid, on_cpu = ("--grid", "N=2,H=2"), ("--machine", "cpu", "--grid", "N=2,H=2")
    found = {
        "graph": Given(
            "net.yaml", graph, constants,
            (("compile", "net.yaml", *grid, "-o", "o"), ("explain", "net.yaml", *grid), ("check", "net.yaml", *grid),
             ("plan", "net.yaml", "--machine", "cpu", "--ranks", "2", "-o", "o/p.yaml"), ("network", "net.yaml"),
             ("simulate", "net.yaml", *on_cpu)),
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
            (("compile", "plan.yaml", "-o", "o"), ("check", "plan.yaml"), ("explain", "plan.yaml"),
             ("simulate", "plan.yaml", "--machine", "cpu")),
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
        "database": Given(*database, {"layer.yaml": LAYER}, (("compile", "layer.yaml", "-o", "o"),)),
        "trace": Given(
            "t.json", trace, of_graph, (("simulate", "net.yaml", *on_cpu, "--measured", "t.json"),)
        ),
    }  # fmt: skip
    assert set(found) == set(FORMATS)
    return found


def _done(words: list[str]) -> str:
    code, said = call(words)
    assert code == 0, said
    return said


def _trace(file: Path) -> str:
    """A few events as torch.profiler writes those of a package."""
    events: list[Any] = [e for e in json.loads(file.read_text(encoding="utf-8"))["traceEvents"] if "dur" in e][:6]
    return json.dumps({"traceEvents": [e | {"name": f"convgen local {e['name']}"} for e in events]}, indent=1)


def _database(layer: Path, work: Path) -> tuple[str, str]:
    """Where a user's database of this machine stands beside `run`, and one of the layer's kernels."""
    from convgen.compiler import compile_layer
    from convgen.kernels.choose import local_problems
    from convgen.kernels.families import aten
    from convgen.program.nodes import is_convolution
    from convgen.spec.reader import read_layers
    from convgen.spec.target import read_target
    from convgen.tune.candidates import source_of
    from convgen.tune.database import Ceilings, Entry, update
    from convgen.tune.device import this_cpu, versions
    from convgen.tune.key import key_of

    one = compile_layer(read_layers(layer)[0])
    cpu = read_target("cpu").known()
    entries: dict[str, Entry] = {}
    for _, step in one.schedule.steps():
        if is_convolution(step):
            problem = local_problems(one.layer, one.schedule, one.space, step)[0]
            config = aten.default(problem, cpu)
            entries[key_of(problem)] = Entry(
                kernel=str(config), ms=0.5, p20=0.4, p80=0.6, aten_ms=0.7, ratio=1.4, share=0.5, bound="compute",
                error=1e-7, tried=3, of=30, effort="full", versions=versions(cpu),
                source=source_of(problem, config, cpu),
            )  # fmt: skip
    device = this_cpu()
    made = update(
        work / device.file_name, device, entries, Ceilings(flops_per_s={"float32": 1.0}, bytes_per_s=1.0, floor_us=1.0)
    )
    return f"../home/.cache/convgen/devices/{device.file_name}", made.text()


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
ODD = ("folder", "pipe", "device", "link to a device", "link to itself", "link to nothing", "nothing", "empty")
BAIT = "import pathlib\npathlib.Path(r'{}').touch()\n"  # boom.py: a text of a file that runs would find it
PLACE = re.compile(r"[\w.-]+\.(?:yaml|txt|csv|json|safetensors)(?::\d+)?")


def changed_file(name: str, given: Given, draw: random.Random, folder: Path) -> bytes:
    """Writes the files of a run, one of them changed; its bytes."""
    for file, data in given.beside.items():
        (folder / file).write_bytes(data.encode() if isinstance(data, str) else data)
    path = folder / given.file
    if draw.random() < 0.02:
        kind = draw.choice(ODD)
        path.unlink(missing_ok=True)
        make_odd(kind, path)
        return kind.encode()
    if name == "tensors":
        source = given.beside[given.file]
        assert isinstance(source, bytes)
        new = of_bytes(source, draw)
    else:
        text = mutated(given.text, draw).replace("/tmp/x", str(folder.parent / "beside" / "x"))
        new = text.encode("utf-8", "replace")
        new = _raw(new, draw) if draw.random() < 0.05 else new
    path.write_bytes(new)
    return new


def make_odd(kind: str, path: Path) -> None:
    """Something else where a file is wanted, one of ODD."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind != "nothing":
        device = "/dev/full" if kind == "device" else "/dev/zero"
        path.symlink_to({"link to itself": path, "link to nothing": path.parent / "none"}.get(kind, device))


def _raw(raw: bytes, draw: random.Random) -> bytes:
    """Of a text as bytes: what no text has, marks and ends of lines of other systems, and what takes much."""
    k = draw.randrange(len(raw) + 1)
    deep = draw.choice((b"[", b"{a: ", b"- ", b"(")) * draw.choice((40, 2000, 200_000))
    bomb = b"a0: &a0 [x, x, x, x, x, x, x, x]\n" + b"".join(
        b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 8)) for i in range(1, 12)
    )
    added = draw.choice(
        (b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xe2\x80\xae", b"9" * 5000, deep, bomb, b"\t")
    )
    kind = draw.randrange(5)
    if kind == 0:
        return raw.replace(b"\n", b"\r\n")
    if kind == 1:
        return raw[:k]
    if kind == 2:
        return b"\xef\xbb\xbf" + raw
    return raw[:k] + added + raw[k:]


def tried(name: str, given: Given, seed: int, work: Path) -> tuple[str, str, str]:
    """A run of one mutation: what is wrong with it, or ""; the file; what the program said."""
    draw = random.Random(f"{name} {seed}")
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("run/o", "home/.cache/convgen/devices", "tmp", "bait", "beside"):
        (work / folder).mkdir(parents=True)
    (work / "bait" / "boom.py").write_text(BAIT.format(work / "beside" / "ran"), encoding="utf-8")
    raw = changed_file(name, given, draw, work / "run")
    words = draw.choice(given.commands)
    before = _snapshot(work)
    code, said, peak, effects = limited(lambda: run(words), work)
    changed = [p for p in _changed(before, _snapshot(work)) if not p.startswith("run/o/")]
    last = said.strip().splitlines()[-1:] or [""]
    wrong = ""
    if effects or changed:
        wrong = f"did {', '.join([*effects, *changed][:3])}"
    elif code in (-signal.SIGXCPU, -signal.SIGKILL):
        wrong = f"took more than {SECONDS} s"
    elif "Traceback (most recent call last)" in said or code not in (0, 2):
        wrong = f"exit {code}: {last[0]}"
    elif peak > BYTES or "too little memory" in said:
        wrong = f"took {peak / 2**30:.1f} GiB: {last[0]}"
    elif code == 2 and not re.search(r"(?i)\berror: \S", said):
        wrong = "exit 2 without a line"
    elif code == 2 and not PLACE.search(said) and "error: -" not in said:
        wrong = f"exit 2 without a place: {last[0]}"
    shown = f"{' '.join(words)}: {wrong}\n{said[-3000:]}" if wrong else ""
    return shown, raw.decode("utf-8", "replace"), said


def run(words: tuple[str, ...]) -> int:
    """The program's own main; its exit code."""
    from convgen.commands.main import main

    sys.argv = ["convgen", *words]
    try:
        main()
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def limited(command: Callable[[], int], work: Path) -> tuple[int, str, int, list[str]]:
    """Runs in a process of its own, with limits: exit code, what it said, most bytes it had, and what it did that no
    command may do. A signal is a negative code."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 3
            try:
                code = _alone(command, work, out.fileno(), told.fileno())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end = time.monotonic() + HANG
        while True:
            found, status, used = os.wait4(child, os.WNOHANG)
            if found:
                break
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        texts: list[str] = []
        for file in (out, told):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return os.waitstatus_to_exitcode(status), texts[0], used.ru_maxrss * 1024, sorted({*texts[1].splitlines()})


def _alone(command: Callable[[], int], work: Path, out: int, told: int) -> int:
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (open(fd, "w", encoding="utf-8", closefd=False) for fd in (1, 2))  # noqa: SIM115
    for key in [k for k in os.environ if k.startswith(("CONVGEN_", "XDG_"))]:
        del os.environ[key]
    os.environ |= {"HOME": str(work / "home"), "TMPDIR": str(work / "tmp")}
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    sys.path.append(str(work / "bait"))
    os.chdir(work / "run")
    sys.addaudithook(_teller(work, told))
    has = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_AS, has + BYTES),  # beside torch's own libraries, which take gigabytes of addresses
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_FSIZE, BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    return command()


def _teller(work: Path, told: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook, that notes what a command may not do."""
    mine = tuple(str(work / folder) + os.sep for folder in ("run/o", "tmp"))
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
    starts = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.bind"}

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in starts or (event == "import" and args[0] == "boom"):
            os.write(told, f"{event} {args[0]}\n".encode())
        elif (event == "open" and isinstance(args[2], int) and args[2] & writes) or event in changes:
            path = args[0]
            if isinstance(path, int) or (event.startswith("os.") and args[-1] not in (-1, 0o777, 0o700)):
                return  # of a descriptor, as rmtree has it: what stays is seen in the folders
            path = os.path.abspath(os.fsdecode(path))
            if path != os.devnull and not f"{path}{os.sep}".startswith(mine):
                os.write(told, f"{event} {path}\n".encode())

    return hook


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    found = ((p.relative_to(folder).as_posix(), p.lstat()) for p in folder.rglob("*"))
    return {p: (0, 0) if stat.S_ISDIR(s.st_mode) else (s.st_size, s.st_mtime_ns) for p, s in found}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [p for p in sorted(before.keys() | after.keys()) if before.get(p) != after.get(p)]


def fuzz(name: str, given: Given, more: Callable[[], bool], seed: int, work: Path) -> Counter[str]:
    """Runs a format's mutations while `more`, and prints what is wrong; how many were taken, refused and wrong."""
    counts: Counter[str] = Counter()
    while more():
        wrong, text, said = tried(name, given, seed, work)
        counts["wrong" if wrong else "refused" if "error: " in said.lower() else "taken"] += 1
        if wrong:
            print(f"{name} {seed}: {wrong}\n---- {given.file}\n{text if len(text) < 6000 else ''}", flush=True)
        seed += 1
    return counts
