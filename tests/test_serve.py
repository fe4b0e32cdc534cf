"""Networks at any sizes: bounded memory, bytes that are said before they are taken, and `convgen.serve`."""

from __future__ import annotations

import gc
import importlib
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from echo import Echo
from free_networks import imported
from test_module_memory import Allocations
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import convgen
from convgen.algebra.grid import Grid
from convgen.by_sizes import SCHEDULE, LayoutPrices, call_picoseconds, least
from convgen.cost.machines import load_machine
from convgen.cost.moving import PICOSECONDS
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.program.other_sizes import program_like
from convgen.serving import Layout, Served
from convgen.spec.aten.describe import describe
from convgen.spec.exported import exported
from convgen.spec.target import CPU
from convgen.verify.processes import spawn
from convgen.verify.virtual import VirtualTransport, World

OPEN = {"z": {"H": 2, "W": 3}}


class Coder(nn.Module):
    """A convolution, a norm over channels and rows, a stride and back: halos, moments and ragged blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down, self.drop = nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.Dropout(0.5)

    def decode(self, z: Tensor, scale: float = 0.5) -> dict[str, Tensor]:
        x = self.down(F.silu(self.norm(self.a(z * scale))))
        return {"sample": F.interpolate(self.drop(x), scale_factor=2.0)}

    def forward(self, z: Tensor) -> Tensor:
        return self.decode(z)["sample"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    z = torch.zeros(1, 2, 12, 10)
    graph = exported(Coder().eval(), (z,), name="coder", training=False, opened=OPEN).graph
    compiled = compile_network(graph, Grid((("H", 2), ("W", 2))))
    return imported(compiled.package().files, tmp_path_factory.mktemp("serve"))


class Computed(Allocations):
    """Without the words of a refusal, which are bytes."""

    def count(self, out: Any) -> None:
        super().count([t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()])


def model_of(package: Any, rank: int) -> Any:
    return package.Network(package.init_mesh("cpu", transport=Echo(rank, 4)), parameters="blocks")


def run(package: Any, model: Any, n: int, h: int, w: int) -> Tensor:
    block = package.scatter("z", torch.zeros(n, 2, h, w), model._mesh)
    return model(block, sizes={"N": n, "H": h, "W": w})


def alive(name: str) -> int:
    gc.collect()
    return sum(type(one).__name__ == name for one in gc.get_objects())


def test_what_was_asked_for_last_is_kept(package: Any) -> None:
    recent = importlib.import_module(type(package.NET).__module__).Recent()
    made: list[int] = []
    for key in (1, 2, 1, 3, 1, 2):
        assert recent.of(key, lambda key=key: made.append(key) or key, 2) == key
    assert made == [1, 2, 3, 2] and len(recent) == 2


def test_rows_share_an_operation_where_their_expressions_are_the_same(package: Any) -> None:
    """Constants of another type, other letters and what a function has from around are other expressions."""
    said = importlib.import_module(type(package.NET).__module__)._expression
    same = [lambda N, H: (N, 2 * H), lambda N, H: (N, 2 * H)]
    others = [lambda N, H: (N, 2.0 * H), lambda N, H: (H, 2 * N), lambda N, H: (N, 3 * H), lambda N, H: (N, len((H,)))]
    k = 2
    around = [lambda N, H: (N, k * H), lambda N, H: (N, k * H), lambda N, H, by=2: (N, by * H)]
    assert said(same[0]) == said(same[1])
    assert len({said(one) for one in (same[0], *others, *around)}) == 8


def test_hundreds_of_sizes_take_the_memory_of_a_few(package: Any) -> None:
    model, draw = model_of(package, 1), Random(0)
    model.keeps_shapes = 8
    others = alive("Linked")
    shapes = [(n, h, w) for n in (1, 2) for h in range(2, 12) for w in range(2, 8)]
    draw.shuffle(shapes)
    counts: list[tuple[int, int]] = []
    with torch.no_grad():
        for k, shape in enumerate(shapes, 1):
            run(package, model, *shape)
            if k in (60, 120):
                counts.append((alive("Stand"), len(gc.get_objects())))
    (stands, before), (_, after) = counts
    rows = len(model._steps.rows) + sum(len(row.derived) for row in model._steps.rows.values())
    assert len(shapes) == 120 and alive("Linked") - others <= 8
    alive_stands = [one for one in gc.get_objects() if type(one).__name__ == "Stand"]
    biases = sum(type(one.operation).__name__ == "AddedBefore" for one in alive_stands)
    assert stands == counts[1][0] <= (8 + others) * rows + biases  # a bias that its product adds stands twice
    assert biases <= (8 + others) * rows
    assert after < before * 1.03


def test_steps_that_a_backward_pass_reads_outlive_their_place_among_the_last(package: Any) -> None:
    model = model_of(package, 0)
    model.keeps_shapes = 1
    y = run(package, model, 1, 9, 7)
    run(package, model, 1, 5, 5)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("learns", [False, True])
def test_bytes_that_are_foreseen_are_those_that_are_taken(package: Any, learns: bool) -> None:
    """At ten shapes within a tenth of the storages that a call makes; here within a hundredth but for small ones."""
    draw = Random(1)
    for k in range(10):
        rank, n = draw.randrange(4), draw.choice([1, 1, 3])
        h, w = (draw.randint(2, 80), draw.randint(2, 80)) if k > 1 else [(2, 3), (64, 64)][k]
        model = model_of(package, rank)
        with torch.set_grad_enabled(learns):
            foreseen = model.peak_bytes(N=n, H=h, W=w)
            y = run(package, model, n, h, w)  # tables are made once
            if learns:
                y.sum().backward()
                model.zero_grad()
            z = package.scatter("z", torch.zeros(n, 2, h, w), model._mesh)
            given = [getattr(t, "_block", t).detach() for t in (z, *model.parameters(), *model.buffers())]
            with Allocations(given) as mode:
                y = model(z, sizes={"N": n, "H": h, "W": w})
                if learns:
                    y.backward(torch.ones_like(y))
        assert abs(foreseen - mode.peak) <= 0.1 * mode.peak, (rank, n, h, w, foreseen, mode.peak)


class Filled(nn.Module):
    """Zeros, ones and numbers in order, made of no tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([torch.zeros_like(x[:, :1]), x], 1) + torch.arange(x.shape[3], dtype=x.dtype)
        return torch.relu(y * torch.ones(3, 1, 1))


