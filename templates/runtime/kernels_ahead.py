# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# (what torch and Triton leave untyped or private)
"""A GPU's kernels are compiled before they are launched, by separate processes, and each kernel once a node.

A rank runs the steps of a call and of its backward pass on tensors without memory (foreseen.py) and notes which kernels
they launch; those are compiled, with the types, constants and alignments of the launches. Processes, ranks of a node
and later starts share Triton's cache; a lock on a kernel's number keeps two processes from compiling the same one.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SAID_S = 5.0  # between two lines of progress
FUTURE = "from __future__ import annotations"
RECORDING = threading.Lock()  # one thread at a time replaces modules' `launch`


class KernelsCompiled(NamedTuple):
    """How many of the kernels of a call and of its backward pass were compiled, and how many were in the cache.

    Attributes:
        compiled: kernels that this rank's processes compiled.
        found: kernels that were in Triton's cache, where an earlier start or another rank of the node had put them.
    """

    compiled: int
    found: int


class KernelLaunch(NamedTuple):
    """A launch of a kernel, as its module asks for it."""

    module: Any
    function: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def kind(self) -> str:
        """The key of its machine code: launches with equal keys run the same. Made of the function's text, the
        arguments' types, the constants and what Triton specializes integers on."""
        found: list[str] = [self.function.cache_key]
        for parameter, value in zip(self.function.params, self.args, strict=False):
            found.append(_kind_of(value, parameter.is_constexpr, parameter.do_not_specialize))
        return " ".join([*found, *(f"{name}={value}" for name, value in sorted(self.constants.items()))])


def _kind_of(value: Any, constant: bool, any_number: bool) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.data_ptr() % 16}"
    if constant or type(value) is not int:
        if hasattr(value, "block_shape"):
            rounds = getattr(value, "round_f32_to_tf32", False)
            return f"boxes {value.base.dtype} {list(value.block_shape)} {value.padding} {rounds}"
        return repr(value)
    wide = not -(2**31) <= value < 2**31
    return f"int {wide}" if any_number else f"int {wide} {value == 1} {value % 16 == 0}"


class Launched:
    """Stands in the place of a kernel and notes its launches."""

    def __init__(self, module: Any, function: Any, found: list[KernelLaunch]) -> None:
        self.module, self.function, self.found = module, function, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.found.append(KernelLaunch(self.module, self.function, args, constants))


