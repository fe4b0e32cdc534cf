"""A line on the terminal that says what a command is doing: it appears after two seconds, and is gone at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

AFTER_S = 2.0  # from the command's beginning to the first text
STEP_S = 0.3  # from a text's beginning until it is shown: shorter work would make it flicker
TICK_S = 0.1
BEGAN_S = time.monotonic()
Tell = Callable[[str], None]


class Shown:
    """A line on a terminal with a text, and with the seconds that the command has been running.

    A thread draws it, and ends when the line goes: processes are forked only while no line is shown.

    Args:
        console: rich's, on a terminal.
        after_s: seconds until the line is shown.
        prints: whether what is printed meanwhile goes to the terminal, above the line.
    """

    def __init__(self, console: Any, after_s: float, prints: bool) -> None:
        self._console, self._after_s, self._prints = console, after_s, prints
        self._text, self._end = "", threading.Event()
        self._thread: threading.Thread | None = None

    def tell(self, text: str) -> None:
        """Show a text from now on; "" takes the line away."""
        self._text = text
        if not text and self._thread is not None:
            self._end.set()
            self._thread.join()
            self._thread = None
        elif text and self._thread is None:
            self._end = threading.Event()
            self._thread = threading.Thread(target=self._draw, args=(self._end,), daemon=True)
            self._thread.start()

    def _draw(self, end: threading.Event) -> None:
        if end.wait(self._after_s):
            return
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        line = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            get_time=time.monotonic,
            redirect_stdout=self._prints,
            redirect_stderr=False,  # others redirect it meanwhile (spec/exported_refusals.py)
        )
        task = line.add_task(self._text, total=None)
        line.tasks[task].start_time = BEGAN_S
        with line:
            while not end.wait(TICK_S):
                line.update(task, description=self._text, refresh=True)


@contextmanager
def progress(
    text: str = "", *, console: Any = None, after_s: float | None = None, prints: bool = False
) -> Generator[Tell]:
    """A context that gives a function to say what is done now; nothing is written if stderr is no terminal.

    Args:
        console: rich's; by default that of stderr.
        after_s: seconds from now until a text is shown; by default until the command has run for two seconds.
        prints: whether others may print to the terminal meanwhile.
    """
    if console is None:
        from rich.console import Console

        console = Console(file=sys.stderr)  # today's stderr, as others may redirect it meanwhile
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
