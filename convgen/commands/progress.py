"""What a command is doing, on the terminal of someone who waits: after two seconds, and gone when it is done."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

AFTER_S = 2.0  # since the command began
STEP_S = 0.3  # since what is said began: what takes less would flicker
BEGAN_S = time.monotonic()
Tell = Callable[[str], None]


class Shown:
    """A line on a terminal with a text, and for how long the command has been running.

    Args:
        console: rich's, on a terminal.
        after_s: seconds until it is there.
        prints: what is printed meanwhile goes to the terminal, above the line.
    """

    def __init__(self, console: Any, after_s: float, prints: bool) -> None:
        self._console, self._after_s, self._prints = console, after_s, prints
        self._lock = threading.RLock()
        self._text = ""
        self._line: Any = None
        self._timer: threading.Timer | None = None

    def tell(self, text: str) -> None:
        """Says a text from now on; "" takes the line away, and its thread: a process may be forked then."""
        with self._lock:
            self._text = text
            if not text:
                self._hide()
            elif self._line is not None:
                self._line.update(self._line.task_ids[0], description=text)
            elif self._timer is None:
                self._timer = threading.Timer(self._after_s, self._show)
                self._timer.daemon = True
                self._timer.start()

    def _show(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if threading.current_thread() is not self._timer:
                return  # another has been started since
            self._timer = None
            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            self._line = Progress(
                *columns,
                console=self._console,
                transient=True,
                get_time=time.monotonic,
                redirect_stdout=self._prints,
                redirect_stderr=False,  # others redirect it meanwhile (spec/exported_refusals.py)
            )
            task = self._line.add_task(self._text, total=None)
            self._line.tasks[task].start_time = BEGAN_S
            self._line.start()

    def _hide(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line is not None:
            self._line.stop()
            self._line = None


@contextmanager
def progress(
    text: str = "", *, console: Any = None, after_s: float | None = None, prints: bool = False
) -> Generator[Tell]:
    """Gives a function that takes what is done now; nothing is written where stderr is no terminal.

    Args:
        console: rich's; by default that of stderr.
        after_s: seconds from now until it is said; by default until the command has run for two.
        prints: others may print meanwhile, to the terminal.
    """
    if console is None:
        from rich.console import Console

        console = Console(file=sys.stderr)  # that of now: others may redirect it meanwhile
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda text: None
        return
    after_s = max(BEGAN_S + AFTER_S - time.monotonic(), STEP_S) if after_s is None else after_s
    shown = Shown(console, after_s, prints)
    try:
        shown.tell(text)
        yield shown.tell
    finally:
        shown.tell("")
