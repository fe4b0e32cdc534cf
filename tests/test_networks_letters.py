"""Letters of a grid that no input carries begin inside of the network; axes that split nothing are said."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_networks import seeded
from torch import Tensor, nn

import convgen
from convgen.algebra.algorithms import ALGORITHMS, Algorithm
from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.cost.axes import split_shares
from convgen.cost.network import volume
from convgen.errors import IdleAxisWarning, InputError
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.program.verify.network import faults
from convgen.spec.exported import graph_of
from convgen.spec.graph_file import write_graph
from convgen.verify.network import check_network, report_text
from convgen.verify.processes import spawn


class UNet(nn.Module):
    """Of grey images: two levels, norms, a transposed convolution, a skip."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.low = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.join = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        return self.join(torch.cat([a, self.up(self.low(nn.functional.max_pool2d(a, 2)))], 1))


class Classifier(nn.Module):
    """Of grey images: a stem of too few filters for four ranks, a grouped block, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.deep = nn.Conv2d(3, 8, 3, padding=1)
        self.wide = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        return self.fc(torch.relu(self.wide(torch.relu(self.deep(x)))).mean((2, 3)))


class Generator(nn.Module):
    """[DCGAN]'s: a latent vector as an image of one pixel, transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.next = nn.Sequential(nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.ConvTranspose2d(4, 1, 4, 2, 1)

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(self.last(self.next(self.first(z[:, :, None, None]))))


class Words(nn.Module):
    """Numbers of words, embedded, attention with two heads, weights that are normalised in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in self.qkv(self.embed(x)).chunk(3, 2))
        made = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(made.transpose(1, 2).flatten(2))


IMAGE = (3, 1, 14, 10)
OF_CHANNELS = ({"C": 2}, {"C": 4}, {"F": 2}, {"N": 2, "C": 2}, {"H": 2, "C": 2}, {"C": 2, "F": 2})
CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int], str]] = [
    *((make, IMAGE, grid, "CF") for make in (UNet, Classifier) for grid in OF_CHANNELS),
    (Generator, (3, 6), {"H": 2}, "H"),
    (Generator, (3, 6), {"C": 2}, ""),
    (Generator, (3, 6), {"H": 2, "W": 2}, "HW"),
    (Generator, (3, 6), {"H": 3, "C": 2}, "H"),
]


def compiled(
    make: Callable[[], nn.Module], shape: tuple[int, ...], grid: dict[str, int], algorithm: str | None = None
) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    seeded()
    graph, tensors = graph_of(make().double(), (torch.randn(shape, dtype=torch.float64),))
    return compile_network(graph, Grid(tuple(grid.items())), algorithm), tensors


@pytest.mark.parametrize(
    ("make", "shape", "grid", "begun"),
    CASES,
    ids=[f"{make.__name__} {','.join(f'{a}={n}' for a, n in grid.items())}" for make, _, grid, _ in CASES],
)
def test_a_letter_that_no_input_carries_begins_inside(
    make: Callable[[], nn.Module], shape: tuple[int, ...], grid: dict[str, int], begun: str
) -> None:
    one, tensors = compiled(make, shape, grid)
    carried = {a for v in one.program.values.values() if v.kind == "input" for axes in v.stored for a in axes}
    shares = split_shares(one.program)
    for axis in grid:
        assert (axis in carried) != (axis in begun)
        assert shares[axis].activations > 0.4 and shares[axis].rows > len(one.program.rows) // 2
    assert not one.idle_lines and not list(faults(one.program))
    report = check_network(one, tensors)
    assert report.ok, report_text(report)


def test_words_are_split_by_features_and_heads() -> None:
    """An input of whole numbers carries no channels; a weight that rows compute may begin a letter as well."""
    seeded()
    graph, tensors = graph_of(Words().double(), (torch.randint(0, 11, (3, 5)),))
    one = compile_network(graph, Grid((("C", 2),)))
    roles = {row.bound.operation.name: dict(row.roles) for row in one.program.rows}
    assert any("C" in axes for name, of in roles.items() if "attention" in name for axes in of.values()), roles
    report = check_network(one, tensors)
    assert report.ok, report_text(report)


def test_the_row_that_begins_a_letter_sends_nothing_forward() -> None:
    one, _ = compiled(UNet, IMAGE, {"C": 2})
    first = one.program.rows[0]
    assert dict(first.roles) == {"F": ("C",)}
    assert not any(first.fetch) and not any(first.store)
    sent = {s["step"]: s for s in volume(one.program, of_inputs=True)["backward"]}
    assert any(name.endswith("dx") for name in sent)  # its input's gradient alone is a sum over C


def test_a_letter_that_an_input_carries_stays_where_it_is() -> None:
    """Three channels over four ranks carry it, too: a rank has none, and the first convolution's sum is split."""
    for ranks in (2, 4):
        one, _ = compiled(lambda: UNet(3), (3, 3, 14, 10), {"C": ranks})
        assert one.program.values["x"].stored == ((), ("C",), (), ())
        assert dict(one.program.rows[0].roles)["C"] == ("C",)
        assert split_shares(one.program)["C"].rows == len(one.program.rows) - 1  # the number of batches is one number


