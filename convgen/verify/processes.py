"""Real processes on this machine, one for each rank, with torch.distributed and gloo between them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from convgen.interrupts import unheard
from convgen.verify.counting import Sent, count, is_identity
from convgen.verify.program import RankResult, load_module, run_rank

Tell = Callable[[str], None]
START_S = 600.0  # seconds for all ranks to join: on a busy machine they take long, which is not the program's time


class ProcessFailed(RuntimeError):
    """A rank raised or died; the text has the end of each rank's output."""


class TooLate(ProcessFailed):
    """Ranks did not finish in time: they wait for each other, or are slow."""


@dataclass(frozen=True, slots=True)
class RunModule:
    """The program that each process runs: a generated module."""

    path: Path
    given: Mapping[str, Tensor]
    timeout_s: float
    interpret: bool

    def __call__(self, _: int) -> RankResult:
        module = load_module(self.path, interpret=self.interpret)
        sent: list[Sent] = []
        count_calls(module, sent)
        mesh = module.init_mesh(module.DEVICE, timeout=self.timeout_s)
        return run_rank(module, self.given, mesh, sent)


def silent(text: str) -> None:
    """Tell nobody what is going on."""


def run_processes(
    path: Path,
    ranks: int,
    given: Mapping[str, Tensor],
    timeout_s: float,
    interpret: bool = False,
    told: Tell = silent,
) -> list[RankResult]:
    """Run a generated module's ranks as processes; gives their results in rank order."""
    return spawn(RunModule(path, given, timeout_s, interpret), ranks, timeout_s, told)


def how_to_start() -> str:
    """How to start processes: by fork; or by spawn, a fresh interpreter, where autograd has threads, as a torch built
    for GPUs has once it has computed gradients: a forked process could not compute gradients then."""
    for thread in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            if thread.read_text().startswith("pt_autograd"):
                return "spawn"
    return "fork"


def spawn(program: Callable[[int], Any], ranks: int, timeout_s: float = 300.0, told: Tell = silent) -> list[Any]:
    """Start `ranks` processes with a gloo process group and run `program(rank)` in each.

    Processes are forked where that is possible, because a fresh interpreter with torch takes seconds for each rank. A
    child runs on one thread, since the parent's pool of threads does not survive a fork.

    Args:
        program: must pickle where forking is not possible.
        timeout_s: seconds for the program, once all ranks have joined; ranks not done 10 s later are given up.
        told: is called with what is going on; with "" before processes are forked: the teller must have no thread then.
    Raises:
        ProcessFailed: with each failed rank's traceback.
    """
    told("")
    context = cast("Any", multiprocessing.get_context(how_to_start()))
    with tempfile.TemporaryDirectory(prefix="convgen-ranks-") as folder:
        where = Path(folder)
        children: list[Any] = []
        waiting: dict[Any, int] = {}  # pipes of results, which pass through no file
        results: dict[int, bytes] = {}
        try:
            with unheard():
                for rank in range(ranks):
                    answer, pipe = context.Pipe(duplex=False)
                    args = (program, rank, ranks, where, timeout_s, pipe)
                    children.append(context.Process(target=_child, args=args, daemon=True))
                    children[-1].start()
                    pipe.close()  # only the child has it now, so that its end is seen
                    waiting[answer] = rank
            told(f"{ranks} processes run it")
            deadline = time.monotonic() + START_S
            while not all((where / f"{r}.joined").exists() for r in range(ranks)) and time.monotonic() < deadline:
                if any(child.exitcode for child in children):
                    break  # the others wait in vain
                time.sleep(0.005)
            start = time.monotonic()
            deadline = start + timeout_s + 10
            while waiting and (left := deadline - time.monotonic()) > 0:
                for answer in connection.wait([*waiting], left):
                    rank, pipe = waiting.pop(answer), cast("connection.Connection", answer)
                    with pipe, suppress(EOFError, OSError):  # a rank that is gone
                        results[rank] = pipe.recv_bytes()
            for child in children:
                child.join(max(0.0, deadline - time.monotonic()))
            late = [rank for rank, child in enumerate(children) if child.is_alive()]
        finally:  # also after an interrupt
            for child in children:
                if child.is_alive():
                    child.kill()
                    child.join()
        errors = [
            f"rank {r}: {(where / f'{r}.error').read_text()}" for r in range(ranks) if (where / f"{r}.error").exists()
        ]
        errors += [
            f"rank {r}: did not finish in {timeout_s} s; it is here:\n{(where / f'{r}.stack').read_text()}"
            for r in late
        ]
        missing = [r for r in range(ranks) if r not in results]
        if (errors or missing) and time.monotonic() - start >= timeout_s:
            raise TooLate("\n".join(errors) or f"ranks {missing} died without a result")
        if errors or missing:
            raise ProcessFailed("\n".join(errors) or f"ranks {missing} died without a result")
        return [pickle.loads(results[r]) for r in range(ranks)]


def _child(
    program: Callable[[int], Any], rank: int, ranks: int, where: Path, timeout_s: float, answer: connection.Connection
) -> None:
    torch.set_num_threads(1)
    stack = (where / f"{rank}.stack").open("w")
    faulthandler.dump_traceback_later(START_S, file=stack)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{where / 'store'}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=START_S),
        )
        (where / f"{rank}.joined").touch()
        faulthandler.dump_traceback_later(timeout_s + 5, file=stack)
        answer.send_bytes(pickle.dumps(program(rank)))
        dist.barrier()  # pyright: ignore[reportUnknownMemberType]  torch leaves device_ids untyped
        dist.destroy_process_group()
    except BaseException:
        (where / f"{rank}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def count_calls(module: ModuleType, sent: list[Sent]) -> None:
    """Put a counter between a module and torch.distributed: a subclass of the module's transport that counts calls."""

    class Counting(module.TorchTransport):
        """Counts the module's calls; a call within a collective is part of it."""

        inside = False

        def _counted(self, kind: str, tensor: Tensor, splits: Any, group: Any) -> Tensor:
            run = getattr(super(), kind)
            if self.inside or is_identity(tensor):
                return run(tensor, splits, group)
            sent.append(count(kind, tensor, splits, group.ranks, self.rank, getattr(self, "lane", "")))
            self.inside = True
            try:
                return run(tensor, splits, group)
            finally:
                self.inside = False

        @contextmanager
        def as_one(self, kind: str, tensor: Tensor, splits: Any, group: Any, lane: str) -> Generator[None]:
            """Count the messages inside as one collective."""
            sent.append(count(kind, tensor, splits, group.ranks, self.rank, lane))
            self.inside = True
            try:
                yield
            finally:
                self.inside = False

        def all_gather(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
            return self._counted("all_gather", tensor, splits, group)

        def reduce_scatter(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
            return self._counted("reduce_scatter", tensor, splits, group)

        def all_reduce(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
            return self._counted("all_reduce", tensor, splits, group)

        def all_to_all(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
            return self._counted("all_to_all", tensor, splits, group)

        def exchange(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
            return self._counted("exchange", tensor, splits, group)

    # Put it where the module looks it up: in itself, or in the runtime beside it.
    vars(sys.modules[module.TorchTransport.__module__])["TorchTransport"] = Counting
