"""Convolutions of networks that read channels where an all-gather has brought them, and write them as a
reduce-scatter takes them: in equal parts, one behind the other."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from free_networks import free_network
from network_mutants import chains_of, with_row
from sampling import cases_of
from test_networks_gpu import SM_90, loaded, step_on_no_device
from test_networks_rims import apart, compiled, rows_of, without
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.cost.network import volume
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_text
from convgen.operations.convolution import READS
from convgen.operations.rimmed import to_parts
from convgen.packages import kernel_modules, runtime_of
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.passes.fuse_forms import FuseForms
from convgen.plan.program.edited import read_text
from convgen.program.network import Program
from convgen.program.network_text import show
from convgen.program.other_sizes import program_like
from convgen.program.rows import PlacedRow, in_parts
from convgen.program.verify.network import faults, verify_network
from convgen.spec.exported import graph_of
from convgen.verify.interpreter import in_interpreter, launch
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import World

GRIDS = ({"F": 2}, {"C": 2}, {"C": 2, "F": 2}, {"F": 3}, {"N": 2, "C": 2}, {"H": 2, "F": 2}, {"C": 2, "H": 3})
ROWS = {1: (), 2: (4,), 3: (2, 3)}  # but the last; of three ranks along H some have none


class Drawn(nn.Module):
    """Convolutions of one to three dimensions between smooth rows and rectifiers, the first by points."""

    def __init__(self, rng: random.Random, rows: int, ranks: int) -> None:
        super().__init__()
        kinds: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        transposed: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
        channels = 16 * ranks
        layers: list[nn.Module] = [kinds[rows](2 * ranks, channels, 1)]
        for _ in range(rng.randint(1, 2) if rows < 3 else 1):
            kind, filters = rng.choice((kinds, kinds, kinds, transposed))[rows], rng.choice((8, 16, 16)) * ranks
            kernel, groups = rng.randint(1, 3), rng.choice((1, 1, 1, 2))
            stride, padding, bias = rng.choice((1, 1, 2)), rng.randint(0, kernel // 2), rng.random() < 0.5
            layers += [rng.choice((nn.Tanh, nn.ReLU))()]
            layers += [kind(channels, filters, kernel, stride, padding, groups=groups, bias=bias)]
            channels = filters
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def drawn(seed: int) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    rows, grid = (2, 1, 2, 3)[seed % 4], rng.choice(GRIDS)
    grid = {"W" if a == "H" and rows == 1 else a: n for a, n in grid.items()}
    ranks = prod(n for a, n in grid.items() if a in "CF")
    shape = (2, 2 * ranks, *ROWS[rows], rng.choice((3, 4)))
    return compiled(Drawn(rng, rows, ranks), shape, grid, rng.choice(("float64", "float32", "bfloat16")))


def parted(program: Program) -> list[PlacedRow]:
    return [row for row in rows_of(program) if in_parts(row, program.grid)]


@cache
def small(grid: str = "C=2,F=2") -> tuple[CompiledNetwork, dict[str, Tensor]]:
    """Convolutions whose x is gathered, or y scattered, or both."""
    module = nn.Sequential(
        nn.Conv2d(4, 64, 1), nn.Tanh(), nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(64, 32, 3, 2, 1), nn.MaxPool2d(3, 1, 1),
    )  # fmt: skip
    axes = {name: int(ranks) for name, ranks in (word.split("=") for word in grid.split(","))}
    return compiled(module, (2, 4, 6, 5), axes, "float64")


# ---- Right ----


@pytest.mark.parametrize("seed", cases_of(12, "test_drawn_networks_are_right"))
def test_drawn_networks_are_right(seed: int) -> None:
    one, tensors = drawn(seed)
    verify_network(one.program)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


def test_draws_have_parts() -> None:
    """Of x, of y and of both, in each number of dimensions, with steps behind them, transposed."""
    found: set[Any] = set()
    for seed in range(12):
        one, _ = drawn(seed)
        for row in parted(one.program):
            found |= {row.bound.operation.name, len(row.makes[0]) - 2}
        for file in one.kernels:
            found |= {(min(local.x_parts, 2), min(local.y_parts, 2)) for local in file.held}
    wanted: set[Any] = {1, 2, 3, (2, 1), (1, 2), (2, 2)}
    wanted |= {"conv_forward", "conv_forward_relu", "conv_transpose_forward"}
    assert wanted <= found, wanted - found


def test_a_kernel_reads_a_halo_and_writes_parts() -> None:
    one, tensors = small("C=2,H=2")
    assert [file for file in one.kernels if file.rim == "x" and file.held[0].y_parts == 2]
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


class Plain(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        kind, c = draw.choice((nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d)), 4 * draw.randint(1, 2)
        self.one = nn.Conv2d(4, c, draw.choice((1, 3)), padding=1)
        self.two: nn.Module = kind(c, 12, draw.randint(1, 3), draw.choice((1, 2)), padding=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("seed", cases_of(6, "test_any_layout_and_any_roles_are_right_with_the_least_parts"))
def test_any_layout_and_any_roles_are_right_with_the_least_parts(
    seed: int, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of gradients among them; with kernels, and without, where ranks put parts together."""
    one, tensors = free(seed)
    one = replace(one, target=SM_90) if kernels else one
    assert not [*faults(one.program)]
    report = check_network(one, tensors, interpret=kernels)
    assert report.ok, report_text(report)
    if kernels:
        with loaded(one, tensors, tmp_path) as package:
            assert step_on_no_device(package, monkeypatch)  # where ATen may not convolve


