"""The first hour on a GPU: what to run, in which order, by one command that survives what the device may do.

    python bench/first_hour.py                    # an hour; the same command goes on where it ended
    python bench/first_hour.py --dry-run          # without a GPU: a fake device that is slow, fails, hangs and dies;
                                                  # networks on the CPU, of which one task hangs and one dies
    python bench/first_hour.py --wheels DIR       # before, with a network: what the machine will need

Stages are processes of their own. One that says nothing for `--stall` seconds is ended and begun again;
bench/kernels.py leaves a candidate out that a process did not survive, and goes on behind what it has. A stage that
ends three times without anything new is given up; so is a task of bench/networks_gpu.py that fails twice. Clocks,
power and temperature are sampled throughout (nvidia-smi, where there is one).

In the folder of results: log.txt (all that was printed), samples.csv, kernels.json, networks.json, table.txt, networks/
with packages, and devices/, where tuned entries are.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import click

BENCH = Path(__file__).resolve().parent
FIRST = ("--chosen", "--networks", "resnet50,vgg16,wrn50_2", "--ways", "4")
WHEELS = ("torch>=2.11", "torchvision", "diffusers")
SAMPLED = "timestamp,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_throttle_reasons.active"
NOTHING_NEW = 3  # runs of a stage in turn after which it is given up
TASK_OF_STALL = 0.9  # of the time in which a stage may say nothing, what a task of a network has
CORES_KEPT = 2  # for the process that times, and its driver


@dataclass(frozen=True)
class Stage:
    """A command that is run until it ends well.

    Attributes:
        state: a file that grows when something new was found, or changes.
        minutes: of the hour, at most.
    """

    name: str
    command: tuple[str, ...]
    state: Path
    minutes: float


def stages(results: Path, minutes: float, stall_s: float, dry: bool) -> list[Stage]:
    """In the order of their worth: problems of all kinds first, networks, tuned entries, then all problems."""
    jobs = str(max(1, (os.cpu_count() or 1) - CORES_KEPT))
    script = "fake_device.py" if dry else "kernels.py"
    measure = (sys.executable, "-u", str(BENCH / script), "--results", str(results / "kernels.json"), "--jobs", jobs)
    layers = str(BENCH.parent / "tuning" / "layers" / "resnet50.csv")
    tune = (
        sys.executable, "-u", "-m", "convgen", "tune", layers, "--partitions", "4", "--dtype", "bfloat16",
        "--memory-format", "channels_last", "--effort", "quick", "--jobs", jobs, "--target", "cuda",
        "--into", str(results / "devices"), "--budget", str(int(minutes * 60 * 0.2)),
    )  # fmt: skip
    state, of_networks = results / "kernels.json", results / "networks.json"
    networks = (
        sys.executable, "-u", str(BENCH / "networks_gpu.py"), "--results", str(of_networks),
        "--timeout", str(TASK_OF_STALL * stall_s), *["--dry-run"] * dry,
    )  # fmt: skip
    first = [
        Stage("chosen problems", (*measure, *FIRST, "--configs", "6"), state, 0.35 * minutes),
        Stage("networks", networks, of_networks, 0.3 * minutes),
    ]
    later = [
        Stage("tuned entries", tune, results / "devices", 0.25 * minutes),
        Stage("all problems", measure, state, minutes),
    ]
    return first if dry else first + later


def facts() -> Iterator[str]:
    """Versions of what is here, before anything can fail."""
    for name in ("torch", "triton", "numpy", "convgen"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        yield subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()


@contextlib.contextmanager
def sampled(path: Path) -> Iterator[None]:
    """While it lasts, a line of clocks and power every five seconds."""
    command = ["nvidia-smi", f"--query-gpu={SAMPLED}", "--format=csv", "-l", "5"]
    try:
        with path.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def supervise(command: Sequence[str], end: float, stall_s: float, say: Callable[[str], None]) -> int | None:
    """Run a command, its lines said as they come; its exit code, None where it was ended.

    Args:
        end: on the monotonic clock, when it is ended at the latest.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        while True:
            patience = min(stall_s, max(0.0, end - time.monotonic()))
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                say(f"-- nothing for {patience:.0f} s: ended")
                return None
            if line is None:
                return process.wait()
            say(line.rstrip("\n"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(1.0)
        if not reader.is_alive():
            process.stdout.close()


def _read(stream: TextIO, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def state_of(path: Path) -> tuple[tuple[str, int], ...]:
    """Files and their sizes, by which something new is seen."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()) if path.exists() else []
    return tuple((str(p), p.stat().st_size) for p in files)


def run_stage(stage: Stage, end: float, stall_s: float, say: Callable[[str], None]) -> bool:
    """Until it ends well, or time is up, or it gets nowhere; whether it ended well."""
    end = min(end, time.monotonic() + stage.minutes * 60)
    idle = 0
    while time.monotonic() < end:
        before = state_of(stage.state)
        say(f"== {stage.name}: {' '.join(stage.command)}")
        code = supervise((*stage.command, *_budget(stage, end)), end, stall_s, say)
        say(f"== {stage.name}: {'ended by force' if code is None else f'exit code {code}'}")
        if code == 0:
            return True
        if code == 2:  # nothing can be measured here
            return False
        idle = idle + 1 if state_of(stage.state) == before else 0
        if idle >= NOTHING_NEW:
            say(f"== {stage.name}: given up, {idle} runs found nothing new")
            return False
    return False


def _budget(stage: Stage, end: float) -> tuple[str, ...]:
    return () if "--budget" in stage.command else ("--budget", str(max(1, int(end - time.monotonic()))))


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--results", type=click.Path(path_type=Path), default=Path("build/first_hour"), show_default=True)
@click.option("--minutes", type=float, default=60.0, show_default=True)
@click.option("--stall", "stall_s", type=float, default=240.0, show_default=True)
@click.option("--dry-run", is_flag=True)
@click.option("--wheels", type=click.Path(path_type=Path), help="Download what is needed into a folder, and end.")
def main(results: Path, minutes: float, stall_s: float, dry_run: bool, wheels: Path | None) -> None:
    if wheels is not None:
        command = [sys.executable, "-m", "pip", "download", "--dest", str(wheels), str(BENCH.parent), *WHEELS]
        sys.exit(subprocess.run(command, check=False).returncode)
    results.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + minutes * 60
    with (results / "log.txt").open("a", encoding="utf-8") as log, sampled(results / "samples.csv"):

        def say(line: str) -> None:
            print(line, flush=True)
            print(time.strftime("%H:%M:%S"), line, file=log, flush=True)

        for line in facts():
            say(line)
        done = [run_stage(stage, end, stall_s, say) for stage in stages(results, minutes, stall_s, dry_run)]
        tables = [
            subprocess.run(
                [sys.executable, str(BENCH / script), "--table", "--results", str(results / file)],
                capture_output=True, text=True, check=False,
            )
            for script, file in (("kernels.py", "kernels.json"), ("networks_gpu.py", "networks.json"))
        ]  # fmt: skip
        (results / "table.txt").write_text("".join(t.stdout + t.stderr for t in tables), encoding="utf-8")
        say(f"the tables are in {results / 'table.txt'}")
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