def test_bytes_are_foreseen_of_what_is_made_of_nothing(tmp_path: Path) -> None:
    graph = exported(Filled(), (torch.zeros(2, 2, 6, 4),), name="filled").graph
    net: Any = imported(compile_network(graph, Grid((("N", 2),))).package().files, tmp_path)
    x = torch.randn(1, 2, 6, 4)
    for rank in range(2):
        model = net.Network(net.init_mesh("cpu", transport=Echo(rank, 2)))
        with torch.no_grad():
            assert torch.equal(model(x), Filled()(x))
            with Allocations([x]) as mode:
                y = model(x)
            assert model.peak_bytes() == mode.peak >= y.numel() * 4


@pytest.mark.parametrize("learns", [False, True])
def test_what_is_foreseen_is_so_whatever_was_before(package: Any, learns: bool) -> None:
    """Ranks choose layouts by it, each after calls of its own: a norm's table is of the first and of the tenth."""
    models = [model_of(package, rank) for rank in (0, 3)]
    with torch.set_grad_enabled(learns):
        for number, count in enumerate([(1, 33, 20), (2, 5, 71)]):
            found: set[Any] = set()
            for own, model in enumerate(models * 2):
                package.NET.place(model._mesh).known.clear()  # the memo of this rank, and not what rows hold
                if (own + number) % 2:
                    run(package, model, *count)
                    model.peak_bytes(N=count[0], H=count[1], W=count[2])
                found.add(tuple(model.foreseen(count, me) for me in range(4)))
            assert len(found) == 1


def test_what_is_too_large_is_refused_on_all_ranks_before_anything_is_made(package: Any) -> None:
    """Rank 3 alone may take less, and all refuse."""

    def program(end: VirtualTransport) -> tuple[str, int]:
        model = package.Network(package.init_mesh("cpu", transport=end), parameters="blocks")
        with torch.no_grad():
            small = model.peak_bytes(H=8, W=8)
            model.peak_bytes(H=16, W=16)  # what is foreseen is kept: its tensors without memory are none of the call's
            if end.rank == 3:
                model.limit_bytes = small
            block = package.scatter("z", torch.zeros(1, 2, 16, 16), model._mesh)
            with pytest.raises(ValueError, match="limit_bytes") as refused, Computed([block]) as mode:
                model(block, sizes={"H": 16, "W": 16})
            taken = mode.peak
            run(package, model, 1, 8, 8)
        return str(refused.value), taken

    found = World(4).run(program)
    for text, taken in found:
        assert "N=1, H=16, W=16 takes " in text and "smaller extents, or more ranks" in text
        assert taken <= 256  # a table of how many elements a norm is of, which steps of a size have


