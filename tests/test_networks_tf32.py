"""Networks whose convolutions and products take TF32 on a GPU: always, or where torch's switches say so."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from kernel_cases import to_tf32
from sampling import cases_of
from small_networks import exported, resnet, unet
from test_networks_gpu import NETWORKS, SM_90, Drawn, loaded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.cost.machines import load_machine
from convgen.cost.rows import program_cost
from convgen.errors import InputError
from convgen.kernels import facts as facts_of
from convgen.kernels.config import Config
from convgen.kernels.facts import launches
from convgen.kernels.source import Kernel
from convgen.network_compiler import compile_network, compile_text
from convgen.packages import kernel_modules, runtime_of
from convgen.plan.program.edited import read_text
from convgen.program.network_text import show
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.graph_edit import with_dtype
from convgen.spec.graph_file import constants_path, read_graph, write_graph
from convgen.spec.network_graph import read_network_graph
from convgen.spec.safetensors import tensors_bytes
from convgen.spec.target import read_target
from convgen.tune.wanted import of_networks
from convgen.verify import tf32
from convgen.verify.interpreter import launch
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import VirtualTransport, World

FLOATS = ("tfloat32", "float32")
CONV, RNN, MATMUL = SWITCHES = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul)


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """As torch begins, and afterwards."""
    before = [one.fp32_precision for one in SWITCHES]
    yield
    for one, precision in zip(SWITCHES, before, strict=True):
        one.fp32_precision = precision


def convgen(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def compiled(module: nn.Module, x: Tensor, dtype: str, target: str = "cuda:sm_90", **grid: int) -> Any:
    """A network on a grid, and its constants."""
    graph, tensors = graph_of(module, (x,), name="small")
    where = Grid(tuple(grid.items()))
    return compile_network(with_dtype(graph, dtype), where, target=read_target(target)), tensors


def interpreted(package: Any) -> list[str]:
    """Names of the modules whose kernels run, as they run; in the interpreter."""
    ran: list[str] = []

    def noted(name: str) -> Any:
        def run(kernel: Any, *args: Any, **constants: Any) -> None:
            ran.append(name)
            launch(kernel, *args, **constants)

        return run

    package.NET.device = "cpu"
    for module in kernel_modules(package):
        module.launch = noted(module.__name__.rpartition(".")[2])
    return ran


# ---- Right ----


@pytest.mark.parametrize("seed", cases_of(4, "test_drawn_networks_take_tf32_as_one_device_does"))
def test_drawn_networks_take_tf32_as_one_device_does(seed: int) -> None:
    """Within what rounded factors do to one device, and not within what float32 would do: they are rounded."""
    rng = random.Random(seed)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    module = Drawn(rng)
    x = torch.randn(2, module.channels, 12, rng.choice((9, 12)))
    one, tensors = compiled(module, x, "tfloat32", **rng.choice(({"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "W": 2})))
    report = check_network(one, tensors, interpret=True)
    assert report.ok and report.dtype == "tfloat32", report_text(report)
    assert all(c.error > 2.0**-18 for c in report.compared), report_text(report)


def test_networks_by_hand_and_from_pytorch_take_tf32() -> None:
    for made, grid in ((resnet, {"N": 2}), (unet, {"H": 2})):
        graph, tensors = exported(made)
        one = compile_network(with_dtype(graph, "tfloat32"), Grid(tuple(grid.items())), target=SM_90)
        report = check_network(one, tensors, interpret=True)
        assert report.ok, report_text(report)


@pytest.mark.parametrize("way", ["tfloat32", "switch on", "switch off"])
@pytest.mark.parametrize("seed", cases_of(2, "test_one_convolution_rounds_what_it_multiplies"))
def test_one_convolution_rounds_what_it_multiplies(seed: int, way: str, tmp_path: Path) -> None:
    """Factors to 11 bits, ties to even, and nothing else; of the forward pass and of both gradients."""
    rng = random.Random(seed)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    kernel, stride = rng.choice(((3, 1), (3, 2), (1, 1), (5, 1)))
    conv = nn.Conv2d(rng.choice((3, 8, 16)), 8, kernel, stride, kernel // 2, bias=False)
    x = torch.randn(2, conv.in_channels, 9, 8)
    one, tensors = compiled(conv, x, "tfloat32" if way == "tfloat32" else "float32", H=2)
    CONV.fp32_precision = "tf32" if way == "switch on" else "ieee"
    rounded = (lambda t: t) if way == "switch off" else to_tf32
    w = conv.weight.detach()
    dy = torch.randn_like(conv(x))
    wide = [rounded(t).double() for t in (x, w, dy)]
    settings = (None, (stride,) * 2, (kernel // 2,) * 2, (1, 1), False, (0, 0), 1)
    y = torch.ops.aten.convolution(*wide[:2], *settings)
    dx, dw, _ = torch.ops.aten.convolution_backward(wide[2], *wide[:2], *settings, [True, True, False])
    with loaded(one, tensors, tmp_path) as package:
        ran = interpreted(package)

        def step(end: VirtualTransport) -> list[Tensor]:
            mesh = package.init_mesh("cpu", transport=end)
            model = package.Network(mesh, parameters="blocks")
            model.load_full({"weight": w})
            block = package.scatter("input", x, mesh).requires_grad_()
            made = model(block)
            made.backward(package.scatter("output", dy, mesh))
            whole = package.gather("output", made.detach(), mesh)
            assert block.grad is not None
            return [whole, package.gather("input", block.grad, mesh), model.full_gradients()["weight"]]

        found = World(2).run(step)[0]
    for one_found, wanted in zip(found, (y, dx, dw), strict=True):
        error = float((one_found.double() - wanted).abs().max() / wanted.abs().max())
        assert error < 2e-6, error  # sums are float32
    assert {name.endswith("_tf32") for name in ran if name.startswith("convolution_")} == {way == "switch on"}


# ---- Switches ----

SET: dict[str, tuple[Any, bool]] = {  # how torch is told, and whether convolutions take TF32 then
    "nothing": (lambda: None, True),
    "cudnn.allow_tf32 off": (lambda: setattr(torch.backends.cudnn, "allow_tf32", False), False),
    "cudnn.allow_tf32 on": (lambda: setattr(torch.backends.cudnn, "allow_tf32", True), True),
    "conv ieee": (lambda: setattr(CONV, "fp32_precision", "ieee"), False),
    "conv tf32": (lambda: setattr(CONV, "fp32_precision", "tf32"), True),
    "products ieee": (lambda: torch.set_float32_matmul_precision("highest"), True),
    "rnn ieee": (lambda: setattr(RNN, "fp32_precision", "ieee"), True),
}  # fmt: skip


def test_kernels_are_those_of_the_switch_at_each_call(tmp_path: Path) -> None:
    """Forward and backward each as the switch stands then, however it was set, as ATen's convolutions ask."""
    rng = random.Random(0)
    one, tensors = compiled(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()), torch.randn(2, 4, 6, 6), "float32", N=1)
    with loaded(one, tensors, tmp_path) as package:
        ran = interpreted(package)
        mesh = package.init_mesh("cpu", transport=World(1).run(lambda end: end)[0])
        model = package.Network(mesh)
        for _ in range(12):
            made = None
            for run in ("forward", "backward"):
                ran.clear()
                for switch in (torch.backends.cudnn, CONV, RNN):
                    with contextlib.suppress(AttributeError):
                        switch.fp32_precision = "none"
                torch.backends.cudnn.allow_tf32 = True
                how = rng.choice([*SET])
                tell, takes = SET[how]
                tell()
                if run == "forward":
                    made = model(torch.randn(2, 4, 6, 6))
                else:
                    made.sum().backward()
                assert ran and {name.endswith("_tf32") for name in ran} == {takes}, (run, how, ran)


