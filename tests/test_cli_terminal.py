"""The command line as someone at a terminal meets it: progress, completion, Ctrl-C, and without torch."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import CompletionItem, ShellComplete
from rich.console import Console

from convgen.commands.main import cli
from convgen.commands.progress import progress
from convgen.verify.processes import spawn
from convgen.verify.virtual import World

ROOT = Path(__file__).resolve().parent.parent
LAYER = ROOT / "examples" / "res5a_branch2b.yaml"
WAIT_S = 600  # for what surely comes


def python(code: str, *words: object, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **how)


# ---- Progress ----


class Screen(io.StringIO):
    """What is drawn; `drawn` is set when its first word is."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if "first" in self.getvalue():  # behind what hides the cursor
            self.drawn.set()
        return count


def console(screen: Screen, kind: str = "xterm", **how: Any) -> Console:
    return Console(file=screen, width=80, legacy_windows=False, _environ={"TERM": kind}, **how)


def test_a_line_on_a_terminal_is_gone_afterwards() -> None:
    screen, threads = Screen(), threading.active_count()
    with progress("first", console=console(screen, force_terminal=True), after_s=0.0, prints=True) as tell:
        assert screen.drawn.wait(WAIT_S) and "first" in screen.getvalue()
        tell("second")
        print("between")
    text = screen.getvalue()
    assert "between\n" in text
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, the line is empty
    assert threading.active_count() == threads


@pytest.mark.parametrize(("terminal", "kind"), [(False, "xterm"), (True, "dumb")])
def test_nothing_where_nobody_looks(terminal: bool, kind: str) -> None:
    screen, threads = Screen(), threading.active_count()
    with progress("first", console=console(screen, kind, force_terminal=terminal), after_s=0.0) as tell:
        tell("second")
        assert threading.active_count() == threads  # nobody would draw
    assert screen.getvalue() == ""


def test_what_is_done_at_once_shows_nothing() -> None:
    screen = Screen()
    with progress("first", console=console(screen, force_terminal=True), after_s=WAIT_S) as tell:
        tell("second")
    assert screen.getvalue() == ""


def test_no_thread_is_left_when_processes_are_forked() -> None:
    screen, threads = Screen(), threading.active_count()
    before: list[int] = []
    with progress("first", console=console(screen, force_terminal=True), after_s=0.0) as tell:
        assert screen.drawn.wait(WAIT_S)

        def told(text: str) -> None:
            tell(text)
            if not text:
                before.append(threading.active_count())

        assert spawn(lambda rank: rank, 2, told=told) == [0, 1]
    assert before == [threads]


# ---- Completion ----


def completed(*words: str) -> list[CompletionItem]:
    *given, last = words
    return ShellComplete(cli, {}, "convgen", "_CONVGEN_COMPLETE").get_completions(given, last)


def test_names_are_completed() -> None:
    def values(*words: str) -> list[str]:
        return [one.value for one in completed(*words)]

    assert values("sim") == ["simulate"]
    assert values("plan", "x.yaml", "--machine", "la") == ["lassen", "lassen_lbann"]
    assert "cpu" in values("compile", "x.yaml", "--machine", "")
    assert values("check", "x.yaml", "--algorithm", "stationary-") == [f"stationary-{k}" for k in "xyw"]
    assert "auto" in values("simulate", "x.yaml", "--algorithm", "")
    assert values("explain", "x.yaml", "--grid", "N=2,") == [f"N=2,{k}=" for k in "DHWCFG"]
    assert values("compile", "x.yaml", "--target", "s") == ["sw26010"]
    for command in ("check", "compile", "explain", "simulate", "plan", "tune", "network", "import"):
        assert [one.type for one in completed(command, "exam")] == ["file"], command
    assert [one.type for one in completed("plan", "x.yaml", "--machine", "mine.y")] == ["file"]


# ---- Ctrl-C ----

STUCK = """
import os, signal, sys
from pathlib import Path
from convgen.commands.main import main
from convgen.verify import check, processes

folder = Path(sys.argv[1])

def stuck(rank):
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    signal.pause()  # an interrupt that it heard would end it, with a traceback

check.run_processes = lambda *given: processes.spawn(stuck, 3)
sys.argv = ["convgen", "check", "examples/res5a_branch2b.yaml", "--processes"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # which who is started in the background doesn't have
main()
"""


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def test_an_interrupt_ends_all_processes_without_a_word(tmp_path: Path) -> None:
    running = python(STUCK, tmp_path, start_new_session=True)
    files = [tmp_path / f"{rank}.pid" for rank in range(3)]
    while running.poll() is None and not all(f.exists() and f.read_text() for f in files):
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all of them
    out, err = running.communicate(timeout=WAIT_S)
    assert (running.returncode, out, err) == (130, "", "interrupted\n")
    assert all(gone(int(f.read_text())) for f in files)


def test_an_interrupt_ends_virtual_ranks() -> None:
    there, left = threading.Event(), threading.Event()
    ended: list[int] = []

    def program(end: Any) -> None:
        try:
            if end.rank == 0:
                assert there.wait(WAIT_S)
                os.kill(os.getpid(), signal.SIGINT)
                end.meet(b"x", (0, 1))()  # for one that never comes
            else:
                there.set()
                assert left.wait(WAIT_S)
        finally:
            ended.append(end.rank)
            left.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background hear none
    try:
        with pytest.raises(KeyboardInterrupt):
            World(2).run(program)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1]


# ---- Without torch ----

HIDDEN = "import sys\nsys.modules['torch'] = None\nfrom convgen.commands.main import main\nmain()"
WITHOUT = (
    ("import", "examples.resnet:small_resnet", "--input", "8,3,32,32", "-o", "{}/x.yaml"),
    ("check", str(LAYER)),
    ("tune", str(LAYER)),
    ("plan", "examples/networks/alexnet.yaml", "--machine", "lassen", "--ranks", "4"),
    ("simulate", str(LAYER), "--machine", "cpu"),
    ("compile", "examples/networks/alexnet.yaml", "--grid", "N=2", "-o", "{}"),
    ("explain", "examples/networks/alexnet.yaml", "--grid", "N=2"),
    ("calibrate", "-o", "{}/m.yaml"),
)


@pytest.mark.parametrize("words", WITHOUT, ids=lambda words: words[0])
def test_what_wants_torch_says_so(words: tuple[str, ...], tmp_path: Path) -> None:
    given = [word.format(tmp_path) for word in words]
    running = python(HIDDEN, *given, env={**os.environ, "WORLD_SIZE": "2"})
    out, err = running.communicate(timeout=WAIT_S)
    assert running.returncode == 2 and out == "", err
    fact, hint = err.splitlines()
    assert fact.startswith("error: ") and "torch" in fact.lower()
    assert hint == "  try     pip install torch, or pip install '.[torch]' in a checkout of convgen"
    assert not list(tmp_path.iterdir())


def test_what_needs_no_torch_works_without(tmp_path: Path) -> None:
    for words in (
        ("compile", LAYER, "-o", tmp_path),
        ("explain", LAYER),
        ("network", "examples/networks/alexnet.yaml"),
    ):
        running = python(HIDDEN, *words)
        out, err = running.communicate(timeout=WAIT_S)
        assert running.returncode == 0 and out, err
