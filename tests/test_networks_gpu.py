"""Networks for GPUs: convolutions are kernels, checked in Triton's interpreter; and everything stays on the device.

No GPU: tensors of a step are on torch's `meta` device in the place of one, where mixing them with a CPU's is an error.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import cases_of
from small_networks import Made, exported, resnet, unet
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from convgen.algebra.grid import Grid
from convgen.kernels.choose import choose
from convgen.kernels.facts import Launch, facts, launches
from convgen.kernels.load import load_text
from convgen.kernels.of_rows import convolution_files, local_convolutions, problem_of
from convgen.kernels.source import Kernel
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.operations.batch_norm import normalised_sums
from convgen.operations.convolution import ADD
from convgen.operations.moments import centred
from convgen.packages import files_of, forget_package, kernel_modules, load_package, runtime_of
from convgen.passes.start_halos import StartHalos
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.spec.network_graph import read_network_graph
from convgen.spec.target import read_target
from convgen.verify.interpreter import launch
from convgen.verify.network import check_network, report_text
from convgen.verify.tf32 import without_tf32
from convgen.verify.virtual import VirtualTransport, World

SM_90 = read_target("cuda:sm_90")
NETWORKS = Path(__file__).parents[1] / "examples" / "networks"


def compiled(
    made: Made, grid: dict[str, int], dtype: str = "float64", algorithm: str | None = None, target: str = "cuda:sm_90"
) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    graph, tensors = exported(made)
    where = Grid(tuple(grid.items()))
    return compile_network(with_dtype(graph, dtype), where, algorithm, target=read_target(target)), tensors


@contextlib.contextmanager
def loaded(one: CompiledNetwork, tensors: dict[str, Tensor], folder: Path) -> Iterator[Any]:
    path = folder / one.graph.name
    path.mkdir()
    for name, data in files_of(one, tensors).items():
        (path / name).write_bytes(data)
    package = load_package(path)
    try:
        yield package
    finally:
        forget_package(package)


def refuse_aten(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("ATen convolves")

    for way in ("_how", "_backward_filter"):
        monkeypatch.setattr(runtime.Convolution, way, refuse)


# ---- Right ----


@pytest.mark.parametrize(
    ("made", "grid", "dtype"),
    [
        (unet, {"H": 2}, "bfloat16"),
        (resnet, {"H": 2, "W": 2}, "float64"),
        (resnet, {"N": 2}, "float64"),
        (unet, {"C": 2}, "float64"),
    ],
)  # fmt: skip
def test_a_network_is_right(made: Made, grid: dict[str, int], dtype: str) -> None:
    one, tensors = compiled(made, grid, dtype)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


class Drawn(nn.Module):
    """A few convolutions, those of a group and transposed ones among them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        channels, layers = 8 * rng.randint(1, 2), list[nn.Module]()
        self.channels = channels
        for _ in range(rng.randint(1, 2)):
            filters, kernel = 8 * rng.randint(1, 3), rng.randint(1, 4)
            kind = rng.choice((nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d))
            groups = rng.choice((1, 1, 2, 8 if filters % 8 == channels % 8 == 0 else 1))
            stride, dilation = rng.choice(((1, 1), (2, 1), (1, 2)))
            padding = rng.randint(0, kernel // 2)
            layers += [
                kind(
                    channels,
                    filters,
                    kernel,
                    stride,
                    padding,
                    groups=groups,
                    dilation=dilation,
                    bias=rng.random() < 0.5,
                ),
                nn.ReLU(),
            ]
            channels = filters
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("seed", cases_of(6, "test_drawn_networks_are_right_and_atens_convolutions_unused"))
def test_drawn_networks_are_right_and_atens_convolutions_unused(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = Drawn(rng).double()
    graph, tensors = graph_of(module, (torch.randn(2, module.channels, 12, rng.choice((9, 12)), dtype=torch.float64),))
    graph = with_dtype(graph, rng.choice(("float64", "float32", "bfloat16")))
    grid = Grid(tuple(rng.choice(({"N": 2}, {"H": 2}, {"C": 2}, {"W": 2, "N": 2})).items()))
    one = compile_network(graph, grid, rng.choice((None, None, "auto")), target=SM_90)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)
    with loaded(one, tensors, tmp_path) as package:
        step_on_no_device(package, monkeypatch)


def test_another_number_of_samples_has_the_same_kernels(tmp_path: Path) -> None:
    one, tensors = compiled(unet, {"H": 2}, "float32")
    cpu, _ = compiled(unet, {"H": 2}, "float32", target="cpu")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "cpu").mkdir()
    with loaded(one, tensors, tmp_path / "gpu") as package, loaded(cpu, tensors, tmp_path / "cpu") as other:
        package.NET.device = "cpu"
        ran: list[Any] = []

        def counted(kernel: Any, *args: Any, **constants: Any) -> None:
            ran.append(kernel)
            launch(kernel, *args, **constants)

        for module in kernel_modules(package):
            module.launch = counted
        x = torch.randn(5, 2, 20, 12)

        def step(made: Any, end: VirtualTransport) -> Tensor:
            mesh = made.init_mesh("cpu", transport=end)
            network = made.Network(mesh)
            out = network(made.scatter("x", x, mesh), batch=5)["out"]
            return made.gather("out", out, mesh, batch=5).detach()

        with without_tf32():
            found = [World(2).run(lambda end, made=made: step(made, end))[0] for made in (package, other)]
    assert ran
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_one_sample_of_a_view_with_channels_last_is_normalised_right() -> None:
    """What ATen's batch norm of torch 2.13.0 gets wrong on a CPU."""
    manual_seed: Any = torch.manual_seed
    manual_seed(0)
    x, dy = (torch.randn(1, 4, 5, 3, dtype=torch.float64) for _ in range(2))
    a, mean, variance = torch.randn(4).double(), torch.randn(4).double(), torch.rand(4).double() + 0.5
    odd = x.contiguous(memory_format=torch.channels_last).squeeze(0).unsqueeze(0)
    assert odd.stride(0) == 4 and torch.equal(odd, x)
    gradients = []
    for given in (odd, x):
        leaf = given.detach().requires_grad_()
        centred(leaf, mean, a, variance).backward(dy)
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(
        normalised_sums(dy, odd, (mean, variance), a, 1e-5), normalised_sums(dy, x, (mean, variance), a, 1e-5)
    )