class Own(threading.local):
    """A switch of each thread, as each rank is a process elsewhere."""

    fp32_precision = "tf32"


def test_ranks_whose_switches_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), torch.randn(2, 3, 2, 2)
    for dtype, target in (("float32", "cuda:sm_90"), ("tfloat32", "cuda:sm_90"), ("float64", "cuda:sm_90"),
                          ("float32", "hip:gfx942"), ("float32", "cpu")):  # fmt: skip
        one, tensors = compiled(module, x, dtype, target, N=2)
        (tmp_path / f"{dtype} {target}").mkdir()
        with loaded(one, tensors, tmp_path / f"{dtype} {target}") as package:
            package.NET.device = "cpu"
            own = Own()
            runtime = runtime_of(package)
            if dtype != "tfloat32":  # that sets them
                monkeypatch.setitem(runtime.SWITCHES, "products", own)

            def step(end: VirtualTransport, package: Any = package, own: Own = own) -> None:
                own.fp32_precision = ("ieee", "tf32")[end.rank]
                mesh = package.init_mesh("cpu", transport=end)
                given = x.to(package.NET.dtype)
                package.Network(mesh)(package.scatter("input", given, mesh))

            if (dtype, target) == ("float32", "cuda:sm_90"):
                words = r"ranks differ in forward.*TF32: convolutions, recurrent layers on ranks \[0\], "
                words += r"convolutions, products, recurrent layers on ranks \[1\]"
                with pytest.raises(RuntimeError, match=words):
                    World(2).run(step)
            else:
                World(2).run(step)