@cache
def free(seed: int) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    """The first such draw that has parts: of a forward row, or by turns of a gradient's own row."""
    draw = random.Random(f"parts {seed}")
    grid = Grid(tuple(draw.choice(({"A": 2}, {"A": 2, "B": 2})).items()))
    graph, tensors = graph_of(Plain(draw).double(), (torch.randn(3, 4, 5, 4, dtype=torch.float64),))
    while True:
        one = free_network(draw, graph, grid, passes=[FuseForms(least_part=1, most_boxes=8)])
        found = parted(one.program)
        if seed % 2 < len([row for row in found if seed % 2 == 0 or row not in one.program.rows]):
            return one, tensors


@pytest.mark.parametrize("grid", ["C=2,F=2", "F=2"])
def test_ranks_without_a_kernel_put_parts_together(grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tensors = small(grid)
    assert parted(one.program)
    monkeypatch.setattr("convgen.network_compiler.convolution_files", lambda *_: ())
    report = check_network(replace(one), tensors, interpret=True)  # which has no kernels yet
    assert report.ok, report_text(report)


def test_a_kernel_takes_a_tensor_where_parts_are_due(tmp_path: Path) -> None:
    """As zeros are that stand for a gradient that nothing gives."""
    one, tensors = small("C=2,F=2")
    with loaded(one, tensors, tmp_path) as package:
        runtime, found = runtime_of(package), 0
        for module in kernel_modules(package):
            module.launch = launch
        for (_, local), kernels in runtime.KERNELS.items():
            (xs, ys, taps, *_), parts = zip(*local.dims, strict=True), {"x": local.x_parts, "y": local.y_parts}
            shapes = {"x": (2, local.channels, *xs), "y": (2, local.filters, *ys)}
            shapes["w"] = (local.filters, local.channels, *taps)
            for phase, names in READS.items() if max(parts.values()) > 1 else ():
                whole = [torch.randn(shapes[t], dtype=torch.float64) for t in names]
                given = [to_parts(t, parts[n]) if parts.get(n, 1) > 1 else t for t, n in zip(whole, names, strict=True)]
                torch.testing.assert_close(kernels.made(phase, *whole), kernels.made(phase, *given), rtol=0, atol=0)
                found += any(a is not b for a, b in zip(whole, given, strict=True))
    assert found


# ---- What is gone ----


class Copied(TorchDispatchMode):
    """Elements of four-dimensional tensors that are copied from place to place."""

    COPIES = ("copy_", "cat", "clone", "_to_copy", "contiguous")

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.COPIES and isinstance(made, Tensor):
            self.found["calls"] += 1
            self.found["elements"] += made.numel()
        return made


@pytest.mark.parametrize("grid", ["C=2", "F=2", "C=2,F=2"])
def test_copies_are_gone(grid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tensors = small(grid)
    found: list[Counter[str]] = []
    for n, network in enumerate((one, apart(one))):
        copied = Counter[str]()
        (tmp_path / str(n)).mkdir()
        with loaded(network, tensors, tmp_path / str(n)) as package, monkeypatch.context() as patch:
            assert step_on_no_device(package, patch, second=lambda copied=copied: Copied(copied))
        found.append(copied)
    own, whole = found
    print(grid, dict(own), dict(whole))
    # Of each conversion in parts a rank packs, or unpacks, no element.
    moved = sum(c.form == "parts" for row in one.program.rows for chain, _ in chains_of(row) for c in chain)
    assert moved and own["calls"] <= whole["calls"] - moved * one.program.grid.ranks
    assert own["elements"] < whole["elements"]
    assert volume(one.program) == volume(without(one.program))


# ---- The text, the verifier, the pass ----


@pytest.mark.parametrize("grid", ["C=2", "F=2", "C=2,F=2"])
def test_the_text_says_it_and_is_read_back_with_and_without(grid: str) -> None:
    one, _ = small(grid)
    text = show(one.program)
    assert text.count(" as=parts : ") >= 2 * len(parted(one.program)) >= 4
    again = compile_text(one.graph, read_text(text, "small.txt"), target=SM_90)
    assert show(again.program) == text
    assert again.package().files["network.py"] == one.package().files["network.py"]
    none = compile_text(one.graph, read_text(show(without(one.program)), "small.txt"), target=SM_90)
    assert not parted(none.program)
    for line in (line for line in text.splitlines() if " as=parts : " in line):  # its gradient's line still says it
        with pytest.raises(InputError):
            compile_text(one.graph, read_text(text.replace(line, line.replace(" as=parts", "")), "s"), target=SM_90)


@pytest.mark.parametrize("grid", ["F=2", "C=2,F=2"])
def test_a_text_that_asks_for_what_cannot_be_is_refused(grid: str) -> None:
    """`as=parts` behind every conversion of a text, one at a time, and `as=rim`: read back where a kernel can."""
    one, _ = small(grid)
    text = show(without(one.program))
    right = wrong = 0
    for line in dict.fromkeys(line for line in text.splitlines() if " over=" in line and " : " in line):
        for form in ("parts", "rim"):
            planted = text.replace(line, line.replace(" : ", f" as={form} : "))
            try:
                made = compile_text(one.graph, read_text(planted, "small.txt"), target=SM_90)
                assert show(made.program) == planted
                right += 1
            except InputError as error:
                assert f"as={form}" in str(error) or "can't come" in str(error), error
                wrong += 1
    assert wrong
    with pytest.raises(InputError, match="as=parts is for a GPU's kernels, ATen's convolutions take tensors"):
        compile_text(one.graph, read_text(show(one.program), "small.txt"))


@pytest.mark.parametrize(
    ("layer", "grid", "match"),
    [
        (nn.Conv2d(32, 32, 3, groups=2, bias=False), {"F": 4}, r"x or its gradient travels by \['exchange'\]"),
        (nn.Conv2d(32, 32, 3, bias=False), {"F": 3}, "channels of x are not in equal parts, the same for its gradient"),
        (nn.Conv2d(32, 32, 1, 2, bias=False), {"F": 2}, r"rank 0 reads \(\(0, 2\), \(0, 32\), \(0, 5\), \(0, 5\)\) of"),
        (nn.Softmax(1), {"F": 2}, "softmax reads x as one tensor"),
    ],
    ids=["exchange", "uneven", "rows", "softmax"],
)
def test_refusals_say_what_is_wrong(layer: nn.Module, grid: dict[str, int], match: str) -> None:
    made, _ = compiled(nn.Sequential(nn.Conv2d(4, 32, 1), nn.Tanh(), layer), (2, 4, 6, 6), grid)
    assert not parted(made.program)
    text = show(made.program)
    line = next(line for line in text.splitlines() if re.match(r"    %_2\.x = (all_gather|exchange) %_1 ", line))
    with pytest.raises(InputError, match=f"%_2.x can't come in parts: {match}"):
        compile_text(made.graph, read_text(text.replace(line, line.replace(" : ", " as=parts : ")), "s"), target=SM_90)


def test_the_verifier_refuses_what_nothing_reads() -> None:
    """Parts at each conversion, one at a time: never right where a gradient travels, too, and is no part."""
    one, _ = small()
    plain = without(one.program)
    found = 0
    for i, row in enumerate(plain.rows):
        for chain, put in chains_of(row):
            for n, c in enumerate(chain):
                changed = put((*chain[:n], replace(c, form="parts"), *chain[n + 1 :]))
                assert [*faults(with_row(plain, i, changed))], (row, c)
                found += 1
    assert found


def test_the_pass_leaves_few_channels_and_what_comes_by_chunks() -> None:
    one, _ = small()
    assert not parted(FuseForms(least_part=33).run(without(one.program)))
    assert FuseForms().run(one.program) is one.program
    made = FuseForms().run(ChunkCollectives(2).run(without(one.plain)))
    pieces = [row for row in rows_of(made) if row.chunks is not None and row.bound.operation.convolves]
    results = {row.signature.results[0].name for row in pieces if row.chunks and row.chunks.result}
    assert pieces and {name for row in pieces for name in in_parts(row, made.grid)} == results != set()


def in_chunks(one: CompiledNetwork, count: int, index: str, *, forms: bool = True) -> CompiledNetwork:
    """The same, of which what can travels by chunks, and what can in parts."""
    program = ChunkCollectives(count, index).run(without(one.plain))
    program = FuseForms().run(program) if forms else program
    return replace(one, program=program, other=program_like(program, one.any_sizes.many))


@pytest.mark.parametrize("seed", cases_of(12, "chunks that go in parts"))
def test_chunks_go_in_parts(seed: int) -> None:
    """Along any index that is left as it is, of forward's rows and of gradients'."""
    draw = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    grid, index = draw.choice(({"C": 2}, {"C": 2, "F": 2}, {"F": 2}, {"C": 2, "N": 2})), draw.choice(("N", "H", "W"))
    kinds = (nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d)
    layers: list[nn.Module] = [nn.Conv2d(4, 32, 1)]
    for _ in "ab":
        layers += [draw.choice((nn.Tanh, nn.ReLU))()]
        layers += [draw.choice(kinds)(32, 32, draw.randint(1, 3), draw.choice((1, 2)), 1, bias=draw.random() < 0.7)]
    one, tensors = compiled(nn.Sequential(*layers), (4, 4, 7, 6), grid, draw.choice(("float64", "float32", "bfloat16")))
    one = in_chunks(one, draw.choice((2, 3)), index)
    verify_network(one.program)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)
    text = show(one.program)
    assert compile_text(one.graph, read_text(text, "parts.txt"), target=SM_90).program == one.program


def test_chunks_in_a_text() -> None:
    """Each of a row's chunks goes in parts, or none of them does; what comes by chunks doesn't."""
    one, _ = compiled(nn.Sequential(nn.Conv2d(4, 32, 1), nn.Tanh(), nn.Conv2d(32, 32, 3)), (4, 4, 7, 6), {"C": 2})
    one = in_chunks(one, 2, "H")
    text = show(one.program)
    lines = [line for line in text.splitlines() if " as=parts" in line]
    assert len(lines) == 4  # two chunks, and their gradients
    for line in lines:
        with pytest.raises(InputError, match="does not follow"):
            compile_text(one.graph, read_text(text.replace(line, line.replace(" as=parts", "")), "s"), target=SM_90)
    plain = compile_text(one.graph, read_text(text.replace(" as=parts", ""), "s"), target=SM_90)
    assert not parted(plain.program)
    with pytest.raises(InputError, match="as=parts is for a GPU's kernels"):
        compile_text(one.graph, read_text(text, "s"))


def test_chunks_are_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel writes in parts is sent as it is."""
    found: list[int] = []
    for fused in (False, True):
        one, tensors = compiled(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1)), (2, 32, 8, 8), {"C": 2})
        one = in_chunks(one, 2, "H", forms=fused)
        copied = Counter[str]()
        (tmp_path / str(fused)).mkdir()
        with loaded(one, tensors, tmp_path / str(fused)) as package:
            in_interpreter(package)

            def forward(end: Any, package: Any = package, copied: Any = copied) -> None:
                mesh = package.init_mesh("cpu", transport=end)
                with torch.no_grad(), Copied(copied if end.rank == 0 else Counter()):
                    package.Network(mesh)(package.scatter("input", torch.randn(2, 32, 8, 8).double(), mesh))

            World(2).run(forward)
        found.append(copied["elements"])
    made = 2 * 32 * 8 * 8  # that a rank packs; of its half it puts the chunks together
    assert found[0] - found[1] >= made


def test_another_number_of_samples_has_the_same_parts() -> None:
    one, _ = small()
    other = program_like(one.program, one.any_sizes.many)
    assert not [*faults(other)]
    assert [in_parts(row, other.grid) for row in rows_of(other)] == [
        in_parts(row, one.program.grid) for row in rows_of(one.program)
    ]
