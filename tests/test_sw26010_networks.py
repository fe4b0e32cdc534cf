"""Networks that train on emulated SW26010s: three steps against one device in float64, and every event against the
closed form of its row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from networks_on_ranks import imported, package, random_input
from torch import nn

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.operations.losses import CrossEntropy
from convgen.operations.row import At
from convgen.spec.network_graph import read_network_graph
from convgen.spec.target import read_target
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.faults import HandshakeFault, MeshFault
from convgen.sw26010.network.account import counts_json
from convgen.sw26010.network.core_group import CoreGroup
from convgen.sw26010.network.nodes import nodes_of
from convgen.sw26010.network.sums import LABEL, PART, sum_over_nodes, sum_tasks
from convgen.verify.network import NetworkReport, check_network, report_text
from convgen.verify.virtual import Group, World

NETWORKS = Path(__file__).parent.parent / "examples" / "networks" / "swcaffe"
MESH = read_target("sw26010")
ONE, TWO = {"N": 4}, {"M": 2, "N": 4}  # processors of four core groups


def trained(graph: Any, grid: dict[str, int], tensors: Any = None, **how: Any) -> NetworkReport:
    """Three steps of SGD, outputs, gradients, statistics and losses: to 1e-10, with all events as the closed forms."""
    compiled = compile_network(graph, Grid(tuple(grid.items())), target=MESH, **how)
    report = check_network(compiled, tensors or {})
    assert report.ok, report_text(report)
    assert report.dtype == "float64" and max(one.error for one in report.compared) < 1e-10
    assert report.mesh is not None and not report.mesh.wrong
    return report


def written(tmp_path: Path, name: str, shape: list[int]) -> Any:
    """An example network with other samples and pixels."""
    text = (NETWORKS / f"{name}.yaml").read_text()
    (tmp_path / "network.yaml").write_text(re.sub(r"input: .*", f"input: {shape}", text))
    return read_network_graph(str(tmp_path / "network.yaml"))


def test_lenet_trains_on_one_processor_and_on_two(tmp_path: Path) -> None:
    trained(written(tmp_path, "lenet", [5, 1, 19, 21]), ONE)
    trained(written(tmp_path, "lenet", [3, 1, 18, 17]), TWO)  # core groups without a sample


def test_vgg_of_an_eighth_of_the_width_trains_on_two_processors(tmp_path: Path) -> None:
    report = trained(written(tmp_path, "vgg16_eighth", [3, 3, 32, 33]), TWO)
    kinds = {task.kind for account in report.mesh.accounts for task in _tasks(account)}  # type: ignore[union-attr]
    assert {"convolution", "inner product", "pooling", "loss", "sums", "network", "update"} <= kinds


def test_alexnet_of_an_eighth_with_its_normalisation_trains(tmp_path: Path) -> None:
    graph = written(tmp_path, "alexnet_eighth", [5, 3, 63, 65])
    report = trained(graph, TWO)
    ran = {task.kind for account in report.mesh.accounts for task in _tasks(account)}  # type: ignore[union-attr]
    assert "local response normalisation" in ran


def _tasks(account: Any) -> list[Any]:
    return [task for tasks in account.tasks.values() for task in tasks]


class Mixed(nn.Module):
    """Rows of all kinds: what has no program of the mesh, too."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        wide = draw.choice([4, 6])
        self.conv = nn.Conv2d(3, wide, draw.choice([1, 3]), stride=draw.choice([1, 2]), padding=draw.choice([0, 1]))
        self.lrn = nn.LocalResponseNorm(draw.randint(1, 5), alpha=draw.uniform(0.5, 2.0), k=draw.uniform(1.0, 2.0))
        self.norm, self.other = nn.BatchNorm2d(wide), nn.Conv2d(wide, wide, 3, padding=1, groups=draw.choice([1, 2]))
        self.up = nn.ConvTranspose2d(2 * wide, 3, 2, stride=2)
        self.pool = draw.choice([nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)])
        self.drop, self.end = nn.Dropout(0.3), nn.LazyLinear(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.lrn(self.conv(x))))
        y = torch.cat([x + self.other(x), torch.sigmoid(x)], 1)
        return torch.nn.functional.log_softmax(self.end(self.drop(self.pool(self.up(y)).flatten(1))), 1)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_rows_on_drawn_grids(seed: int) -> None:
    """Extents and batches are odd, shares uneven, some core groups have nothing."""
    draw = Random(seed)
    x = random_input((draw.choice([3, 5]), 3, draw.randint(6, 9), draw.randint(6, 9)), seed)
    module = Mixed(draw).double()
    module(x)
    given = imported(module, x)
    grid = draw.choice([{"N": 3}, {"M": 2, "N": 2}, {"H": 2, "N": 2}, {"C": 2, "N": 2}])
    how = {"statistics": draw.choice(["global", "local"])}
    trained(given.graph, grid, {**given.constants, **module.state_dict()}, **how)