def test_sizes_that_are_wrong_are_refused_beforehand(package: Any) -> None:
    model = model_of(package, 0)
    with pytest.raises(ValueError, match="sizes= are of N, H, W; got K"):
        model.peak_bytes(K=3)
    with pytest.raises(ValueError, match="got K"):
        model.warm_up([{"K": 3}])
    for sizes in ({"H": -1, "W": 4}, {"W": 2.5}):
        with pytest.raises(ValueError, match=r"sizes= have a whole number from 0 on for [HW], got"):
            model.peak_bytes(**sizes)
        with pytest.raises(ValueError, match="a whole number from 0 on"):
            model.warm_up([sizes])
    with pytest.raises(ValueError, match="batch= is the number of samples, got -1"):
        package.region("z", model._mesh, batch=-1)
    with pytest.raises(ValueError, match="an extent of 0 can't be interpolated"):
        run(package, model, 1, 0, 4)
    model.warm_up([{"H": h, "W": 9} for h in range(2, 62)])
    assert model.keeps_shapes == 60


def test_a_size_is_run_in_the_layout_of_the_least_price_that_fits(package: Any, tmp_path: Path) -> None:
    """Prices are those of the programs as they were compiled, at each size; memory is a rank's; ranks find the same."""
    graph = exported(Coder().eval(), (torch.zeros(1, 2, 12, 10),), name="coder", training=False, opened=OPEN).graph
    grids = {"H=2,W=2": {"H": 2, "W": 2}, "W=4": {"W": 4}, "W=1": {"W": 1}}
    programs = {name: compile_network(graph, Grid(tuple(axes.items()))) for name, axes in grids.items()}
    files = {name: one.package().files for name, one in programs.items()}
    packages = {n: package if n == "H=2,W=2" else imported(f, tmp_path / n[:3]) for n, f in files.items()}
    texts = {name: one[SCHEDULE] for name, one in files.items()}
    machine = load_machine("cpu")

    def served(rank: int, whole: bool) -> Served:
        layouts: list[Layout] = []
        for name, one in packages.items():
            ranks = prod(grids[name].values())
            mesh = one.init_mesh("cpu", transport=Echo(rank % ranks, ranks))
            layouts.append(Layout(name, one, mesh, one.Network(mesh, parameters="blocks").eval()))
        return Served(layouts, lambda: LayoutPrices.read(graph, texts, CPU, machine, whole=whole), None, whole)

    draw, chosen = Random(0), set[str]()
    for whole in (False, True):
        ranks = [served(0, whole), served(3, whole)]
        for k in range(6):
            sizes = {"N": draw.choice([1, 3]), "H": draw.choice([1, 9, 700, 2000]), "W": draw.choice([3, 90, 2000])}
            at = describe(graph.at(sizes))
            wanted = {
                name: call_picoseconds(program_like(one.program, at), machine, one.dtype, whole=whole)
                for name, one in programs.items()
            }
            found = [one.at(**sizes).name for one in ranks]
            assert found == [min(wanted, key=lambda name: wanted[name])] * 2
            (listed,) = {tuple(one.choices[tuple(sizes.values())]) for one in ranks}
            assert [c.seconds for c in listed] == sorted(n / PICOSECONDS for n in wanted.values())
            chosen.add(found[0])
            for one in ranks[: k < 2]:
                one.limit_bytes = max(c.peak_bytes for c in listed) - 1
                assert one.at(**sizes).name == next(c.layout for c in listed if c.peak_bytes <= one.limit_bytes)
                one.limit_bytes = min(c.peak_bytes for c in listed) // 2
                with pytest.raises(ValueError, match="fits in no layout"):
                    one.at(**sizes)
                one.limit_bytes = None
    assert len(chosen) == 3