@contextmanager
def launches_of(modules: Iterable[Any]) -> Generator[list[KernelLaunch]]:
    """Note this thread's launches of these modules' kernels and don't run them; other threads' launches run as
    usual."""
    found, me = list[KernelLaunch](), threading.get_ident()

    def recording(module: Any, run: Callable[..., None]) -> Callable[..., None]:
        def launch(function: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
            mine = threading.get_ident() == me
            run(Launched(module, function, found) if mine else function, grid, *args, **constants)

        return launch

    with RECORDING:
        before = [(module, module.launch) for module in modules]
        try:
            for module, run in before:
                module.launch = recording(module, run)
            yield found
        finally:
            for module, run in before:
                module.launch = run


class KernelsAhead:
    """Compiles a package's kernels before they are launched.

    Args:
        name: the network's, for messages.
        modules: they hold the kernels, and each has a `launch`.
    """

    def __init__(self, name: str, modules: Sequence[Any]) -> None:
        self.name, self.modules = name, tuple(modules)

    def of_call(self, run: Callable[[], object]) -> list[KernelLaunch]:
        """One launch of each kernel that `run` launches; it runs steps on tensors without memory."""
        with launches_of(self.modules) as found:
            run()
        return list({launch.kind: launch for launch in found}.values())

    def compiled(self, launches: Sequence[KernelLaunch], processes: int, says: bool) -> KernelsCompiled:
        """Compile kernels that are not in Triton's cache.

        Args:
            processes: the most to start; 0 starts one for each core that this rank may use.
            says: whether progress is written to stderr.
        Raises:
            RuntimeError: there is no GPU, a kernel does not compile, or the processes died.
        """
        target, (turn, ranks) = this_target(self.name, self.modules[0].triton), on_this_node()
        if not launches:
            return KernelsCompiled(0, 0)
        processes = min(processes or shared_cores(ranks), len(launches))
        began, said = time.monotonic(), time.monotonic()
        compiled, found, total = 0, 0, len(launches)
        if says:
            print(f"{self.name}: {total} kernels in {processes} processes", file=sys.stderr, flush=True)
        with tempfile.TemporaryFile() as log:
            work = subprocess.Popen(
                [sys.executable, "-c", f"{FUTURE}\n{inspect.getsource(compile_given)}\n\ncompile_given()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
            with work as process:
                assert process.stdin is not None and process.stdout is not None
                try:
                    process.stdin.write(_work(launches, target, processes, turn / ranks))
                    process.stdin.close()
                    for line in process.stdout:
                        number, how, why = json.loads(line)
                        if how == "failed":
                            launch = launches[number]
                            kernel = f"{launch.function.fn.__name__} of {launch.module.__name__.rpartition('.')[2]}"
                            raise RuntimeError(f"{self.name}: {kernel} does not compile: {why}")
                        compiled, found = compiled + (how == "compiled"), found + (how == "found")
                        if says and time.monotonic() - said > SAID_S:
                            said = time.monotonic()
                            print(f"{self.name}: {compiled + found} of {total} kernels", file=sys.stderr, flush=True)
                    code = process.wait()
                finally:
                    process.kill()
            if compiled + found < total:
                log.seek(0)
                last = log.read().decode(errors="replace").strip().splitlines()[-5:]
                raise RuntimeError(
                    f"{self.name}: processes that compile kernels ended with {code} after {compiled + found} of "
                    f"{total} kernels: {' | '.join(last)}; fewer processes= take less memory, and what is not compiled "
                    "is compiled when it is launched"
                )
        if says:
            took = time.monotonic() - began
            text = f"{self.name}: {compiled} kernels compiled, {found} found in Triton's cache, {took:.0f} s"
            print(text, file=sys.stderr, flush=True)
        return KernelsCompiled(compiled, found)


def this_target(name: str, triton: Any) -> Any:
    """Triton's GPUTarget of this process's device.

    Raises:
        RuntimeError: this process sees no GPU.
    """
    try:
        return triton.runtime.driver.active.get_current_target()
    except Exception as error:
        raise RuntimeError(f"{name}: no GPU to compile kernels for: {error}") from error


def on_this_node() -> tuple[int, int]:
    """This rank's number on its node, and how many ranks the node has: as torchrun says, else one rank for each GPU."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", min(world, torch.cuda.device_count()))))
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0)) % ranks, ranks


def shared_cores(ranks: int) -> int:
    """How many cores of this node one rank gets where so many ranks share it; no more than this process may use."""
    return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks))


class _Work(pickle.Pickler):
    """Pickles launches; of a tensor it writes the type and where the first element lies within 16 bytes."""

    def persistent_id(self, obj: Any) -> Any:
        return (obj.dtype, obj.data_ptr() % 16 // obj.element_size()) if isinstance(obj, Tensor) else None


def _work(launches: Sequence[KernelLaunch], target: Any, processes: int, turn: float) -> bytes:
    modules = {m.__name__: (m.__file__, inspect.getsource(m)) for m in (launch.module for launch in launches)}
    each = [
        (launch.module.__name__, launch.function.fn.__name__, launch.args, launch.constants, _number(launch.kind))
        for launch in launches
    ]
    raw = io.BytesIO()
    pickle.dump([*sys.path], raw)
    _Work(raw).dump((modules, each, (target.backend, target.arch, target.warp_size), processes, turn))
    return raw.getvalue()


def _number(kind: str) -> int:
    """A kernel's number, which processes lock; it is the same in all processes."""
    return int.from_bytes(hashlib.sha256(kind.encode()).digest()[:7])


def compile_given() -> None:
    """The program of a process that compiles kernels: it has this function's text alone, and reads its work from stdin.

    It neither needs nor opens a GPU. Once torch and Triton are imported it forks worker processes. Each worker goes
    through the list from a place of its own, compiles the kernels that nobody has locked, and at last waits for the
    others.
    """
    import fcntl
    import json
    import linecache
    import mmap
    import os
    import pickle
    import sys
    import traceback
    import types
    from contextlib import suppress

    class Read(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            import torch

            dtype, first = pid
            return torch.empty(first + 1, dtype=dtype, device="meta")[first:]

    raw: Any = sys.stdin.buffer
    sys.path[:] = pickle.load(raw)
    modules, launches, target, processes, turn = Read(raw).load()

    for name, (file, text) in modules.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = file
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where Triton reads sources
        exec(compile(text, file, "exec"), vars(module))
    triton: Any = vars(sys.modules[next(iter(modules))])["triton"]

    class Elsewhere:
        """Stands in the place of Triton's driver for a device that this process does not open."""

        def get_current_target(self) -> Any:
            return triton.backends.compiler.GPUTarget(*target)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    triton.runtime.driver.set_active(Elsewhere())
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    triton.knobs.compilation.listener = listen
    folder = triton.knobs.cache.dir
    os.makedirs(folder, exist_ok=True)
    done = mmap.mmap(-1, len(launches))  # shared by all processes: a byte for each kernel, 1 once it is done

    def say(number: int, how: str, why: str = "") -> None:
        os.write(1, json.dumps([number, how, why]).encode() + b"\n")  # short enough to come in one piece

    def prepare(number: int, locks: int, waits: bool) -> None:
        name, function, args, constants, lock = launches[number]
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, lock)
        except BlockingIOError:
            return
        except OSError:  # a file system without locks: some kernels may be compiled twice
            pass
        try:
            if done[number]:
                return
            hits.clear()
            kernel = getattr(sys.modules[name], function)
            kernel.warmup(*args, grid=(1,), **constants)
            done[number] = 1
            say(number, "found" if all(hits) else "compiled")
        except Exception as error:
            done[number] = 1
            say(number, "failed", " ".join(f"{type(error).__name__}: {error}".split())[:1500])
        finally:
            with suppress(OSError):
                fcntl.lockf(locks, fcntl.LOCK_UN, 1, lock)

    def go_through(part: float) -> None:
        count = len(launches)
        order = [(int(part * count) + k) % count for k in range(count)]
        locks = os.open(os.path.join(folder, "convgen.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        for waits in (False, True):
            for number in order:
                if not done[number]:
                    prepare(number, locks, waits)

    children: list[int] = []
    for k in range(processes):
        child = os.fork()
        if not child:
            try:
                go_through((k + turn) / processes)
                os._exit(0)
            except BrokenPipeError:  # nobody listens any more
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))