# ---- What is said ----


def stem() -> nn.Module:
    seeded()
    return nn.Conv2d(1, 3, 3, padding=1)


def test_an_algorithm_whose_y_is_no_x_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network would follow its letters and have another algorithm's layout."""
    monkeypatch.setitem(ALGORITHMS, "gathered-y", Algorithm("NDHWC", "C", "", "C", ""))
    with pytest.raises(InputError, match="gathered-y splits y's filters otherwise than x's channels"):
        compiled(lambda: nn.Conv2d(4, 4, 3), (2, 4, 8, 8), {"C": 2}, "gathered-y")


def test_an_axis_that_splits_nothing_says_why_and_what_would() -> None:
    few, _ = compiled(stem, IMAGE, {"N": 2, "C": 4})
    assert few.idle_lines == [
        "Conv2d: axis C of 4 ranks splits nothing, they compute alike: the largest extent that carries C or could "
        "begin it is 3; H or W of 4 would split"
    ]
    nowhere, _ = compiled(stem, IMAGE, {"D": 2})
    (line,) = nowhere.idle_lines
    assert "no dimension of an input carries D, and no row begins it; N or C or H or W of 2 would split" in line
    auto, _ = compiled(UNet, IMAGE, {"a": 2}, "auto")
    (line,) = auto.idle_lines
    assert line == (
        "UNet: algorithm auto finds that one rank is best, so all 2 ranks compute alike; a named algorithm splits"
    )


def test_commands_say_what_an_axis_splits(tmp_path: Path) -> None:
    seeded()
    graph, _ = graph_of(UNet(), (torch.zeros(IMAGE),))
    file = tmp_path / "unet.yaml"
    file.write_text(write_graph(graph))

    def run(*args: str) -> Any:
        done = CliRunner().invoke(cli, [args[0], str(file), *args[1:]])
        assert done.exit_code == 0, done.output
        return done

    done = run("explain", "--grid", "C=2,D=2")
    said = [line.split() for line in done.stdout.splitlines() if "ranks" in line]
    assert [" ".join(line) for line in said[:2]] == [
        "C 2 ranks 19 of 20 rows, 100% of activations' bytes, 100% of parameters' bytes",
        "D 2 ranks splits nothing: no dimension of an input carries D, and no row begins it; N or H or W of 2 would "
        "split",
    ]
    shares = json.loads(run("explain", "--grid", "C=2,D=2", "--json").stdout)[0]["axes"]
    assert shares["D"] == {"ranks": 2, "rows": 0, "activations": 0.0, "parameters": 0.0}
    for command in (("compile", "--emit", "cost"), ("check",)):
        done = run(*command, "--grid", "D=2")
        assert done.stderr.startswith("warning: UNet: axis D of 2 ranks splits nothing")
        assert not run(*command, "--grid", "C=2").stderr


def test_python_warns_once_from_the_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path))
    for _ in range(2):
        with pytest.warns(IdleAxisWarning, match="axis D of 2 ranks splits nothing") as found:
            convgen.from_torch(stem(), (torch.zeros(IMAGE),), grid="D=2")
        assert len(found) == 1 and found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convgen.from_torch(stem(), (torch.zeros(IMAGE),), grid="N=2,C=2")


@pytest.mark.slow
def test_where_warnings_are_errors_every_rank_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none waits for another; else rank 0 alone warns."""
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path))

    def program(rank: int) -> list[int]:
        x = torch.zeros(IMAGE)
        with pytest.warns(IdleAxisWarning) if not rank else warnings.catch_warnings(record=True) as told:
            convgen.parallelize(stem(), (x,), {"D": 2}, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(IdleAxisWarning, match="splits nothing"):
                convgen.parallelize(stem(), (x,), {"D": 2}, None)
        return [len(told or ())]

    assert spawn(program, 2) == [[1], [0]]
