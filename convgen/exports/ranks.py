"""Ranks agree on who exports and compiles: each says what it wants and whether it has it, in one message by the store
that the process group was made with. Of the ranks that share a cache one works, and the others take what it has kept.

No rank trusts another's results: only hashes and the words of errors travel.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from convgen.errors import InputError, Note
from convgen.knobs import cache_folder
from convgen.spec.text import one_line

BEAT_S = 2.0  # seconds between signs of life of a rank that works
SILENT_S = 60.0  # after so many seconds without one, a rank is taken for gone
POLL_S = (0.01, 0.5)  # the first pause between looks, and the longest, to which pauses grow by half

numbers: Counter[tuple[int, ...]] = Counter()  # how many meetings these ranks have had


class State(NamedTuple):
    """A rank's message.

    Args:
        wanted: the hash of the question; "" if the rank must answer it itself.
        has: whether the rank's cache has the answer.
        cache: the identity of that cache.
    """

    wanted: str
    has: bool
    cache: str


def cache_identity(rank: int) -> str:
    """The identity of this rank's cache, equal for ranks that read and write the same one."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError:
        return f"none of rank {rank}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"none of rank {rank}"
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {facts.st_dev} {facts.st_ino} {os.geteuid()}"


class Meeting:
    """A meeting of ranks that need the same answer.

    Args:
        name: the name of what they need, for messages.
        ranks: all ranks that take part, this one among them.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        import torch.distributed as dist

        world: Any = dist.distributed_c10d
        self.name, self.ranks, self.rank = name, tuple(sorted(ranks)), dist.get_rank()
        self.store: Any = world._get_default_store()
        said = hashlib.sha256(f"{self.ranks} {numbers[self.ranks]}".encode()).hexdigest()[:20]
        numbers[self.ranks] += 1
        self.key = f"convgen exports {said}"

    def states(self, mine: State) -> list[State]:
        """The messages of all ranks, in the ranks' order.

        Raises:
            TimeoutError: some did not come within the process group's time.
        """
        self.store.set(f"{self.key} {self.rank}", json.dumps(mine))
        keys = [f"{self.key} {rank}" for rank in self.ranks]
        limit: timedelta = self.store.timeout
        try:
            self.store.wait(keys, limit)
        except Exception as error:
            absent = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self.store.check([key])]
            who = f"ranks {absent} did not come: rank {self.rank} did not meet all of ranks {list(self.ranks)}"
            raise TimeoutError(f"{self.name}: {who}: {error}") from error
        together = self.store.has_extended_api()
        found = self.store.multi_get(keys) if together else [self.store.get(key) for key in keys]
        return [State(*json.loads(one)) for one in found]

    def workers(self, states: Sequence[State]) -> list[int]:
        """The ranks that work: the first of each cache that lacks the answer. None if no rank lacks it, or if all must
        work by themselves, as they want different things."""
        if len({one.wanted for one in states}) > 1 or not states[0].wanted:
            return []
        first: dict[str, int] = {}
        for rank, one in zip(self.ranks, states, strict=True):
            if not one.has:
                first.setdefault(one.cache, rank)
        return sorted(first.values())

    def work(self, what: Callable[[], Any]) -> Any:
        """Do the work for which the others wait, and tell them how it went."""
        done, stop = f"{self.key} done {self.rank}", threading.Event()

        def beat() -> None:
            n = 0
            while not stop.wait(BEAT_S):
                n += 1
                with suppress(Exception):
                    self.store.set(f"{self.key} beat {self.rank}", str(n))

        threading.Thread(target=beat, daemon=True).start()
        words = {"kind": "error", "fact": "it ended"}
        try:
            found = what()
            words = {}
            return found
        except BaseException as error:
            words = _words(error)
            raise
        finally:
            stop.set()
            self.store.set(done, json.dumps(words))

    def wait(self, workers: Sequence[int]) -> None:
        """Wait until all ranks that work are done.

        Raises:
            InputError: one of them has raised it.
            RuntimeError: one of them has raised another error.
            TimeoutError: one of them gives no sign of life.
        """
        for rank in workers:
            if rank != self.rank:
                self._wait(rank)
        for rank in workers:
            if rank != self.rank:
                _raise(self.name, rank, json.loads(self.store.get(f"{self.key} done {rank}")))

    def _wait(self, rank: int) -> None:
        done, beat = f"{self.key} done {rank}", f"{self.key} beat {rank}"
        last, heard, pause = b"", time.monotonic(), POLL_S[0]
        while not self.store.check([done]):
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_S[1])
            now: bytes = self.store.get(beat) if self.store.check([beat]) else b""
            if now != last:
                last, heard = now, time.monotonic()
            elif time.monotonic() - heard > SILENT_S:
                fact = (
                    f"ranks [{rank}] did not come: rank {rank} exports and compiles for rank {self.rank} and others, "
                )
                raise TimeoutError(f"{self.name}: {fact}and has given no sign of life for {SILENT_S:.0f} s")


def _words(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, InputError):
        return {"kind": "error", "fact": one_line(f"{type(error).__name__}: {error}", 500)}
    notes = [(note.label, note.text) for note in error.notes]
    return {"kind": "input", "fact": error.fact, "notes": notes, "hint": error.hint, "where": error.where}


def _raise(name: str, rank: int, words: dict[str, Any]) -> None:
    if not words:
        return
    if words["kind"] == "input":
        notes = tuple(Note(label, text) for label, text in words["notes"])
        notes = (*notes, Note("rank", f"{rank} found this; it exports and compiles for the others"))
        raise InputError(words["fact"], notes=notes, hint=words["hint"], where=words["where"])
    raise RuntimeError(f"{name}: rank {rank}, which exports and compiles for the others, failed: {words['fact']}")