# ---- Whole networks, without computing ----


def step_on_no_device(
    package: Any, monkeypatch: pytest.MonkeyPatch, second: Any = None, launched: list[Launch] | None = None
) -> int:
    """A step of training by all ranks on `meta` tensors, where ATen may not convolve. How many kernels are launched.

    Args:
        second: makes what another step runs in.
        launched: gets the launches.
    """
    runtime, found = runtime_of(package), list[Launch]() if launched is None else launched
    refuse_aten(runtime, monkeypatch)
    monkeypatch.setattr(package.NET, "device", "meta")
    for module in kernel_modules(package):
        monkeypatch.setattr(module, "launch", lambda f, grid, *args, **more: found.append(Launch(f, grid, args, more)))
    # What `meta` tensors have no values for.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "batch_norm_update_stats", lambda x, *_: (x.new_empty(x.shape[1]),) * 2)

    def step(end: VirtualTransport) -> None:
        mesh = package.init_mesh("meta", transport=end)
        network = package.Network(mesh, parameters="blocks")
        net = package.NET
        given = [
            package.scatter(name, torch.zeros(net.split(name, net.batch).extents, dtype=getattr(torch, kind)), mesh)
            for name, kind in zip(network._inputs, network._types, strict=True)
        ]
        assert all(t.is_meta for t in given)  # as those of a CPU are brought to the device
        given = [t.requires_grad_() if t.is_floating_point() else t for t in given]
        for around in (contextlib.nullcontext(), *([second()] if second else [])):
            with around:
                made = network(*given)
                made = list(made.values()) if isinstance(made, dict) else made if isinstance(made, tuple) else [made]
                sum(t.sum() for t in made if t.is_floating_point() and t.requires_grad).backward()
        assert given[0].grad is not None and given[0].grad.is_meta

    World(math.prod(package.NET.grid.values())).run(step)
    tensors = [t for launch in found for t in launch.args if isinstance(t, Tensor)]
    assert all(t.is_meta for t in tensors)
    return len(found)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("resnet50", {"N": 2, "H": 2}), ("resnet50", {"C": 2, "F": 2}), ("alexnet", {"N": 2, "H": 2})],
    ids=["resnet50-NH", "resnet50-CF", "alexnet-NH"],
)
def test_a_step_launches_kernels_and_stays_on_the_device(
    name: str, grid: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = read_network_graph(str(NETWORKS / f"{name}.yaml"))
    one = compile_network(graph, Grid(tuple(grid.items())), target=SM_90)
    with loaded(one, {}, tmp_path) as package:
        count = step_on_no_device(package, monkeypatch)
    convolutions = len({row.bound.makes for row in one.program.rows if "conv_forward" in row.bound.operation.name})
    assert count >= 3 * 4 * convolutions


def test_a_tensor_elsewhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tensors = compiled(resnet, {"N": 2})
    with loaded(one, tensors, tmp_path) as package:
        norms = runtime_of(package).NormByKernels
        made = norms._made

        def elsewhere(self: Any, kept: Any, *rest: Any) -> Any:
            later = made(self, kept, *rest)
            return later._replace(made=later.made + torch.zeros(kept[0].shape))

        monkeypatch.setattr(norms, "_made", elsewhere)
        with pytest.raises(Exception, match="device"):
            step_on_no_device(package, monkeypatch)


def test_an_input_elsewhere_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for the device, as in `step_on_no_device`; of two GPUs there are fake tensors."""
    one, tensors = compiled(resnet, {"N": 2})
    with loaded(one, tensors, tmp_path) as package, FakeTensorMode():
        monkeypatch.setattr(package.NET, "device", "meta")
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
        on_two = [torch.empty(4, device=f"cuda:{k}") for k in range(2)]

        def call(end: VirtualTransport) -> None:
            mesh, net = package.init_mesh("meta", transport=end), package.NET
            network = package.Network(mesh, parameters="blocks")
            name = network._inputs[0]
            x = torch.empty(net.here(mesh).shape(net.split(name, net.batch)), dtype=torch.float64)
            said = rf"{name} is on cpu, and the network on meta; .*scatter\('{name}', whole, mesh\)"
            with pytest.raises(ValueError, match=said):
                network(x)
            if end.rank == 0:
                found.extend([network, name])

        found: list[Any] = []
        World(2).run(call)
        network, name = found
        monkeypatch.setattr(package.NET, "device", "cuda")
        (other,) = network._elsewhere(on_two[1:], {"w": on_two[0]})
        assert f"{name} is on cuda:1, and the network on cuda:0; {name}.to('cuda:0')" in str(other)
        assert not [*network._elsewhere(on_two[:1], {"w": on_two[0]})]
        assert not [*network._elsewhere([torch.tensor(1.0)], {"w": on_two[0]})]  # a number, as torch has it


def test_kernels_of_a_network_compile_and_spill_nothing() -> None:
    """Of ResNet-50 on four ranks, some."""
    graph = with_dtype(read_network_graph(str(NETWORKS / "resnet50.yaml")), "bfloat16")
    one = compile_network(graph, Grid((("C", 2), ("N", 2))), target=SM_90)
    files = convolution_files(one.program, SM_90)
    rng = random.Random(0)
    for file in rng.sample(files, 3):
        assert load_text(file.text)
        phase = rng.choice(("forward", "backward_data", "backward_filter"))
        problem = problem_of(file.held[0], phase, 16, file.dtype, file.last)
        kernel: Kernel = choose((problem,), SM_90)
        assert all(not facts(launch, SM_90).spill_bytes for launch in launches(kernel, problem))


# ---- What is there ----


def test_files_of_convolutions_that_are_alike_are_one() -> None:
    graph = read_network_graph(str(NETWORKS / "resnet50.yaml"))
    one = compile_network(graph, Grid((("N", 4),)), target=SM_90)
    files = convolution_files(one.program, SM_90)
    rows = list(local_convolutions(one.program))
    assert sum(row.epilogue == ADD for row in rows) == 16  # a block's input is read by two
    assert len(rows) == 54 + 16 and len([f for f in files if not (f.masks or f.moments)]) == 2 * 21
    package = one.package()
    assert {f"{f.name}.py" for f in files} < set(package.files)
    text = package.files["network.py"]
    assert text.count('KERNELS["torch.float32", held] = LocalKernels(ByProducts(') == 21
    for table, made, count in (("MASKED", "MaskKernel", 8), ("MOMENTS", "MomentsKernel", 19)):
        key = rf'{table}\["torch.float32", held(?:, steps|, \(\), "")?\]'
        assert len(re.findall(rf"{key} = {made}\(ByProducts\(", text)) == count
    assert len(files) == 2 * (21 + 8 + 19)
    assert 'device="cuda"' in package.files["network.py"]


def test_packages_for_a_cpu_have_no_kernels() -> None:
    one, _ = compiled(resnet, {"N": 2}, target="cpu")
    package = one.package()
    assert not [name for name in package.files if name.startswith("convolution_")]
    assert "KERNELS[" not in package.files["network.py"] and "LocalKernels" not in "".join(package.files.values())


def test_what_travels_meanwhile_has_kernels_for_pieces() -> None:
    """Interiors and boundaries are other convolutions than whole blocks."""
    graph = read_network_graph(str(NETWORKS / "alexnet.yaml"))
    one = compile_network(graph, Grid((("N", 2), ("H", 2))), target=SM_90)
    early = StartHalos().run(one.plain)
    assert any(row.early is not None for row in early.rows)
    whole, pieces = (
        {local for one in local_convolutions(program) for local, _ in one.held} for program in (one.plain, early)
    )
    assert pieces - whole
