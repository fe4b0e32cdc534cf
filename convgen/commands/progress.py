"""What a command is doing, on the terminal of someone who waits: after two seconds, and gone when it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

AFTER_S = 2.0
Tell = Callable[[str], None]


class Shown:
    """A line on a terminal with a text and how long it takes, from some seconds on.

    Args:
        console: rich's, on a terminal.
        after_s: seconds from now.
    """

    def __init__(self, console: Any, after_s: float) -> None:
        self._console, self._due = console, time.monotonic() + after_s
        self._lock = threading.RLock()
        self._text, self._line, self._timer = "", None, None
        self._started = time.monotonic()

    def tell(self, text: str) -> None:
        """Says a text from now on; "" takes the line away, and its thread: a process may be forked then."""
        with self._lock:
            self._text = text
            if not text:
                self._hide()
            elif self._line is not None:
                self._line.update(self._line.task_ids[0], description=text)
            elif self._timer is None:
                self._timer = threading.Timer(max(self._due - time.monotonic(), 0.0), self._show)
                self._timer.daemon = True
                self._timer.start()

    def _show(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            self._timer = None
            if not self._text or self._line is not None:
                return
            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            self._line = Progress(*columns, console=self._console, transient=True)
            task = self._line.add_task(self._text, total=None)
            self._line.tasks[task].start_time = self._started
            self._line.start()

    def _hide(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line is not None:
            self._line.stop()
            self._line = None


@contextmanager
def progress(text: str = "", *, console: Any = None, after_s: float = AFTER_S) -> Generator[Tell]:
    """Gives a function that takes what is done now; nothing is written where stderr is no terminal.

    Args:
        console: rich's; by default that of stderr.
    """
    if console is None:
        from rich.console import Console

        console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda text: None
        return
    shown = Shown(console, after_s)
    shown.tell(text)
    try:
        yield shown.tell
    finally:
        shown.tell("")
