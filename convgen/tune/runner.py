"""The tuner's side of the measuring process: requests with a time limit, and a new process where one hung or died."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from convgen.errors import InputError, InternalError
from convgen.interrupts import unheard
from convgen.kernels.problem import Problem
from convgen.spec.target import Target
from convgen.tune.candidates import Candidate, digest
from convgen.tune.key import key_of
from convgen.tune.patience import waited
from convgen.tune.replay import module_of
from convgen.tune.worker import STRAY, forks, serve

START_S = 180.0  # importing torch, and making operands
END_S = 60.0  # seconds for an aborted process to be gone: the system may write its memory to disk first


class Lost(Exception):
    """The measuring process did not answer: `cause` is hung or crashed."""

    def __init__(self, cause: str, said: str) -> None:
        super().__init__(said)
        self.cause, self.said = cause, said


class Runner:
    """Measures on this machine's device, in a process of its own.

    Args:
        threads: how many a CPU computes with.
        limit_s: seconds that a candidate may run while it is checked and timed, beyond a thousand times ATen's time;
            what else the machine does does not count, see patience.py.
    """

    def __init__(self, target: Target, threads: int, limit_s: float = 30.0) -> None:
        self.target, self.threads, self.limit_s = target, threads, limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="convgen-tune-")
        self._log = Path(self._folder.name) / "worker.log"
        self._process: tuple[Any, Any] | None = None
        self._problem: Problem | None = None
        self._text, self._aten_s, self._number = "", 0.0, 0

    def open(self, problem: Problem) -> dict[str, float]:
        """Turn to a problem. Returns microseconds of ATen's ways by name, estimated.

        Raises:
            Lost: ATen, or the code that makes the operands, hung or crashed.
            InputError: there are no operands for it.
        """
        self._problem = None
        name = f"untuned_{digest(key_of(problem))}"
        text = module_of(problem, name) if self.target.is_cpu else ""
        if text is None:
            raise InputError("no layer of one rank has this problem", hint="it keeps its default kernel")
        found = self._ask("open", problem, text, 0, limit_s=START_S)["aten_us"]
        self._problem, self._text = problem, text
        self._aten_s = min(found.values(), default=0.0) * 1e-6
        return found

    def attempt(self, candidate: Candidate, best_us: float) -> dict[str, Any]:
        """Check and time a candidate: `us` and `error`, or `cause` and `said`."""
        try:
            self._reopen()
            limit = self.limit_s + 1e3 * self._aten_s
            return self._ask("attempt", candidate.label, candidate.text, best_us, limit_s=limit)
        except Lost as lost:
            return {"cause": lost.cause, "said": lost.said}

    def race(
        self,
        found: list[Candidate],
        rounds: int,
        seed: int,
        seconds: float,
        calls: int = 0,
        gains: tuple[float, ...] = (),
    ) -> dict[str, Any]:
        """Check candidates on other operands and time them and ATen in turn, as the benches' `race` says.

        Raises:
            Lost: the process hung or crashed on one of them, which one is not known.
        """
        if not forks(self.target, self.threads):
            self._drop()  # a new process: what a candidate did to the old one ends with it
        self._reopen()
        limit = START_S + seconds + (len(found) + 4) * (self.limit_s + 1e3 * self._aten_s)
        kernels = tuple((c.label, c.text) for c in found)
        return self._ask("race", kernels, rounds, seed, seconds, calls, gains, limit_s=limit)

    def module(
        self, candidate: Candidate, rounds: int, seed: int, seconds: float, gains: tuple[float, ...] = ()
    ) -> dict[str, Any]:
        """Race the module with this kernel and the one without, by CpuBench.module. CPUs only.

        Raises:
            Lost: the process hung or crashed.
        """
        self._reopen()
        text = module_of(candidate.problem, f"tuned_{candidate.source}", {candidate.problem.phase: candidate.label})
        limit = START_S + seconds + 4 * (self.limit_s + 1e3 * self._aten_s)
        return self._ask("module", text, rounds, seed, seconds, gains, limit_s=limit)

    def ceilings(self, dtypes: tuple[str, ...]) -> dict[str, Any]:
        """The device's ceilings in these types."""
        return self._ask("ceilings", dtypes, limit_s=START_S)

    def _reopen(self) -> None:
        if self._process is None:
            problem = self._problem
            if problem is None:
                raise InternalError("no problem is open")
            self._ask("open", problem, self._text, 0, limit_s=START_S)

    def _ask(self, *request: Any, limit_s: float) -> dict[str, Any]:
        process, connection = self._process or self._start()
        self._number += 1
        working: int = process.pid
        try:
            connection.send((self._number, *request))
            while waited(connection.poll, working, limit_s):
                number, reply = connection.recv()
                if number != self._number:
                    continue  # the reply to a request that was given up
                if "process" in reply:
                    working = reply["process"]
                    continue
                if "lost" in reply:
                    raise Lost("crashed", self._last_words(reply["lost"]))
                return reply
        except pickle.UnpicklingError:
            self._drop()
            raise Lost("crashed", "it sent something that is no reply") from None
        except (EOFError, OSError):
            process.join(END_S)
            said = self._last_words(process.exitcode)
            self._drop()
            raise Lost("crashed", said) from None
        finally:
            if not process.is_alive():
                self._drop()
        if working != process.pid:
            with suppress(ProcessLookupError):
                os.killpg(working, signal.SIGKILL)
        else:
            self._drop()
        raise Lost("hung", f"did not end within {limit_s:.0f} s")

    def _start(self) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, self.target, self.threads, str(self._log)), daemon=True, name="convgen-measure"
        )
        with unheard():
            process.start()
        theirs.close()
        self._process = process, ours
        return self._process

    def _last_words(self, code: int | None) -> str:
        if code == STRAY:
            return "it forked, and came back twice"
        end = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n") if self._log.exists() else []
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"the process was {end}" + (f": {said[:200]}" if said else "")

    def _drop(self) -> None:
        if self._process is not None:
            process, connection = self._process
            self._process = None
            connection.close()
            process.kill()
            process.join(END_S)
            with suppress(OSError):
                self._log.unlink()

    def close(self) -> None:
        """End the process."""
        self._drop()
        self._folder.cleanup()