class Seen(TorchDispatchMode):
    """What is switched on where ATen multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in tf32.PRODUCTS:
            self.found.append(tuple(one.fp32_precision for one in SWITCHES))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_network_of_tf32_takes_it_in_atens_products_and_puts_switches_back(threads: int, tmp_path: Path) -> None:
    """A linear layer, forward and backward, also where others are at work and where one fails."""
    rng = random.Random(threads)
    one, tensors = compiled(nn.Linear(6, 5), torch.randn(2, 6), "tfloat32", N=1)
    with loaded(one, tensors, tmp_path) as package:
        package.NET.device = "cpu"
        models = [package.Network(package.init_mesh("cpu", transport=World(1).run(lambda end: end)[0]))
                  for _ in range(threads)]  # fmt: skip

        def step(model: Any) -> list[tuple[str, ...]]:
            with Seen() as seen:
                model(torch.randn(2, 6)).sum().backward()
            with pytest.raises(ValueError, match="shape"):
                model(torch.randn(2, 7))
            return seen.found

        for _ in range(5):
            before = tuple(rng.choice(("ieee", "tf32")) for _ in SWITCHES)
            for switch, precision in zip(SWITCHES, before, strict=True):
                switch.fp32_precision = precision
            with ThreadPoolExecutor(threads) as pool:
                found = [*pool.map(step, models)]
            assert all(seen and {*seen} == {("tf32",) * 3} for seen in found), found
            assert tuple(one.fp32_precision for one in SWITCHES) == before


def test_a_recorded_step_is_of_its_switches(tmp_path: Path) -> None:
    one, tensors = compiled(nn.Conv2d(4, 8, 3), torch.randn(2, 4, 6, 6), "float32", N=1)
    with loaded(one, tensors, tmp_path) as package:
        package.NET.device = "cpu"
        model = package.Network(package.init_mesh("cpu", transport=World(1).run(lambda end: end)[0]))
        step = runtime_of(package).GraphedStep.__new__(runtime_of(package).GraphedStep)
        step._model, step._loss, step.name, step._names, step._inputs = model, None, "small", [], []
        step._mode = step._modes()
        CONV.fp32_precision = "ieee"
        with pytest.raises(RuntimeError, match=r"another mode.*TF32"):
            step._check()


def test_atens_kernels_run_where_older_and_newer_switch_differ(tmp_path: Path) -> None:
    module, x = nn.Conv2d(4, 8, 3, bias=False), torch.randn(2, 4, 6, 6)
    one, tensors = compiled(module, x, "float32", N=1)
    aten = Config("aten", warps=0, stages=0)
    one = replace(one, measured={p: aten for file in one.kernels for p in file.problems})
    assert all("torch.ops.aten.convolution" in file.text for file in one.kernels)
    torch.backends.cudnn.allow_tf32 = False
    with loaded(one, tensors, tmp_path) as package:
        package.NET.device = "cpu"
        model = package.Network(package.init_mesh("cpu", transport=World(1).run(lambda end: end)[0]))
        model.load_full(module.state_dict())
        for precision in ("tf32", "ieee"):
            CONV.fp32_precision = precision
            made = model(x)
            made.sum().backward()
            torch.testing.assert_close(made, module(x))
            assert CONV.fp32_precision == precision
    torch.backends.cudnn.allow_tf32 = True


# ---- Kernels ----


def test_a_product_is_one_of_tf32_and_three_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the matrix instructions that Triton compiles, by the same configuration."""
    graph = read_network_graph(str(NETWORKS / "resnet50.yaml"))
    where, rng, seen = Grid((("N", 4),)), random.Random(0), 0
    files = {f.name: f for f in compile_network(graph, where, target=SM_90).kernels}
    always = {f.name: f for f in compile_network(with_dtype(graph, "tfloat32"), where, target=SM_90).kernels}
    plain = [name for name in files if not name.endswith("_tf32")]
    assert {*files} == {*plain, *(f"{name}_tf32" for name in plain)} and {*always} == {*plain}
    for name in plain:
        beside = files[f"{name}_tf32"]
        assert (beside.held, beside.uses, beside.epilogue) == (files[name].held, files[name].uses, files[name].epilogue)
        assert 'input_precision="tf32"' not in files[name].text
        for file in (beside, always[name]):
            assert "tf32x3" not in file.text and 'input_precision="tf32"' in file.text
    for name in rng.sample([name for name in plain if not (files[name].epilogue or files[name].moments)], 2):
        for kernel in files[f"{name}_tf32"].kernels:
            if kernel.config.family not in ("box", "pointer", "gemm"):
                continue
            p = kernel.problem
            three = Kernel((replace(p, dtype="float32"),), kernel.config, SM_90)
            counts = [multiplied(made, monkeypatch) for made in (kernel, three)]
            assert counts[0] and counts[1] == 3 * counts[0], (name, kernel.name, counts)
            seen += 1
    assert seen >= 3


