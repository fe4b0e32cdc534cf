"""Blocks that backward computes again: nothing changes but what is kept, what is sent, and how long it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from networks_on_ranks import package
from small_networks import exported, seeded
from torch import Tensor, nn, randn

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.cost.machines import load_machine
from convgen.cost.network import volume
from convgen.cost.network_memory import network_memory
from convgen.cost.rows import program_cost
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_network, compile_plan, plan_graph
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.plan.parts import Room
from convgen.plan.program.written import plan_of
from convgen.plan.setting import Setting
from convgen.program.again import stretches
from convgen.program.lower import lower
from convgen.spec.graph_file import write_graph
from convgen.spec.network_plan import read_plan, write_plan
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import World

LASSEN = load_machine("lassen")


class Part(nn.Module):
    """A residual block with dropout; its sum and what it is made of come out."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1)
        self.bn1 = nn.BatchNorm2d(filters)
        self.drop = nn.Dropout(0.25)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.drop(self.bn1(self.conv1(x)).relu_())
        return self.bn2(self.conv2(y)).add_(y).relu_(), y


class Network(nn.Module):
    """Three of them, the second of which gives two values that others read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.one, self.two, self.three = Part(3, 4, 1), Part(4, 6, 2), Part(6, 6, 2)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.one(self.norm(x))
        x, y = self.two(x)
        return self.last((self.three(x)[0].mean((2, 3)) + y.mean((2, 3))).relu())


def made() -> tuple[nn.Module, Tensor]:
    seeded()
    return Network().double(), randn(3, 3, 13, 10).double()


class Deep(nn.Module):
    """As many of a size that what they keep is more than what one of them takes while it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.last = nn.ModuleList(Part(3 if i == 0 else 4, 4, 1) for i in range(6)), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x, _ = part(x)
        return self.last(x.mean((2, 3)))


def made_deep() -> tuple[nn.Module, Tensor]:
    seeded()
    return Deep().double(), randn(3, 3, 13, 10).double()


def laid_out(again: tuple[str, ...], **grid: int) -> CompiledNetwork:
    return compile_network(exported(made)[0], Grid(tuple(grid.items())), again=again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "grid"),
    [
        (("one", "two", "three"), {"N": 3}),
        (("one", "three"), {"H": 5}),  # ranks that have nothing of three
        (("two", "three"), {"C": 2}),
    ],
    ids=str,
)
def test_a_network_is_as_right(again: tuple[str, ...], grid: dict[str, int]) -> None:
    """Outputs, gradients, buffers, three steps of training, dropout's masks, bytes as counted behind the seam."""
    compiled, tensors = laid_out(again, **grid), exported(made)[1]
    blocks = {s.key for s in lower(compiled.program).backward if s.again and s.kind == "forward"}
    assert all(any(label.startswith(f"{path}_") for label in blocks) for path in again)
    report = check_network(compiled, tensors)
    assert report.ok, report_text(report)


def test_two_calls_may_come_before_their_backward_passes() -> None:
    """Each is computed again with its own masks, though the step of random draws has gone on."""
    compiled, x = laid_out(("one", "two"), N=2), randn(2, 3, 3, 13, 10).double()
    with package(compiled.package().files) as net:

        def program(end: Any) -> None:
            mesh = net.init_mesh("cpu", transport=end)
            blocks = [net.scatter("x", one, mesh) for one in x]

            def gradients(*, first: bool) -> dict[str, Tensor]:
                model = net.Network(mesh, seed=0)
                calls = (model(block).square().sum() for block in blocks)
                for y in [*calls] if first else calls:
                    y.backward()
                return model.full_gradients()

            both, alone = gradients(first=True), gradients(first=False)
            assert all(torch.equal(both[n], alone[n]) for n in alone)

        World(2).run(program)


class Excited(nn.Module):
    """A block that weighs channels by what all rows come to."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


def made_excited() -> tuple[nn.Module, Tensor]:
    seeded()
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Excited()).double(), randn(5, 3, 6, 7).double()


def test_sums_that_go_by_chunks_are_computed_again() -> None:
    """All chunks are waited for before they are put together, the second time too."""
    graph, tensors = exported(made_excited)
    one = compile_network(graph, Grid((("H", 2),)), again=("1",), passes=(ChunkCollectives(),))
    steps = lower(one.program)
    joins = [[s for s in half if s.kind == "join" and "mean" in s.key] for half in (steps.forward, steps.backward)]
    assert [len(half) for half in joins] == [1, 1]
    waits = {n for s in steps.backward if s.kind == "wait_chunk" and s.again for n in s.makes}
    assert joins[1][0].again and len(joins[1][0].reads) == 4 and waits.issuperset(joins[1][0].reads)
    report = check_network(one, tensors)
    assert report.ok, report_text(report)


class Gated(nn.Module):
    """A block whose channels are let through by a buffer, which changes then."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.register_buffer("level", torch.tensor([0.5, -0.5, 1.5, 2.5]))

    def forward(self, x: Tensor) -> Tensor:
        gate = (self.level > 0).to(x.dtype)
        y = self.two(self.one(x) * gate[:, None, None]).relu()
        self.level.sub_(1)
        return y


