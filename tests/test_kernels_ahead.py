"""Kernels that are compiled before the first step are those that it launches; each once, whoever compiles it."""

from __future__ import annotations

import fcntl
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from small_networks import resnet, unet
from test_networks_gpu import compiled, loaded, step_on_no_device
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget

from convgen.algebra.grid import Grid
from convgen.kernels.facts import Launch
from convgen.network_compiler import compile_network
from convgen.packages import kernel_modules, runtime_of
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.spec.target import read_target
from convgen.verify.virtual import World
from convgen.whole import Call, model_class

SM_90 = GPUTarget("cuda", 90, 32)
of_triton: Any = triton


class Elsewhere:
    """In the place of Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return SM_90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton with an empty cache, and a device that compiles and runs nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(of_triton.runtime.driver, "_active", Elsewhere())


def of_meta(package: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package whose tensors have no memory; its runtime."""
    for module in kernel_modules(package):
        monkeypatch.setattr(module, "check_device", lambda _: None, raising=False)
    monkeypatch.setattr(package.NET, "device", "meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    return runtime_of(package)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Mixed(nn.Module):
    """A norm of groups, a mask, rows element by element, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Dropout(0.25)
        self.scale, self.up = nn.Parameter(torch.ones(16, 1, 1)), nn.ConvTranspose2d(16, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(nn.functional.silu(self.norm(self.a(x))))
        return self.up(x + 0.5 * (self.scale * nn.functional.max_pool2d(y, 3, 1, 1)))


def mixed() -> tuple[nn.Module, Tensor]:
    return Mixed(), torch.randn(4, 16, 8, 6)


@contextmanager
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """A network's package, and what a rank of it launches in a step."""
    graph, tensors = graph_of(Small(), (torch.zeros(4, 16, 8, 8),))
    one = compile_network(with_dtype(graph, "bfloat16"), Grid((("N", 2),)), target=read_target("cuda:sm_90"))
    with loaded(one, tensors, tmp_path) as package:
        found = dict[int, list[Any]]()

        def asks(end: Any) -> None:
            found[end.rank] = package.Network(package.init_mesh("meta", transport=end)).compile_kernels()

        with monkeypatch.context() as patch:
            of_meta(package, patch)
            patch.setattr(package.NET.ahead, "compiled", lambda launches, *_, **__: launches)
            World(2).run(asks)
        monkeypatch.setattr(runtime_of(package), "this_target", lambda *_: SM_90)
        yield package, found[0]


def kinds(runtime: Any, launches: list[Any]) -> set[str]:
    # `launch` of a module says how products are fused, in the place of which a step's launches are recorded.
    alike = [{k: v for k, v in a.constants.items() if k != "enable_fp_fusion"} for a in launches]
    said = [runtime.KernelLaunch(None, a.function, a.args, own) for a, own in zip(launches, alike, strict=True)]
    return {launch.kind for launch in said}


@pytest.mark.parametrize(
    ("made", "grid", "dtype"),
    [
        (unet, {"H": 2}, "bfloat16"),
        (resnet, {"N": 2}, "float32"),
        (unet, {"C": 2}, "bfloat16"),
        (mixed, {"H": 2}, "bfloat16"),
    ],
    ids=["unet-H", "resnet-N", "unet-C", "mixed-H"],
)
def test_what_is_compiled_is_what_a_step_launches(
    made: Any, grid: dict[str, int], dtype: str, device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tensors = compiled(made, grid, dtype)
    with loaded(one, tensors, tmp_path) as package:
        with monkeypatch.context() as patch:
            launched = list[Launch]()
            step_on_no_device(package, patch, launched=launched)
        runtime, ahead = of_meta(package, monkeypatch), list[Any]()
        monkeypatch.setattr(package.NET.ahead, "compiled", lambda launches, *_, **__: ahead.extend(launches))

        def asks(end: Any) -> None:
            mesh, net = package.init_mesh("meta", transport=end), package.NET
            network = package.Network(mesh, parameters="blocks")
            given = [
                torch.empty(net.here(mesh).shape(net.split(name, net.batch)), dtype=getattr(torch, kind), device="meta")
                for name, kind in zip(network._inputs, network._types, strict=True)
            ]
            network.compile_kernels(*[t.requires_grad_(t.is_floating_point()) for t in given])

        World(math.prod(grid.values())).run(asks)
        # Of two addends in a wide type torch.distributed makes the sum, and virtual ranks' transport a kernel.
        step = [a for a in launched if a.constants.get("PIECES") != 2 or a.args[0].dtype != torch.float32]
        assert kinds(runtime, ahead) == kinds(runtime, step)
        files = {a.module.__name__.rpartition(".")[2].partition("_")[0] for a in ahead}
        assert made is not mixed or files >= {"convolution", "norm", "chain", "draws"}


def hits_of(launches: list[Any]) -> list[bool]:
    """Of each launch, asked of Triton as a step asks, whether the cache has it."""
    found: list[bool] = []
    knobs = of_triton.knobs.compilation
    with knobs.scope():
        knobs.listener = lambda *, cache_hit, **_: found.append(cache_hit)
        for launch in launches:
            launch.function.device_caches.clear()
            launch.function.warmup(*launch.args, grid=(1,), **launch.constants)
    return found


def test_each_is_compiled_once_and_found_by_the_next_start(
    device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with small(tmp_path, monkeypatch) as (package, launches):
        ahead, count = package.NET.ahead, len(launches)
        ranks = [threading.Thread(target=lambda: told.append(ahead.compiled(launches, 2, says=not told))) for _ in "ab"]
        told: list[Any] = []
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert count >= 4
        assert sum(one.compiled for one in told) == sum(one.found for one in told) == count
        assert ahead.compiled(launches, 0, says=True) == (0, count)
        assert f"{package.NAME}: 0 kernels compiled, {count} found in Triton's cache" in capfd.readouterr().err
        assert hits_of(launches) == [True] * count


def test_what_another_rank_compiles_is_waited_for(
    device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small(tmp_path, monkeypatch) as (package, launches):
        runtime, told = runtime_of(package), list[Any]()
        (tmp_path / "cache").mkdir()
        theirs = os.open(tmp_path / "cache" / "convgen.lock", os.O_RDWR | os.O_CREAT)
        number = runtime._number(launches[1].kind)
        fcntl.lockf(theirs, fcntl.LOCK_EX, 1, number)
        rank = threading.Thread(target=lambda: told.append(package.NET.ahead.compiled(launches, 1, says=False)))
        rank.start()
        assert hits_of([launches[1]]) == [False]
        fcntl.lockf(theirs, fcntl.LOCK_UN, 1, number)
        rank.join()
        os.close(theirs)
        assert told == [(len(launches) - 1, 1)]


def test_what_does_not_compile_is_named(device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small(tmp_path, monkeypatch) as (package, launches):
        wrong = launches[0]._replace(constants={**launches[0].constants, "num_warps": 3})
        said = rf"{package.NAME}: {wrong.function.fn.__name__} of {wrong.module.__name__.rpartition('.')[2]} does not"
        with pytest.raises(RuntimeError, match=said):
            package.NET.ahead.compiled([wrong], 1, says=False)


def test_a_model_of_whole_tensors_takes_what_its_call_takes(
    device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small(tmp_path, monkeypatch) as (package, of_blocks):
        of_meta(package, monkeypatch)
        monkeypatch.setattr(package.NET.ahead, "compiled", lambda launches, *_, **__: {a.kind for a in launches})
        arguments: Any = SimpleNamespace(tensors=lambda args, keywords: {"x": args[0]})
        kind = model_class(package, Call("Small", arguments, ("x",), ("output",), None), whole=True)
        whole = torch.zeros(4, 16, 8, 8, dtype=torch.bfloat16)

        def asks(end: Any) -> list[set[str]]:
            model = kind(package.init_mesh("meta", transport=end), parameters="blocks")
            with torch.no_grad():
                alone = model.compile_kernels(whole)
            return [model.compile_kernels(whole), model.compile_kernels(), alone]

        for step, without, alone in World(2).run(asks):
            assert step == without == {a.kind for a in of_blocks} > alone


def test_processes_are_the_nodes_cores_shared_among_its_ranks(
    device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small(tmp_path, monkeypatch) as (package, _):
        runtime = runtime_of(package)
        monkeypatch.setattr(os, "cpu_count", lambda: 96)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(96)})
        assert [runtime.shared_cores(ranks) for ranks in (1, 8, 200)] == [96, 12, 1]
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(4)})  # bound to some
        assert runtime.shared_cores(8) == 4
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert runtime.on_this_node() == (3, 4)


@pytest.mark.parametrize(
    ("target", "device", "said"),
    [("cpu", "cpu", "has no kernels to compile: it is for cpu"), ("cuda:sm_90", "meta", "no GPU to compile")],
)
def test_off_a_gpu_it_is_refused(
    target: str, device: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tensors = compiled(resnet, {"N": 2}, target=target)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with loaded(one, tensors, tmp_path) as package:
        if device == "meta":
            of_meta(package, monkeypatch)

        def asks(end: Any) -> None:
            package.Network(package.init_mesh(device, transport=end)).compile_kernels()

        with pytest.raises(RuntimeError, match=said):
            World(2).run(asks)
