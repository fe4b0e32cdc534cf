"""Convolutions of networks that read a halo where it has arrived: a rank's own block, and boxes around it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import cases_of
from test_networks_gpu import SM_90, loaded, step_on_no_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.cost.network import volume
from convgen.cost.network_memory import network_memory
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_network, compile_text
from convgen.packages import runtime_of
from convgen.passes.fuse_forms import FuseForms
from convgen.passes.start_halos import StartHalos
from convgen.plan.program.edited import read_text
from convgen.program.forms import rim_faults
from convgen.program.network import Program
from convgen.program.network_text import show
from convgen.program.rows import PlacedRow, index_sets
from convgen.program.verify.network import faults, verify_network
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify import network
from convgen.verify.network import check_network, report_text

EXTENTS = {1: (), 2: (9,), 3: (2, 6)}  # rows but the last
GRIDS = ({"H": 2}, {"H": 3}, {"W": 2}, {"H": 2, "W": 2}, {"N": 2, "H": 2})


class Drawn(nn.Module):
    """Convolutions of one to three dimensions between others that are smooth, the first by points."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        super().__init__()
        self.rows = (2, 1, 2, 3)[seed % 4]
        kinds: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        transposed: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
        layers: list[nn.Module] = [kinds[self.rows](4, 16, 1)]
        channels = 16
        for _ in range(rng.randint(1, 2) if self.rows < 3 else 1):
            kind, filters = rng.choice((kinds, kinds, kinds, transposed))[self.rows], rng.choice((8, 16, 32))
            kernel, groups = rng.randint(2, 4 if self.rows < 3 else 3), rng.choice((1, 1, 1, 2))
            stride, dilation = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
            layers += [
                nn.Tanh(),
                kind(
                    channels, filters, kernel, stride, (kernel - 1) * dilation // 2 + rng.randint(0, 1), groups=groups,
                    dilation=dilation, bias=rng.random() < 0.5,
                ),
            ]  # fmt: skip
            channels = filters
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def compiled(module: nn.Module, shape: tuple[int, ...], grid: dict[str, int], dtype: str = "float64") -> Any:
    graph, tensors = graph_of(module.double(), (torch.randn(shape, dtype=torch.float64),))
    one = compile_network(with_dtype(graph, dtype), Grid(tuple(grid.items())), target=SM_90, passes=())
    return one, tensors


def rows_of(program: Program) -> Iterator[PlacedRow]:
    for row in program.rows:
        yield from (row, *(one for _, one in row.derived))


def rims(program: Program) -> list[PlacedRow]:
    return [row for row in rows_of(program) if any(c.form == "rim" for chain in row.fetch for c in chain)]


def without(program: Program) -> Program:
    """The same program with everything a tensor."""

    def whole(row: PlacedRow) -> PlacedRow:
        for side in ("fetch", "store", "given", "back"):
            chains = [c and tuple(replace(one, form="whole") for one in c) for c in getattr(row, side)]
            row = replace(row, **{side: tuple(chains)})
        return replace(row, derived=tuple((k, whole(one)) for k, one in row.derived))

    return replace(program, rows=tuple(map(whole, program.rows)))


def apart(one: CompiledNetwork) -> CompiledNetwork:
    return replace(one, program=without(one.program), other=without(one.other))


@cache
def small(grid: str = "H=2", dtype: str = "float32") -> tuple[CompiledNetwork, dict[str, Tensor]]:
    """Three convolutions with halos: of filters fewer than channels, so that gradients of x are rows of their own."""
    module = nn.Sequential(
        nn.Conv2d(4, 32, 1), nn.Tanh(), nn.Conv2d(32, 16, 3, padding=1, bias=False), nn.Tanh(),
        nn.Conv2d(16, 16, 3, 2, 1), nn.MaxPool2d(3, 1, 1),
    )  # fmt: skip
    axes = {name: int(ranks) for name, ranks in (word.split("=") for word in grid.split(","))}
    return compiled(module, (2, 4, 12, 8), axes, dtype)


# ---- Right ----


@pytest.mark.parametrize("seed", cases_of(8, "test_drawn_networks_are_right"))
def test_drawn_networks_are_right(seed: int) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module, grid, dtype = Drawn(rng, seed), rng.choice(GRIDS), rng.choice(("float64", "float32", "bfloat16"))
    if module.rows == 1:
        grid = {"W": rng.choice((2, 3))}
    shape = (2, 4, *EXTENTS[module.rows], rng.choice((7, 8)))
    one, tensors = compiled(module, shape, grid, dtype)
    verify_network(one.program)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