def made_gated() -> tuple[nn.Module, Tensor]:
    seeded()
    return nn.Sequential(Gated(), Gated()).double(), randn(2, 3, 6, 7).double()


def test_what_reads_a_buffer_that_changes() -> None:
    """The second time it reads what the first time has read."""
    graph, tensors = exported(made_gated)
    report = check_network(compile_network(graph, Grid((("H", 2),)), again=("0", "1")), tensors)
    assert report.ok, report_text(report)


def test_what_is_counted() -> None:
    """Backward sends what these blocks send in forward once more; less is kept, more is computed."""
    plain, again = (laid_out(paths, H=2).plain for paths in ((), ("two",)))
    sent = [volume(p) for p in (plain, again)]
    (two,) = [s for s in stretches(plain) if s.path == "two"]
    names = {m.step for m in plain.forward() if two.start <= m.row < two.stop}
    more = sorted(r["step"] for r in sent[1]["backward"] if r["step"] in names)
    assert more == sorted(r["step"] for r in sent[0]["forward"] if r["step"] in names)
    assert sent[1]["forward"] == sent[0]["forward"]
    kept = [network_memory(p) for p in (plain, again)]
    assert kept[1].saved < kept[0].saved and kept[1].peak <= kept[0].peak
    costs = [program_cost(p, LASSEN, "float64") for p in (plain, again)]
    dearer = {i for i, (a, b) in enumerate(zip(*(c.rows for c in costs), strict=True)) if b > a}
    assert dearer and dearer <= set(range(two.start, two.stop))


def recomputing(memory_bytes: int) -> Setting:
    return Setting(machine=LASSEN, room=Room(memory_bytes), recompute=True)


def test_a_plan_fits_its_memory(tmp_path: Path) -> None:
    graph, grid = exported(made_deep)[0], Grid((("a", 1),))  # where no other layout takes less
    free, found = plan_graph(graph, 1, Setting(machine=LASSEN), grid)
    assert found.memory_bytes == network_memory(found.program).peak
    least = network_memory(replace(found.program, again=stretches(found.program))).peak
    budget = (least + found.memory_bytes) // 2
    tight, fits = plan_graph(graph, 1, recomputing(budget), grid)
    assert fits.program.again and fits.memory_bytes <= budget and fits.seconds >= found.seconds
    assert fits.memory_bytes == network_memory(fits.program).peak
    assert fits.seconds == pytest.approx(program_cost(fits.program, LASSEN, free.dtype).seconds, rel=1e-9)
    for one in fits.program.again:  # none of them for nothing
        fewer = tuple(s for s in fits.program.again if s != one)
        assert network_memory(replace(fits.program, again=fewer)).peak > budget
    (tmp_path / "network.yaml").write_text(write_graph(graph))
    (tmp_path / "plan.yaml").write_text(write_plan(plan_of(fits.program, "network.yaml")))
    same = compile_plan(graph, read_plan(tmp_path / "plan.yaml"))
    assert same.program.again == tight.program.again and same.package().files == tight.package().files
    with pytest.raises(InputError, match=r"needs at least .* GiB a rank, of the layouts found, .* are given") as error:
        plan_graph(graph, 1, recomputing(least // 2), grid)
    assert "--recompute" not in (error.value.hint or "") and error.value.notes
    with pytest.raises(InputError, match="of the layouts found") as error:
        plan_graph(graph, 1, Setting(machine=LASSEN, room=Room(budget)), grid)
    assert "--recompute" in (error.value.hint or "")


def test_what_is_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no block 'tow' to compute again") as error:
        laid_out(("tow",), N=2)
    assert error.value.hint.startswith("two")
    layer = Path(__file__).parent.parent / "examples" / "res5a_branch2b.yaml"
    done = CliRunner().invoke(cli, ["compile", str(layer), "--recompute", "two", "-o", str(tmp_path)])
    assert "--recompute two is of a network's blocks" in str(done.exception or done.output)