class Normed(nn.Module):
    """Batch norms with and without scale and shift, of pixels and of features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.plain, self.flat, self.last = nn.BatchNorm2d(6, affine=False), nn.BatchNorm1d(4), nn.Linear(6, 4)
        for norm in (self.norm, self.plain, self.flat):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return self.flat(self.last(self.plain(y).mean((2, 3))))


@pytest.mark.parametrize("train", [False, True])
def test_batch_norms_are_the_meshs(train: bool) -> None:
    torch.manual_seed(3)
    one = imported(Normed().double(), torch.randn(5, 3, 6, 7, dtype=torch.float64), train=train)
    report = trained(one.graph, ONE, one.constants)
    ran = [task.kind for account in report.mesh.accounts for task in _tasks(account)]  # type: ignore[union-attr]
    assert ran.count("normalisation") >= 3 * 3


class Bags(nn.Module):
    """Whole numbers are added, joined and rectified before they pick rows of a table; a layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last, self.unused = nn.Embedding(9, 4), nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = (x > 0).long(), (x > 1).long()
        return self.last(self.table(torch.cat([low + high, torch.relu(low)], 1)).mean(1))


def test_rows_of_whole_numbers_are_loops_of_the_management_core_and_what_has_no_gradient_is_not_renewed() -> None:
    torch.manual_seed(4)
    one = imported(Bags().double(), torch.randn(5, 4, dtype=torch.float64))
    report = trained(one.graph, {"N": 2}, {**one.constants, **one.module.state_dict()})
    tasks = report.mesh.accounts[0].tasks  # type: ignore[union-attr]
    loops = {task.name for several in tasks.values() for task in several if task.kind == "management core"}
    assert {"Elementwise", "Concatenate"} <= loops
    assert {label for label, part in tasks if part == "update"} == {"table.weight", "last.weight", "last.bias"}


@pytest.mark.parametrize("ignore", [-100, 0, 2**24 + 1])
def test_a_label_that_is_ignored_is_any_whole_number(ignore: int) -> None:
    """Also one that isn't a float32."""
    x, target = random_input((3, 5)).float(), torch.tensor([1, ignore, 4])
    operation, inside = CrossEntropy((3, 5), ignore=ignore), (((0, 3), (0, 5)), ((0, 3),))
    at, group = At({"d0": (0, 3)}, inside, inside), CoreGroup()
    row = group.row(operation, 0, at, "float32")
    assert row is not None and row.takes(x.numpy(), target.numpy())
    (loss, count), kept = group.compute("loss", row, x.numpy(), target.numpy())
    (dx, _) = group.gradients("loss", row, (True, False), kept, np.array(2.0, np.float32))
    x.requires_grad_()
    truth = nn.functional.cross_entropy(x, target, ignore_index=ignore, reduction="sum")
    (2 * truth).backward()
    assert count == 2 and float(loss) == pytest.approx(float(truth.detach()), rel=1e-6)
    np.testing.assert_allclose(dx, x.grad, atol=1e-6)  # type: ignore[arg-type]


def test_a_package_imports_the_emulator_alone_and_its_sgd_is_torchs() -> None:
    """With momentum and decay, over several steps."""
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 5 * 4, 2)).double()
    x, target = random_input((4, 1, 7, 6)), torch.tensor([0, 1, 1, 0])
    given = imported(module, x)
    compiled = compile_network(given.graph, Grid((("N", 2),)), target=MESH)
    files = compiled.package().files
    names = {
        name for text in files.values() for name in re.findall(r"^(?:from|import) (convgen\S*)", text, re.MULTILINE)
    }
    assert names and all(name.startswith("convgen.sw26010.network.") for name in names)
    start = {n: t.clone() for n, t in module.state_dict().items()}
    truth = torch.optim.SGD(module.parameters(), 0.1, 0.9, weight_decay=0.01)
    for _ in range(3):
        truth.zero_grad()
        nn.functional.cross_entropy(module(x), target, reduction="sum").backward()
        truth.step()

    def rank(end: Any, package: Any) -> dict[str, torch.Tensor]:
        model = package.Network(package.init_mesh("cpu", transport=end))
        model.load_full(start)
        optimizer = package.SGD(model, 0.1, 0.9, weight_decay=0.01)
        mesh = model._mesh
        mine = package.region("output", mesh)[0]
        for _ in range(3):
            optimizer.zero_grad()
            made = model(package.scatter("input", x, mesh))
            nn.functional.cross_entropy(made, target[mine], reduction="sum").backward()
            optimizer.step()
        return {n: t.clone() for n, t in model.full_state_dict().items()}

    with package(files) as made:
        for found in World(2).run(lambda end: rank(end, made)):
            for name, t in module.state_dict().items():
                torch.testing.assert_close(found[name], t, rtol=0, atol=1e-12)


