"""Networks on one GPU, whole: right or not, and their step, eager and as one CUDA graph, beside torch's own.

    python bench/networks_gpu.py [--networks resnet50 unet kl_decoder] [--results build/networks_gpu.json]
    python bench/networks_gpu.py --dry-run      # without a GPU: small, on the CPU, and two tasks that hang and die
    python bench/networks_gpu.py --table        # of what is there

Tasks of a network are processes of their own, with a time-out: one that hangs, or takes the device with it, costs no
other's result, which is written when it is there. The same command goes on behind what it has, and tries what failed
once more.

    package   import and compile, one rank, bfloat16; seconds
    kernels   those of a step, compiled before it; seconds
    check     outputs and gradients beside the module's in float64 on the device, and beside the module's own error
    WAY       a step in this way and one of the module with channels last, in turn: ms of both, and on the host; MiB
              beyond what was allocated before
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from options import options
from step_traffic import NETWORKS
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of, load_package, runtime_of, write_package
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.spec.target import CPU, read_target

SIZES = {"resnet50": (64, 224), "unet": (16, 256), "kl_decoder": (1, 512)}  # samples, rows
SMALL = {"resnet50": (2, 64), "unet": (2, 32), "kl_decoder": (1, 32)}
BESIDE = "torch channels last"
WAYS = ("torch", "torch graphed", "convgen", "convgen graphed")
TASKS = ("package", "kernels", "check", *WAYS)
WANT_PACKAGE = ("kernels", "check", "convgen", "convgen graphed")
FATES = {("unet", "torch graphed"): "hangs", ("unet", "kernels"): "dies"}  # in the dry run
HANGS_S = 5.0
TRIES = 2
ROUNDS, STEPS = 12, 5  # of a way, and in a round
SLACK = 10.0  # times the module's own error
FLOOR = 16 * 2.0**-8  # 16 unit roundoffs of bfloat16
LEAST = 1e-3  # gradients that vanish but for rounding are measured by the largest


# ---- A task, in its process ----


class Task:
    """What tasks of a network have in common."""

    def __init__(self, args: Namespace, name: str) -> None:
        self.name, self.dry = name, args.dry_run
        self.device = torch.device("cpu" if self.dry else "cuda")
        self.dtype = torch.float32 if self.dry else torch.bfloat16
        self.samples, self.rows = (SMALL if self.dry else SIZES)[name]
        self.folder = Path(args.results).with_suffix("") / ("dry" if self.dry else "device")
        torch.backends.cudnn.benchmark = True

    def module(self) -> tuple[nn.Module, list[int]]:
        torch.manual_seed(0)
        return NETWORKS[self.name](self.samples, self.rows)

    def inputs(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(self.device, self.dtype)

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def network(self) -> tuple[Any, Any]:
        """The package, and its Network on one rank with the module's weights."""
        package = load_package(self.path)
        folder = tempfile.mkdtemp()
        backend = "gloo" if self.dry else "nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        network = package.Network(package.init_mesh()).train()
        network.load_full(self.module()[0].state_dict())
        return package, network

    def plain(self, dtype: torch.dtype, *, last: bool = True) -> tuple[nn.Module, Tensor]:
        """The module in training, and its input."""
        module, shape = self.module()
        memory = torch.channels_last if last else torch.contiguous_format
        module = module.to(self.device, dtype, memory_format=memory).train()
        return module, self.inputs(shape).to(dtype, memory_format=memory)

    def settle(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    # ---- Before a step ----

    def package(self) -> dict[str, Any]:
        from convgen.tune.gpu import this_gpu

        module, shape = self.module()
        start = time.monotonic()
        graph, tensors = graph_of(module.train(), (torch.zeros(*shape),), name=self.name)
        imported = time.monotonic()
        gpu = None if self.dry else this_gpu()
        target = CPU if gpu is None else read_target(gpu.target).known()
        graph = with_dtype(graph, str(self.dtype).removeprefix("torch."))
        one = compile_network(graph, Grid((("N", 1),)), statistics="local", target=target)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_package(self.path, files_of(one, tensors), "the folder")
        return {
            "import_s": imported - start, "compile_s": time.monotonic() - imported, "target": target.text,
            "device": "" if gpu is None else gpu.name, "torch": torch.__version__, "samples": self.samples,
            "rows": self.rows,
        }  # fmt: skip

    def kernels(self) -> dict[str, Any]:
        _, network = self.network()
        start = time.monotonic()
        if self.dry:
            return self._dry_kernels(network)
        made = network.compile_kernels()
        return {"compiled": made.compiled, "found": made.found, "seconds": time.monotonic() - start}

    def _dry_kernels(self, network: Any) -> dict[str, Any]:
        """A CPU's package refuses them; who compiles is of the device's alone."""
        try:
            network.compile_kernels()
        except RuntimeError as error:
            return {"compiled": 0, "found": 0, "seconds": 0.0, "refused": str(error)}
        raise AssertionError("a package for a CPU has kernels")

    def check(self) -> dict[str, Any]:
        """Errors of the package and of the module in its type, against the module in float64."""
        package, network = self.network()
        module, x = self.plain(torch.float64)
        truth = results_of(module, x, dict(module.named_parameters()))
        del module
        module, low = self.plain(self.dtype)
        own = errors(results_of(module, low, dict(module.named_parameters())), truth)
        block = package.scatter(network._inputs[0], self.inputs(x.shape), network._mesh)
        made = results_of(network, block, {n: p for n, p in network.named_parameters() if n in truth})
        made = {n: getattr(t, "_local_tensor", getattr(t, "_block", t)) for n, t in made.items()}
        found = errors(made, truth)
        limits = {kind: max(FLOOR, SLACK * error) for kind, (error, _) in own.items()}
        return {
            "right": all(found[kind][0] <= limit for kind, limit in limits.items()),
            **{kind: {"error": found[kind][0], "of": found[kind][1], "module": own[kind][0]} for kind in found},
        }

    # ---- A step ----

    def way(self, way: str) -> dict[str, Any]:
        steps = {BESIDE: self.module_step(*self.plain(self.dtype))}
        if way.startswith("convgen"):
            steps[way] = self.package_step(graphed=way.endswith("graphed"))
        elif way.endswith("graphed"):
            steps[way] = self.graph_of_module(*self.plain(self.dtype))
        else:
            steps[way] = self.module_step(*self.plain(self.dtype, last=False))
        rounds, count = (2, 1) if self.dry else (ROUNDS, STEPS)
        first, ms, host, peak = ({which: [] for which in steps} for _ in range(4))  # type: ignore[var-annotated]
        for which, step in steps.items():
            start = time.monotonic()
            step()
            self.settle()
            first[which] = time.monotonic() - start
            if not self.dry:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step()
                peak[which] = (torch.cuda.max_memory_allocated() - before) / 2**20
            say(f"{which}: first step {first[which]:.1f} s")
        for _ in range(rounds):
            for which, step in steps.items():
                self.settle()
                start = time.perf_counter()
                for _ in range(count):
                    step()
                launched = time.perf_counter()
                self.settle()
                ms[which].append((time.perf_counter() - start) / count * 1e3)
                host[which].append((launched - start) / count * 1e3)
        return {
            "ms": statistics.median(ms[way]), "beside_ms": statistics.median(ms[BESIDE]),
            "ratio": statistics.median(a / b for a, b in zip(ms[way], ms[BESIDE], strict=True)),
            "host_ms": statistics.median(host[way]), "first_s": first[way],
            "peak_MiB": peak[way] or None, "rounds": rounds, "steps": count,
        }  # fmt: skip

    def module_step(self, module: nn.Module, x: Tensor) -> Callable[[], object]:
        def step() -> None:
            module.zero_grad()
            loss_of(module(x)).backward()

        return step

    def graph_of_module(self, module: nn.Module, x: Tensor) -> Callable[[], object]:
        """As torch's notes on CUDA graphs have it."""
        step = self.module_step(module, x)
        if self.dry:
            return step
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        module.zero_grad()
        with torch.cuda.graph(graph):
            loss_of(module(x)).backward()
        return graph.replay

    def package_step(self, *, graphed: bool) -> Callable[[], object]:
        package, network = self.network()
        if graphed and self.dry:
            import pytest

            sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
            from recorded_graphs import fake_graphs

            fake_graphs(runtime_of(package), pytest.MonkeyPatch())
        shape = self.module()[1]
        x = package.scatter(network._inputs[0], self.inputs(shape), network._mesh)
        if not graphed:
            return self.module_step(network, x)
        replay = network.graphed(loss_of, x)

        def step() -> None:
            network.zero_grad()
            replay(x)

        return step


def loss_of(made: Tensor) -> Tensor:
    return made.float().square().mean()


def results_of(model: nn.Module, x: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The output, and gradients of parameters by name."""
    model.zero_grad()
    made = model(x)
    made.to(torch.promote_types(made.dtype, torch.float32)).square().mean().backward()
    return {"output": made.detach(), **{n: p.grad for n, p in parameters.items() if p.grad is not None}}


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, tuple[float, str]]:
    """Of the output and of gradients: the largest error by the largest entry, and of which tensor."""
    largest = {n: float(t.abs().max()) for n, t in truth.items()}
    least = LEAST * max(size for n, size in largest.items() if n != "output")
    missing = [n for n in truth if n not in found]
    if missing:
        raise RuntimeError(f"no gradient of {', '.join(missing)}")
    off = {
        n: float((found[n].double() - t.double()).abs().max()) / max(largest[n], 0.0 if n == "output" else least)
        for n, t in truth.items()
    }
    farthest = max((n for n in off if n != "output"), key=off.__getitem__)
    return {"output": (off["output"], "output"), "gradients": (off[farthest], farthest)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_task(args: Namespace) -> None:
    """A task of one network; its record on stdout."""
    name, task = args.networks[0], args.task
    fate = FATES.get((name, task), "") if args.dry_run else ""
    if fate == "hangs":
        time.sleep(3600)
    if fate == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    one = Task(args, name)
    record = one.way(task) if task in WAYS else getattr(one, task)()
    one.settle()
    print(json.dumps(record), flush=True)
    os._exit(0)  # what a process group does at its end is no part of it


# ---- All tasks ----


def ended(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The record of a task's process; of one that did not end well, why."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)  # in the group that first_hour.py may end
        try:
            code = process.wait(timeout_s)
            why = f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, why = None, f"nothing after {timeout_s:.0f} s"
        finally:
            process.kill()
            process.wait()
        out.seek(0), err.seek(0)
        lines, said = out.read().splitlines(), err.read().strip().splitlines()
    if code == 0 and lines:
        return json.loads(lines[-1])
    return {"failed": why, "said": said[-5:]}


def supervise(args: Namespace, path: Path) -> int:
    """Run what is left of all tasks, until time is up; the exit code: 1 if something is left."""
    if not args.dry_run and importlib.util.find_spec("triton") and not torch.cuda.is_available():
        say("no GPU: --dry-run")
        return 2
    end, every = time.monotonic() + args.budget, read(path)
    kept = every.setdefault("dry run" if args.dry_run else "device", {})
    for name in args.networks:
        of = kept.setdefault(name, {})
        for task in TASKS:
            before = of.get(task, {})
            if before and ("failed" not in before or before["tries"] >= TRIES):
                continue
            if task in WANT_PACKAGE and "failed" in of.get("package", {"failed": ""}):
                say(f"{name} {task}: no package")
                continue
            left = end - time.monotonic()
            if left < 1:
                say(f"{name} {task}: time is up; the same command goes on")
                return 1
            hangs = args.dry_run and FATES.get((name, task)) == "hangs"
            command = [
                sys.executable, str(Path(__file__).resolve()), "--networks", name, "--task", task, "--results",
                str(path), *["--dry-run"] * args.dry_run,
            ]  # fmt: skip
            start = time.monotonic()
            record = ended(command, HANGS_S if hangs else min(args.timeout, left))
            took = time.monotonic() - start
            of[task] = record | {"tries": before.get("tries", 0) + 1, "took_s": round(took, 1)}
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
            new.replace(path)
            print(f"{name} {task}: {shown(of[task])}", flush=True)
    return 0


def read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By where, network and task its record."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def shown(record: dict[str, Any]) -> str:
    """A record as a line has it."""
    if "failed" in record:
        return f"FAILED: {record['failed']}; {' | '.join(record['said'][-1:])}"
    if "ratio" in record:
        memory = f", {record['peak_MiB']:.0f} MiB" if record["peak_MiB"] else ""
        return (
            f"{record['ms']:.2f} ms, {record['ratio']:.3f} of {BESIDE}'s {record['beside_ms']:.2f}, "
            f"{record['host_ms']:.2f} on the host, first step {record['first_s']:.1f} s{memory}"
        )
    if "right" in record:
        each = (
            f"{k} {record[k]['error']:.1e}, the module's {record[k]['module']:.1e}" for k in ("output", "gradients")
        )
        return f"{'right' if record['right'] else 'WRONG'}: {'; '.join(each)} ({record['gradients']['of']})"
    if "compiled" in record:
        return f"{record['compiled']} compiled, {record['found']} found, {record['seconds']:.1f} s"
    return f"imported in {record['import_s']:.1f} s, compiled for {record['target']} in {record['compile_s']:.1f} s"


def main() -> None:
    args = options(
        __doc__,
        networks=([*SIZES], f"of {', '.join(SIZES)}"),
        results="build/networks_gpu.json", budget=(1200.0, "seconds"), timeout=(300.0, "seconds of a task"),
        dry_run=False, table=False, task=("", "one, in this process"),
    )  # fmt: skip
    path = Path(args.results)
    if args.task:
        run_task(args)
    if not args.table:
        sys.exit(supervise(args, path))
    for where, kept in read(path).items():
        for name, of in kept.items():
            for task in (t for t in TASKS if t in of):
                print(f"{where:8} {name:12} {task:16} {shown(of[task])}")


if __name__ == "__main__":
    main()