def test_draws_have_rims() -> None:
    """Of every phase, of those with steps behind them, and in each number of dimensions."""
    found: set[tuple[str, int]] = set()
    for seed in range(8):
        rng = random.Random(seed)
        module = Drawn(rng, seed)
        shape = (2, 4, *EXTENTS[module.rows], 8)
        one, _ = compiled(module, shape, {"W": 2})
        found |= {(row.bound.operation.name, module.rows) for row in rims(one.program)}
    names = {name for name, _ in found}
    assert {"conv_forward", "conv_backward_data", "conv_forward_add"} <= names, found
    assert {rows for _, rows in found} == {1, 2, 3}, found


def test_results_and_bytes_are_those_of_windows_put_together() -> None:
    one, tensors = small("H=3", "float64")
    assert rims(one.program)
    reports = [check_network(network, tensors, interpret=True) for network in (one, apart(one))]
    assert all(report.ok for report in reports)
    assert volume(one.program) == volume(without(one.program))


@pytest.mark.parametrize("grid", ["H=2", "H=2,W=2"])
def test_ranks_without_a_kernel_put_the_window_together(grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tensors = small(grid)
    assert rims(one.program)
    monkeypatch.setattr("convgen.network_compiler.convolution_files", lambda *_: ())
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


# ---- What is gone ----


class Shapes(TorchDispatchMode):
    """Shapes of tensors that are made with memory of their own."""

    MAKES = ("new_empty", "new_zeros", "empty", "zeros", "cat", "clone")

    def __init__(self, found: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.MAKES:
            self.found.append(tuple(made.shape))
        return made


def windows(program: Program) -> set[tuple[int, ...]]:
    """Shapes of what ranks would put together."""
    found: set[tuple[int, ...]] = set()
    for row in rims(program):
        for c in (c for chain in row.fetch for c in chain if c.form == "rim"):
            sets = index_sets(row.signature, program.grid)
            pairs = zip(sets.held(c.src), sets.held(c.dst), strict=True)
            found |= {shape_of(window) for own, window in pairs if shape_of(own) != shape_of(window)}
    return found


def shape_of(box: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in box[:, 1] - box[:, 0])


@pytest.mark.parametrize("whole", [False, True])
def test_no_window_is_allocated(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tensors = small()
    sought, made = windows(one.program), list[tuple[int, ...]]()
    # What backward-data makes of the same shape, where the gradient of x is local code's, is no copy.
    sought -= {*of_vjps(one.program)}
    assert sought
    with loaded(apart(one) if whole else one, tensors, tmp_path) as package:
        launched = step_on_no_device(package, monkeypatch, second=lambda: Shapes(made))
    assert launched and made
    assert (sought <= set(made)) if whole else not sought & set(made), (sought, made)


def of_vjps(program: Program) -> Iterator[tuple[int, ...]]:
    for row in program.rows:
        for back in row.back:
            for c in back or ():
                yield from map(shape_of, index_sets(row.signature, program.grid).held(c.src))


def test_memory_counts_no_window() -> None:
    one, _ = small()
    own, whole = network_memory(one.program), network_memory(without(one.program))
    (row,) = [r for r in one.program.rows if r in rims(one.program) and r.bound.operation.name == "conv_forward"]
    size = 2 * 32 * 6 * 8 * 4  # of the block, which tanh keeps anyway
    assert row.bound.reads[0] == "_1"
    assert whole.saved - own.saved >= size and own.peak < whole.peak


# ---- The text, the verifier, the pass ----


def test_the_text_says_it_and_is_read_back_with_and_without() -> None:
    one, _ = small()
    text = show(one.program)
    assert text.count(" as=rim : ") == len(rims(one.program)) >= 2
    again = compile_text(one.graph, read_text(text, "small.txt"), target=SM_90)
    assert show(again.program) == text and len(rims(again.program)) == len(rims(one.program))
    assert again.package().files["network.py"] == one.package().files["network.py"]
    dropped = text.replace(" as=rim", "", 1)
    less = compile_text(one.graph, read_text(dropped, "small.txt"), target=SM_90)
    assert show(less.program) == dropped and len(rims(less.program)) == len(rims(one.program)) - 1
    none = compile_text(one.graph, read_text(show(without(one.program)), "small.txt"), target=SM_90)
    assert not rims(none.program)


def test_a_filters_gradient_by_a_row_of_its_own_reads_a_rim() -> None:
    one, tensors = small("H=2", "float64")
    line = "    %_2.dw = conv_forward vjp\n"
    assert line in show(one.program)
    moved = "    %_2.dw.x = exchange %_1 over=H as=rim : x[*, *, H+(1,1), *]\n"
    text = show(one.program).replace(line, f"{moved}    %_2.dw = conv_backward_filter gradient {{H=H}}\n")
    edited = compile_text(one.graph, read_text(text, "small.txt"), target=SM_90)
    assert [file.uses for file in edited.kernels if ("_2", "backward_filter") in file.uses and file.rim == "x"]
    report = check_network(edited, tensors, interpret=True)
    assert report.ok, report_text(report)


def test_a_text_that_asks_for_what_cannot_be_is_refused() -> None:
    one, _ = small()
    text = show(one.program)
    pool = next(line for line in text.splitlines() if line.startswith("    %_5.x = exchange"))
    wrong = text.replace(pool, pool.replace(" : ", " as=rim : "))
    with pytest.raises(InputError, match=r"%_5.x can't come as a rim: max_pool reads x as one tensor"):
        compile_text(one.graph, read_text(wrong, "small.txt"), target=SM_90)
    parts = text.replace("as=rim", "as=parts", 1)
    with pytest.raises(InputError, match="no all_gather at that end"):
        compile_text(one.graph, read_text(parts, "small.txt"), target=SM_90)
    with pytest.raises(InputError, match="ATen's convolutions take tensors"):
        compile_text(one.graph, read_text(text, "small.txt"))


def test_the_verifier_refuses_what_nothing_reads() -> None:
    """A rim wherever there is a conversion, one at a time: those that the pass could make are right, others wrong."""
    one, _ = small()
    plain = without(one.program)
    right = wrong = 0
    for i, row in enumerate(plain.rows):
        for side in ("fetch", "store", "given"):
            for k, chain in enumerate(getattr(row, side)):
                if not chain:
                    continue
                chains = [*getattr(row, side)]
                chains[k] = (*chain[:-1], replace(chain[-1], form="rim"))
                changed = replace(row, **{side: tuple(chains)})
                found = [*faults(replace(plain, rows=(*plain.rows[:i], changed, *plain.rows[i + 1 :])))]
                may = side == "fetch" and not any(rim_faults(row, k, plain.grid))
                assert bool(found) != may, (changed, found)
                right, wrong = right + may, wrong + (not may)
    assert right and wrong


def test_the_pass_leaves_what_travels_and_few_channels() -> None:
    one, _ = small()
    early = StartHalos().run(without(one.plain))
    in_pieces = [row for row in rows_of(early) if row.early is not None and row.bound.operation.convolves]
    assert in_pieces and not [row for row in rims(FuseForms().run(early)) if row.early is not None]
    assert not rims(FuseForms(least_part=64).run(without(one.program)))
    assert not rims(FuseForms(most_boxes=0).run(without(one.program)))
    assert FuseForms().run(one.program) is one.program


class Strided(nn.Module):
    """Halos that are exchanged forward, and added where they are stored backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, 2, 1, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(8), nn.MaxPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.pool(torch.relu(self.norm(self.a(x)))))


@pytest.mark.parametrize("grid", [{"H": 2}, {"H": 2, "W": 2}, {"H": 3}], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_exchanges_keep_channels_last(dtype: str, grid: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: pieces, messages and sums of what lies so are right, and lie so."""
    load, lay = network._loaded, Counter[bool]()

    def dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
        lies = tensor if like is None else like
        is_last = last is not None and lies.is_contiguous(memory_format=last) and not lies.is_contiguous()
        lay[is_last] += 1
        return tensor.contiguous(memory_format=last if is_last else torch.contiguous_format)

    def loaded_so(*given: Any) -> Any:
        package = load(*given)
        runtime_of(package).dense = dense
        return package

    monkeypatch.setattr(network, "_loaded", loaded_so)
    graph, tensors = graph_of(Strided(), (torch.randn(2, 8, 9, 8),), name="strided")
    one = compile_network(with_dtype(graph, dtype), Grid(tuple(grid.items())), target=SM_90)
    report = check_network(one, tensors, interpret=True)
    assert report.ok and lay[True], report_text(report)
