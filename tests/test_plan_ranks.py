"""`convgen plan --ranks 1,2,4`: a table of plans, samples alone, and what to type next."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.commands.plan_ranks import Counts
from convgen.compiler import compile_layer
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.errors import InputError
from convgen.resources import data_file
from convgen.spec.layer import DTYPES
from convgen.spec.reader import read_layers

FACTORY = """
from torch import nn

def net(width=8):
    return nn.Sequential(nn.Conv2d(4, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
"""
LAYER = """
name: one
layer: conv2d
input: [4, 16, 32, 32]
out_channels: 16
kernel_size: 3
padding: 1
grid: {N: 2}
algorithm: sample
"""
NETWORK = """
name: three
input: [2, 8, 16, 16]
nodes:
  - {name: a, kind: conv, out_channels: 16, kernel_size: 3, padding: 1}
  - {kind: relu}
  - {name: b, kind: conv, out_channels: 8, kernel_size: 1}
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text(FACTORY)
    (tmp_path / "layer.yaml").write_text(LAYER)
    (tmp_path / "three.yaml").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)


def run(line: str) -> Any:
    return CliRunner().invoke(cli, shlex.split(line)[1:], catch_exceptions=False)


def data_of(line: str) -> Any:
    done = run(f"{line} --json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


LARGER = "convgen plan made.py:net --input 2,4,256,256 --machine lassen"
PLANNED = "convgen plan made.py:net --input 2,4,32,32 --machine lassen"


def test_each_number_of_ranks_has_the_plan_of_its_own() -> None:
    """The table says what `--ranks P` alone says, of plans and of samples."""
    found = data_of(f"{PLANNED} --ranks 4,1,2")
    assert [row["ranks"] for row in found["ranks"]] == [1, 2, 4]
    for row in found["ranks"]:
        alone = data_of(f"{PLANNED} --ranks {row['ranks']}")
        assert row["plan"]["seconds"] == alone["overlapped_seconds"]
        assert row["plan"]["memory_bytes"] == alone["memory_bytes"]
        assert row["grid"] == alone["grid"]
        assert row["sample_parallelism"]["seconds"] == alone["sample_parallelism"]["overlapped_seconds"]
        assert row["speed_up"] == pytest.approx(found["one_rank_seconds"] / row["plan"]["seconds"])
        assert sum(one["share"] for one in row["split"]) == pytest.approx(1)
    assert found["ranks"][2]["sample_parallelism"]["why_not"] == "2 samples, 4 ranks"
    fastest = min(found["ranks"], key=lambda row: row["plan"]["seconds"])
    assert found["fastest_ranks"] == fastest["ranks"]


@pytest.mark.parametrize("by", ["", "--in-order"])
def test_others_are_compared_by_what_the_plan_was_chosen_by(by: str) -> None:
    """Samples alone and one rank stand beside the plan's step with what travels meanwhile, or beside its sum."""
    line = f"{PLANNED} --ranks 2 {by}"
    data, key = data_of(line), "seconds" if by else "overlapped_seconds"
    for name, seconds in (("one", data["one_rank_seconds"]), ("sample", data["sample_parallelism"][key])):
        [said] = re.findall(rf"^{name} .*alone: (\S+) ms, (\S+) times as long$", run(line).stdout, re.MULTILINE)
        assert said == (f"{seconds * 1e3:.3f}", f"{seconds / data[key]:.2f}")
        assert seconds >= data[key]


def test_what_does_not_fit_says_what_it_needs() -> None:
    free = data_of(f"{LARGER} --ranks 1,2")
    needs = [row["plan"]["memory_bytes"] for row in free["ranks"]]
    assert needs[1] < needs[0]
    found = data_of(f"{LARGER} --ranks 1,2 --memory {(needs[0] + needs[1]) / 2 / (1 << 30):.9f}")
    one, two = found["ranks"]
    assert not one["plan"]["fits"] and one["plan"]["seconds"] is None and one["grid"] is None
    assert one["plan"]["memory_bytes"] <= needs[0] and "needs at least" in one["plan"]["why_not"]
    assert not one["sample_parallelism"]["fits"] and one["sample_parallelism"]["memory_bytes"] == needs[0]
    assert two["plan"]["fits"] and found["fastest_ranks"] == 2
    text = run(f"{LARGER} --ranks 1,2 --memory {(needs[0] + needs[1]) / 2 / (1 << 30):.9f}").stdout
    first, second = text.splitlines()[2:4]
    assert first.count("does not fit") == 2 and "does not fit" not in second


def test_where_nothing_fits_there_is_nothing_to_type() -> None:
    line = f"{PLANNED} --ranks 1,2 --memory 1e-7"
    found = data_of(line)
    assert found["fastest_ranks"] is None and found["next"] == []
    assert "none fits" in run(line).stdout


@pytest.mark.parametrize("network", ["made.py:net --input 2,4,32,32 --args '{\"width\": 4}'", "three.yaml"])
def test_lines_to_type_next_run(network: str) -> None:
    """But for torchrun, they are commands that make the package of the table's plan."""
    found = data_of(f"convgen plan {network} --machine lassen --ranks 1,2")
    *lines, timed, launch = found["next"]
    assert all(line.startswith(f"torchrun --nproc-per-node {found['fastest_ranks']} ") for line in (timed, launch))
    for line in lines:
        done = run(line)
        assert done.exit_code == 0, f"{line}\n{done.output}"
    (row,) = (r for r in found["ranks"] if r["ranks"] == found["fastest_ranks"])
    again = data_of(" ".join(lines[-2].split()[:-2]))  # the plan, without -o
    assert (
        again["overlapped_seconds"] == row["plan"]["seconds"] and again["memory_bytes"] == row["plan"]["memory_bytes"]
    )
    name = lines[-2].split()[2].removesuffix(".yaml").removesuffix("_graph")
    assert (Path("build") / name / "network.py").is_file()


def test_lines_to_type_next_say_what_was_asked() -> None:
    """Options of two names by the one that was given, and names with blanks as a shell takes them."""
    Path("my machine.yaml").write_text(data_file("tuning", "machines", "lassen.yaml").read_text())
    Path("three.yaml").rename("the three.yaml")
    line = "convgen plan 'the three.yaml' --machine 'my machine.yaml' --in-order"
    first, second, *_ = data_of(f"{line} --ranks 1,2")["next"]
    assert shlex.split(first)[:3] == ["convgen", "import", "the three.yaml"]
    words = shlex.split(second)
    assert words[words.index("--machine") + 1] == "my machine.yaml"
    assert "--in-order" in words and "--overlapped" not in words
    assert run(f"{line} --ranks 2 -o plan.yaml").exit_code == 0
    header = Path("plan.yaml").read_text().splitlines()[0]
    assert header == "# convgen plan 'the three.yaml' --machine 'my machine.yaml' --ranks 2 --in-order"


@pytest.mark.parametrize(
    ("samples", "grid", "rest"), [(4, {"a": 2, "b": 2}, "1 has nothing to do"), (3, {"N": 3}, "2 have nothing to do")]
)
def test_lines_to_type_next_start_the_ranks_that_work(samples: int, grid: dict[str, int], rest: str) -> None:
    """A plan of five ranks may be one of as many as there are samples, and its bench and its package take these."""
    line = f"convgen plan made.py:net --input {samples},4,128,128 --machine lassen --ranks 1,5"
    found = data_of(line)
    assert found["fastest_ranks"] == 5 and found["ranks"][1]["grid"] == grid
    *_, plan, _, timed, launch = found["next"]
    assert "--ranks 5" in plan
    assert all(line.startswith(f"torchrun --nproc-per-node {samples} ") for line in (timed, launch))
    assert f"next, on 5 ranks, of which {rest}:" in run(line).stdout


def test_a_step_without_any_work_takes_no_time() -> None:
    """Of a network that gives back what it gets; and on a machine that a file says to be as fast as can be."""
    Path("same.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Identity()\n")
    rates = ", ".join(f"{kind}: 1e30" for kind in DTYPES)
    numbers = "latency_s: 0\nlink_bytes_per_s: 1e30\nmemory_bytes_per_s: 1e30\nefficiency: 1\nlaunch_s: 0\n"
    Path("fast.yaml").write_text(f"name: fast\nranks_per_node: 4\n{numbers}peak_flops_per_s: {{{rates}}}\n")
    assert run("convgen import same.py:net --input 4,3,8,8 -o same.yaml").exit_code == 0
    for network, machine in (("same.yaml", "cpu"), ("three.yaml", "fast.yaml")):
        told = run(f"convgen simulate {network} --grid N=2 --machine {machine} --plot p.svg")
        assert told.exit_code == 0 and "0.000 ms, every collective waited for at once: 1.000 times" in told.stdout
        for ranks in ("2", "1,2"):
            assert run(f"convgen plan {network} --machine {machine} --ranks {ranks}").exit_code == 0, (network, ranks)
    assert run("convgen plan layer.yaml --machine fast.yaml --ranks 1,2").exit_code == 0


def test_a_layer_has_its_best_grid() -> None:
    found = data_of("convgen plan layer.yaml --machine lassen --ranks 1,2,8")
    (layer,), machine = read_layers("layer.yaml"), load_machine("lassen")
    samples = compile_layer(layer, machine=machine)
    _, two, eight = found["ranks"]
    assert two["sample_parallelism"]["seconds"] == (
        schedule_cost(samples.schedule, Model(samples.space, machine, "float32")).total().seconds
    )
    assert two["plan"]["seconds"] <= two["sample_parallelism"]["seconds"]
    assert two["sample_parallelism"]["memory_bytes"] == 2 * 4 * (2 * 16 * 32 * 32 * 2 + 16 * 16 * 9)
    assert eight["sample_parallelism"]["why_not"] == "4 samples, 8 ranks"
    assert Grid(tuple(eight["grid"].items())).ranks == 8


def test_a_picture(tmp_path: Path) -> None:
    done = run(f"{PLANNED} --ranks 1,2 --plot p.svg")
    assert done.exit_code == 0 and done.stderr.splitlines()[-1] == "p.svg"
    assert (tmp_path / "p.svg").stat().st_size > 10_000


def test_deviations_are_those_of_single_plans() -> None:
    """In the table, the data and the picture, where the machine's file knows how far it is off."""
    lassen = data_file("tuning", "machines", "lassen.yaml").read_text()
    Path("known.yaml").write_text(f"{lassen}uncertainty: {{computing: 0.1, links: 0.3}}\n")
    line = PLANNED.replace("lassen", "known.yaml")
    found = data_of(f"{line} --ranks 1,2")
    for row in found["ranks"]:
        alone = data_of(f"{line} --ranks {row['ranks']}")
        assert row["plan"]["deviation_seconds"] == alone["deviation_seconds"] > 0
        assert row["sample_parallelism"]["deviation_seconds"] > 0
    text = run(f"{line} --ranks 1,2 --plot p.svg").stdout
    for row in found["ranks"]:
        assert f"{row['plan']['seconds'] * 1e3:.3f} +- {row['plan']['deviation_seconds'] * 1e3:.3f} ms" in text
    assert "LineCollection" in Path("p.svg").read_text()
    unknown = data_of(f"{PLANNED} --ranks 1,2")
    assert all(
        row[what]["deviation_seconds"] is None for row in unknown["ranks"] for what in ("plan", "sample_parallelism")
    )
    assert "+-" not in run(f"{PLANNED} --ranks 1,2 --plot q.svg").stdout
    assert "LineCollection" not in Path("q.svg").read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{PLANNED} --ranks 1,2 -o plan.yaml", "-o is of one plan of a network"),
        (f"{PLANNED} --ranks 1,2 --explain 0", "--explain is of one plan"),
        (f"{PLANNED} --ranks 1,2 --grid a=2", "--grid is of one plan"),
        (f"{PLANNED} --ranks 2 -o plan.yaml", "a plan stands beside its network's file"),
        ("convgen plan made.py:net --machine lassen --ranks 2", "--input is missing"),
        ("convgen plan made.py:nothing --input 2,4,8,8 --machine lassen --ranks 2", "made.py has no nothing"),
        ("convgen plan three.yaml --input 2,4,8,8 --machine lassen --ranks 2", "are of a factory"),
        ("convgen plan layer.yaml --machine lassen --ranks 2 --autocast bfloat16", "--autocast is of a network's plan"),
        ("convgen plan layer.yaml --machine lassen --ranks 2 -o plan.yaml", "-o is of one plan"),
        (
            "convgen plan layer.yaml --machine lassen --ranks 2 --optimizer-states 2",
            "--optimizer-states is of a network",
        ),
        ("convgen plan layer.yaml --machine lassen --ranks 2 --in-order", "--overlapped or --in-order is of a network"),
        (f"{PLANNED} --ranks 2 --hide-dw --overlapped", "with --hide-dw sums of parameters' gradients take no time"),
        (f"{PLANNED} --ranks 1,100000", "more than 65536"),
    ],
)
def test_refused(line: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(cli, shlex.split(line)[1:], catch_exceptions=False, standalone_mode=False)
    assert said in str(caught.value)


@pytest.mark.parametrize("ranks", ["0", "1,", "1,x", "-2", ""])
def test_no_numbers_of_ranks(ranks: str) -> None:
    done = CliRunner().invoke(cli, ["plan", "three.yaml", "--machine", "lassen", "--ranks", ranks])
    assert done.exit_code == 2 and "--ranks" in done.output


def test_numbers_are_printed_as_they_are_given() -> None:
    assert f"{Counts((1, 2, 8))} {Counts((4,))}" == "1,2,8 4"