def test_what_core_groups_do_not_compute_is_refused() -> None:
    """Under autocast on all ranks alike, before anything is sent; numbers of SGD as torch's refuses them."""
    module, x = nn.Sequential(nn.Linear(3, 2)), random_input((4, 3)).float()
    compiled = compile_network(imported(module, x).graph, Grid((("N", 2),)), target=MESH)

    def rank(end: Any, package: Any) -> list[str]:
        model = package.Network(package.init_mesh("cpu", transport=end))
        block, said = package.scatter("input", x, model._mesh), list[str]()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError) as caught:
            model(block)
        said.append(str(caught.value))
        for numbers in ((-0.1,), (float("inf"),), ("0.1",), (0.1, -0.9), (0.1, 0.9, float("nan"))):
            with pytest.raises(ValueError, match="a finite number from 0, got") as wrong:
                package.SGD(model, *numbers)
            said.append(str(wrong.value))
        return said

    with package(compiled.package().files) as made:
        one, other = World(2).run(lambda end: rank(end, made))
    assert "not under autocast of torch.bfloat16: an SW26010 computes in double" in one[0] and one == other
    assert one[1] == "SGD: lr is a finite number from 0, got -0.1" and one[5].endswith(
        "weight_decay is a finite number from 0, got nan"
    )


def test_what_network_prints_is_what_a_run_counts(tmp_path: Path) -> None:
    """Row by row, and in all; its picture has layers, sums and what is left."""
    graph = written(tmp_path, "lenet", [3, 1, 16, 16])
    report = trained(graph, {"M": 2, "N": 1})
    arguments = ["sw26010", "network", str(tmp_path / "network.yaml"), "--grid", "M=2,N=1", "--json"]
    said = CliRunner().invoke(cli, [*arguments, "--plot", str(tmp_path / "step.svg")])
    assert said.exit_code == 0, said.output
    drawn = (tmp_path / "step.svg").read_text()
    assert all(f">{word}<" in drawn for word in ("conv1", "ip1", "sums", "all-reduce", "the others"))
    (step,) = json.loads(said.stdout)
    account = report.mesh.accounts[step["rank"]]  # type: ignore[union-attr]
    found = {(row["row"], row["part"]): row for row in step["rows"]}
    assert found.keys() == account.tasks.keys()
    for key, several in account.counted.items():
        counts = Counts()
        for one in several:
            counts.add(one)
        events = counts_json(counts)
        assert {name: found[key][name] for name in events} == events
    assert step["all"] == counts_json(account.total)


# ---- Sums over core groups and nodes ----


def summed(ranks: int, each: int, elements: int, mutate: Callable[[int, CoreGroup], None] = lambda *_: None) -> Any:
    """Of every rank the sum that it has, its account, and the nodes; and what it should be."""
    nodes = [tuple(range(n * each, (n + 1) * each)) for n in range(ranks // each)]
    vectors = np.random.default_rng(ranks + elements).standard_normal((ranks, elements))

    def rank(end: Any) -> tuple[Any, CoreGroup]:
        group = CoreGroup()
        mutate(end.rank, group)

        def exchange(members: tuple[int, ...], sends: Any, receives: Any, like: Any) -> dict[int, Any]:
            to, come = [sends[r].size if r in sends else 0 for r in members], [receives.get(r, 0) for r in members]
            parts = [torch.from_numpy(sends[r]) for r in members if r in sends]
            packed = torch.cat(parts) if parts else torch.from_numpy(like[:0])
            one: Group = type("G", (), {"ranks": members, "sums": "native", "add": None})()
            got = end.exchange(packed, (to, come), one)
            return {r: p.numpy() for r, p in zip(members, got.split(come), strict=True) if p.numel()}

        return sum_over_nodes(vectors[end.rank], nodes, end.rank, group, exchange), group

    return World(ranks).run(rank), nodes, vectors.sum(0)


@pytest.mark.parametrize(("ranks", "each", "elements"), [(4, 4, 7), (8, 4, 1001), (8, 2, 5), (4, 1, 3), (3, 3, 130)])
def test_sums_are_right_and_counted(ranks: int, each: int, elements: int) -> None:
    found, nodes, truth = summed(ranks, each, elements)
    for rank, (total, group) in enumerate(found):
        np.testing.assert_allclose(total, truth, rtol=0, atol=1e-12)
        assert total.tobytes() == found[0][0].tobytes()
        assert group.account.tasks.get((LABEL, PART), []) == sum_tasks(nodes, rank, elements, "float64")
        assert not list(group.account.wrong())


def test_a_handshake_that_is_missing_is_no_sum() -> None:
    def forget(rank: int, group: CoreGroup) -> None:
        group.synchronised += rank == 5  # it has waited once more than the others of its node

    with pytest.raises((HandshakeFault, MeshFault)):
        summed(8, 4, 10, forget)


def test_ranks_are_core_groups_of_nodes() -> None:
    assert nodes_of({"M": 2, "N": 3}).split([0, 1, 2, 3, 4, 5]) == [(0, 1, 2), (3, 4, 5)]
    assert nodes_of({"N": 8}).split([0, 2, 4, 6]) == [(0, 2), (4, 6)]
    assert nodes_of({"H": 2, "N": 1}).each == 2
    for grid, said in (
        ({"N": 5}, "fill no whole nodes"), ({"M": 2, "N": 5}, "on 2 nodes"), ({"M": 3, "N": 2}, "power of two"),
        ({"N": 4, "M": 2}, "come before"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            nodes_of(grid)