def test_both_products_of_float32_are_tuned() -> None:
    graph, _ = exported(unet)
    found = {d: of_networks([compile_network(with_dtype(graph, d), Grid((("H", 2),)), target=SM_90)]) for d in FLOATS}
    keys = {d: {(one.problem.dtype, one.key) for one in found[d]} for d in FLOATS}
    assert {dtype for dtype, _ in keys["float32"]} == {*FLOATS} and {dtype for dtype, _ in keys["tfloat32"]} == {
        "tfloat32"
    }
    assert keys["tfloat32"] < keys["float32"] and len(keys["float32"]) == 2 * len(keys["tfloat32"])


def multiplied(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Products of its instructions on TF32."""
    texts: list[str] = []
    read: Any = facts_of._read_nvidia

    def noted(ptx: str, *others: Any) -> Any:
        texts.append(ptx)
        return read(ptx, *others)

    with monkeypatch.context() as patched:
        patched.setattr(facts_of, "_compiled", {})
        patched.setattr(facts_of, "_read_nvidia", noted)
        for one in launches(kernel, kernel.problem):
            facts_of.facts(one, SM_90)
    shapes = [s for ptx in texts for s in re.findall(r"mma[\w.:]*\.m(\d+)n(\d+)k(\d+)[\w.]*\.tf32\.tf32", ptx)]
    return sum(math.prod(map(int, shape)) for shape in shapes)


def test_amds_float32_has_kernels_of_float32_alone() -> None:
    graph, _ = exported(resnet)
    for dtype, wanted in (("float32", {"float32"}), ("tfloat32", {"tfloat32"})):
        one = compile_network(with_dtype(graph, dtype), Grid((("N", 2),)), target=read_target("hip:gfx942"))
        assert {file.dtype for file in one.kernels} == wanted


# ---- What says it ----


def test_prices_are_of_the_machines_tf32() -> None:
    """A network of TF32 takes as long as one of float32 on a machine whose float32 is as fast."""
    graph, _ = exported(unet)
    machine = load_machine("dgx_h200")
    peaks = dict(machine.peak_flops)
    swapped = replace(machine, peak_flops=(*(peaks | {"float32": peaks["tfloat32"]}).items(),))
    one, other = (compile_network(with_dtype(graph, d), Grid((("H", 2),)), "auto", machine=machine)
                  for d in ("tfloat32", "float32"))  # fmt: skip
    program = replace(one.program, tf32=False)
    seconds = [program_cost(program, m, d).seconds for m, d in
               ((machine, one.dtype), (swapped, other.dtype), (machine, other.dtype))]  # fmt: skip
    assert one.dtype == "tfloat32" and seconds[0] == seconds[1] < seconds[2]


def test_texts_and_files_say_it() -> None:
    graph, _ = exported(resnet)
    tf32_graph = with_dtype(graph, "tfloat32")
    assert read_back(tf32_graph) == tf32_graph and "dtype: tfloat32" in write_graph(tf32_graph)
    assert with_dtype(tf32_graph, "float32") == with_dtype(graph, "float32")
    one, plain = (
        compile_network(g, Grid((("H", 2),)), target=SM_90) for g in (tf32_graph, with_dtype(graph, "float32"))
    )
    text = show(one.program)
    assert "  products: tfloat32" in text.splitlines() and "products:" not in show(plain.program)
    for start in (tf32_graph, with_dtype(graph, "float32")):
        again = compile_text(start, read_text(text, "edited"), target=SM_90)
        assert again.dtype == "tfloat32" and show(again.program) == text
    for start, said in ((tf32_graph, show(plain.program)), (with_dtype(graph, "float64"), text)):
        with pytest.raises(InputError, match="products: tfloat32"):
            compile_text(start, read_text(said, "edited"), target=SM_90)
    network = one.package().files["network.py"]
    assert '"dtype": "tfloat32"' in network and "dtype=torch.float32" in network and 'tf32="always"' in network
    cpu = compile_network(tf32_graph, Grid((("H", 2),))).package().files["network.py"]
    assert '"dtype": "tfloat32"' in cpu and "tf32=" not in cpu


def read_back(graph: Graph) -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.yaml"
        path.write_text(write_graph(graph))
        return replace(read_graph(path), source_file=graph.source_file)


def test_a_cpus_is_float32s(tmp_path: Path) -> None:
    """To the last bit, and checked as closely."""
    graph, tensors = exported(resnet)
    made = [compile_network(with_dtype(graph, d), Grid((("N", 2),))) for d in ("float32", "tfloat32")]
    reports = [check_network(one, tensors) for one in made]
    for one, other in zip(*(r.compared for r in reports), strict=True):
        assert (one.error, one.tolerance) == (other.error, other.tolerance)
    assert all(report.ok and report.dtype == "float32" for report in reports)


def test_the_commands_take_it(tmp_path: Path) -> None:
    """compile, check, plan and explain of a network by hand."""
    file = tmp_path / "net.yaml"
    nodes = [{"name": "a", "kind": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1}, {"kind": "relu"}]
    file.write_text(f"name: net\ninput: [2, 4, 8, 8]\nnodes: {json.dumps(nodes)}\n")
    words = ("--grid", "H=2", "--target", "cuda:sm_90")
    said = [convgen("compile", file, *words, "--emit", "schedule", "--dtype", "tfloat32")]
    said += [convgen("check", file, *words, "--interpret", "--dtype", "tfloat32", "--json")]
    plans = [convgen("plan", file, "--machine", "dgx_h200", "--ranks", 2, "--dtype", d, "--json") for d in FLOATS]
    for done in (*said, *plans):
        assert done.exit_code == 0, done.output
    assert "products: tfloat32" in said[0].stdout and json.loads(said[1].stdout)[0]["dtype"] == "tfloat32"
    file.write_text(f"name: net\ninput: [2, 4, 8, 8]\ndtype: tfloat32\nnodes: {json.dumps(nodes)}\n")
    own = convgen("compile", file, *words, "--emit", "schedule")
    assert own.stdout == said[0].stdout
    plan = convgen("plan", file, "--machine", "dgx_h200", "--ranks", 2, "--json")
    assert plan.stdout == plans[0].stdout != plans[1].stdout
    graph, tensors = exported(resnet)
    made, plan_file = tmp_path / "resnet.yaml", tmp_path / "plan.yaml"
    made.write_text(write_graph(graph))
    constants_path(made).write_bytes(tensors_bytes(tensors))
    done = convgen("plan", made, "--machine", "dgx_h200", "--ranks", 2, "--dtype", "tfloat32", "-o", plan_file)
    assert done.exit_code == 0, done.output
    for more, is_tf32 in (((), True), (("--dtype", "float64"), False)):
        text = convgen("compile", plan_file, *more, "--emit", "schedule").stdout
        assert ("products: tfloat32" in text) == is_tf32 and "forward:" in text
    plan_file.write_text(plan_file.read_text().replace("dtype: tfloat32", "dtype: float8"))
    refused = convgen("compile", plan_file, "--emit", "schedule")
    assert isinstance(refused.exception, InputError) and "plan.yaml:" in str(refused.exception)
    refused = convgen("plan", file, "--machine", "dgx_h200", "--ranks", 2, "--dtype", "float8")
    assert isinstance(refused.exception, InputError) and "tfloat32" in refused.exception.hint