def test_of_layouts_that_take_as_long_the_one_that_is_named_first_is_taken() -> None:
    times, peaks = {"b": 5, "a": 5, "c": 4}, {"a": 10, "b": 10, "c": 30}
    assert least(["b", "a", "c"], times, peaks, None) == ["c", "b", "a"]
    assert least(["a", "b", "c"], times, peaks, 20) == ["a", "b", "c"]


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("_cache")
def test_a_method_is_served_in_several_layouts_on_one_set_of_parameters() -> None:
    """Two processes, a group beside the world's, and what can't be is refused on both."""

    def program(rank: int) -> None:
        torch.manual_seed(0)
        vae = Coder().double()
        group: Any = dist.new_group([0, 1])
        example = (torch.zeros(1, 2, 12, 10, dtype=torch.float64),)
        with pytest.raises(InputError, match="is of 3 ranks, and the group has 2"):
            convgen.serve(vae.decode, example, open=OPEN, layouts=["H=2", "H=3"])
        with pytest.raises(InputError, match="is not of all 2 ranks"):
            convgen.serve(vae.decode, example, open=OPEN, layouts=["H=1"])
        with pytest.raises(InputError, match="twice"):
            convgen.serve(vae.decode, example, open=OPEN, layouts=["H=2", "H=2"])
        served = convgen.serve(vae.decode, example, open=OPEN, group=group)
        assert vae.training and vae.drop.training
        assert [one.name for one in served.layouts] == ["H=2", "W=2", "W=1"]
        places = {tuple(p._block.data_ptr() for p in one.model.parameters()) for one in served.layouts}
        assert len(places) == 1
        vae.eval().requires_grad_(False)
        shapes = [(12, 10), (3, 40), (40, 3), (1, 1), (1, 7), (31, 64), (12, 10)]
        served.warm_up([{"H": h, "W": w} for h, w in shapes[:3]])
        for number, (h, w) in enumerate(shapes):
            z = torch.randn(2, 2, h, w, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            z = z.contiguous(memory_format=torch.channels_last) if number % 2 else z
            dist.all_reduce(torch.ones(3))
            y = served(z)["sample"]
            assert not y.requires_grad and float((y - vae.decode(z)["sample"]).abs().max()) < 1e-12
            for one in served.layouts:  # each of them, whatever is chosen
                with torch.no_grad():
                    assert float((one.model(z)["sample"] - vae.decode(z)["sample"]).abs().max()) < 1e-12
        said: list[Any] = [None] * 2
        dist.all_gather_object(said, str(served.choices))
        assert said[0] == said[1] and "N=2 H=3 W=40: " in said[0]
        assert served.at(H=64, W=8).name == "W=1"
        with torch.no_grad():
            split, alone = (one.model.peak_bytes(H=64, W=8) for one in (served.layouts[0], served.layouts[2]))
        assert split < alone
        served.limit_bytes = alone - 1
        assert served.at(H=64, W=8).name != "W=1"  # which takes more than it may
        z = torch.randn(1, 2, 64, 8, dtype=torch.float64)
        assert served(z)["sample"].shape == (1, 4, 64, 8)
        with pytest.raises(ValueError, match=r"fits in no layout: .*H=2 takes .*limit_bytes is"):
            served(torch.zeros(1, 2, 300, 300, dtype=torch.float64))
        served.limit_bytes = alone - rank
        with pytest.raises(RuntimeError, match=r"nothing was computed: limit_bytes: .*; layout: W=1 on ranks \[0\]"):
            served(z)
        served.limit_bytes = None
        with pytest.raises(RuntimeError, match=r"nothing was computed: H: 12 on ranks \[0\], 13 on ranks \[1\]"):
            served(torch.zeros(1, 2, 12 + rank, 10, dtype=torch.float64))
        x = torch.zeros(1, 2, 12, 10, dtype=torch.float64)
        assert served.at(H=12, W=10).name == "W=1"  # in which a rank is alone, and yet all are told
        for wrong in (x.float(), x[:, :1], x.to("meta"), x.to_sparse()):
            with pytest.raises(
                RuntimeError, match=r"ranks differ in a call, nothing was computed: z: torch\.float64 cpu"
            ):
                served(wrong if rank else x)
        served._calls = 99  # of a hundred calls one compares values
        with pytest.raises(RuntimeError, match=r"values of inputs: z \[1, 2, 12, 10\] float64 \w+ on ranks \[0\]"):
            served(x + rank)
        served(x + rank)
        with pytest.raises((InputError, ValueError), match="scale"):
            served(torch.zeros(1, 2, 12, 10, dtype=torch.float64), scale=0.5 + rank / 4)
        with pytest.raises(InputError, match="layouts share parameters"):
            convgen.serve(vae.decode, example, open=OPEN, layouts=["H=2", "C=2"])

    spawn(program, 2)


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first"):
        convgen.serve(nn.ReLU(), (torch.zeros(1, 2, 4, 4),), open={"x": {"H": 2}})


def test_what_has_no_parameters_of_torch_is_refused() -> None:
    with pytest.raises(InputError, match=r"wants a torch\.nn\.Module"):
        convgen.serve(lambda x: x, (torch.zeros(1),), open={})
    with pytest.raises(InputError, match=r"which is no torch\.nn\.Module"):
        convgen.serve(Random(0).gauss, (), open={})
