"""Commands on graph files: compile, check, explain, import --strict, in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from small_networks import exported, unet

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.packages import CONSTANTS
from convgen.plan.program.written import plan_of
from convgen.spec.graph_file import constants_path, read_graph, write_graph
from convgen.spec.network_plan import write_plan
from convgen.spec.safetensors import tensors_bytes

GRID = ("--grid", "N=2,H=2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """unet.yaml, and its constants beside it."""
    path = tmp_path_factory.mktemp("networks") / "unet.yaml"
    graph, tensors = exported(unet)
    path.write_text(write_graph(graph))
    constants_path(path).write_bytes(tensors_bytes(tensors))
    return path


def convgen(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def refused(*words: object) -> str:
    done = convgen(*words)
    assert isinstance(done.exception, InputError), done.output
    return str(done.exception)


def test_a_package_is_written_and_runs_without_convgen(files: Path, tmp_path: Path) -> None:
    done = convgen("compile", files, *GRID, "-o", tmp_path)
    package = tmp_path / "UNet"
    assert done.stdout == f"{package}\n"
    names = {p.name for p in package.iterdir()}
    assert {"__init__.py", "network.py", "schedule.txt", "volume.json", CONSTANTS} < names
    assert sum(name.startswith("_convgen_runtime_") for name in names) == len(names) - 5 == 1
    first = (package / "network.py").read_text().splitlines()[:2]
    assert first[1] == "#   convgen compile unet.yaml --grid N=2,H=2"
    assert str(tmp_path) not in (package / "network.py").read_text()
    code = (
        "import sys, UNet as net; assert not any(m.split('.')[0] == 'convgen' for m in sys.modules); "
        "print(net.NAME, net.SPEC['grid'], net.Network._constants['weights'].flatten().tolist(), len(net.VOLUME))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.stdout == "UNet {'N': 2, 'H': 2} [0.5, 1.5, 2.5] 2\n", ran.stderr


def test_what_is_written_is_written_again_and_nothing_else_lost(files: Path, tmp_path: Path) -> None:
    package = tmp_path / "UNet"
    assert convgen("compile", files, *GRID, "-o", tmp_path).exit_code == 0
    before = {p.name: p.read_bytes() for p in package.iterdir()}
    (package / "_convgen_runtime_0.py").write_text("an older one")
    assert convgen("compile", files, *GRID, "-o", tmp_path).exit_code == 0
    assert {p.name: p.read_bytes() for p in package.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["UNet"]
    (package / "notes.txt").write_text("mine")
    assert "notes.txt in it would be lost" in refused("compile", files, *GRID, "-o", tmp_path)
    other = tmp_path / "other"
    (other / "UNet").mkdir(parents=True)
    (other / "UNet" / "network.py").write_text("mine")
    assert "is no package that convgen generated" in refused("compile", files, *GRID, "-o", other)
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "UNet").write_text("mine")
    assert "no folder, and would be lost" in refused("compile", files, *GRID, "-o", tmp_path / "file")


def test_constants_are_needed(files: Path, tmp_path: Path) -> None:
    (tmp_path / "unet.yaml").write_text(files.read_text())
    text = refused("compile", tmp_path / "unet.yaml", *GRID, "-o", tmp_path)
    assert "unet.constants.safetensors" in text
    assert [p.name for p in tmp_path.iterdir()] == ["unet.yaml"]


def test_stages(files: Path) -> None:
    printed = convgen("compile", files, *GRID, "--emit", "schedule").stdout
    assert printed.startswith("network UNet on grid(N=2, H=2) {")
    assert "class Network(NetworkModule):" in convgen("compile", files, *GRID, "--emit", "module").stdout
    (cost,) = json.loads(convgen("compile", files, *GRID, "--emit", "cost", "--json").stdout)
    text = convgen("compile", files, *GRID, "--emit", "cost").stdout
    for part in ("forward", "backward"):
        sent = [s["bytes_sent_per_rank"] for s in cost["volume"][part]]
        assert cost[f"{part}_bytes"] == sum(map(sum, sent)) > 0
        assert cost[f"{part}_bytes_busiest_rank"] == max(map(sum, zip(*sent, strict=True)))
        assert f"{cost[f'{part}_bytes']:,}" in text
    explained = convgen("explain", files, *GRID).stdout
    assert "x    [3/N, 2, 20/H, 12]" in explained and f"{cost['forward_bytes']:,}" in explained
    assert json.loads(convgen("explain", files, *GRID, "--json").stdout) == [cost]


def test_a_program_that_is_printed_is_compiled(files: Path, tmp_path: Path) -> None:
    """The same package, but for the command in its header; `check` and `explain` take it, too."""
    s = tmp_path / "s.txt"
    s.write_text(convgen("compile", files, *GRID, "--emit", "schedule").stdout)
    assert convgen("compile", files, *GRID, "-o", tmp_path / "a").exit_code == 0
    assert convgen("compile", files, "--schedule", s, "-o", tmp_path / "b").exit_code == 0
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / d / "UNet").iterdir()} for d in "ab")
    assert one.pop("network.py").replace(b"--grid N=2,H=2", b"--schedule s.txt") == other.pop("network.py")
    assert one == other and "schedule.txt" in one
    (cost,) = json.loads(convgen("compile", files, *GRID, "--emit", "cost", "--json").stdout)
    words = ("compile", files, "--schedule", s, "--emit", "cost", "--json")
    assert json.loads(convgen(*words).stdout) == [cost | {"algorithm": "edited"}]
    assert "x    [3/N, 2, 20/H, 12]" in convgen("explain", files, "--schedule", s).stdout
    assert convgen("check", files, "--schedule", s, "--dtype", "float64").exit_code == 0
    assert "--grid: " in refused("compile", files, *GRID, "--schedule", s)
    assert "here are 2" in refused("compile", files, files, "--schedule", s)
    assert "cannot read" in refused("compile", files, "--schedule", files)
    s.write_text(s.read_text().replace("H+(", "H+(1"))
    assert "does not follow" in (text := refused("compile", files, "--schedule", s)) and f"({s}:" in text


def test_stages_are_dumped_and_timed(files: Path, tmp_path: Path) -> None:
    """As text that is read back; passes that are named stand in the timeline's place, whatever order they come in."""
    done = convgen("compile", files, *GRID, "--dump-ir", "--time-passes", "-o", tmp_path)
    heads = [line for line in done.stderr.splitlines() if line.startswith("# ")]
    assert [head.split(":")[0] for head in heads] == ["# UNet after lower", "# UNet after overlap"]
    rows = [line.split() for line in done.stderr.splitlines() if line.endswith("%")]
    assert [row[0] for row in rows] == ["read", "choose", "lower", "overlap", "emit", "total"]
    named = ("--pass", "bucket-gradients{mebibytes=0}", "--pass", "start-halos{gradients=whole}")
    done = convgen("compile", files, *GRID, *named, "--dump-ir=bucket-gradients", "--emit", "schedule")
    head, _, text = done.stderr.partition("\n")
    assert head == "# UNet after bucket-gradients{mebibytes=0}" and text == done.stdout
    assert "%bucket_1 = start all_reduce" in text and " interior {" in text
    (tmp_path / "s.txt").write_text(text)
    assert convgen("check", files, "--schedule", tmp_path / "s.txt", "--dtype", "float64").exit_code == 0
    module = convgen("compile", files, *GRID, *named, "--emit", "module").stdout
    assert "--pass 'bucket-gradients{mebibytes=0}' --pass 'start-halos{gradients=whole}'" in module
    assert "no pass is named 'hold-x'" in refused("compile", files, *GRID, "--pass", "hold-x")
    assert "given 2 times" in refused("compile", files, *GRID, *named, *named)
    assert "so does --machine lassen" in refused("compile", files, *GRID, *named, "--machine", "lassen")
    assert "can't be 'halves'" in refused("compile", files, *GRID, "--pass", "start-halos{gradients=halves}")


def test_a_package_for_a_gpu_is_written_again(files: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = convgen("compile", files, *GRID, "--target", "cuda:sm_90", "-o", tmp_path)
        assert done.exit_code == 0, done.output
    package = tmp_path / "UNet"
    assert (package / "convolution_1.py").is_file() and (package / "norm_1.py").is_file()
    assert "--grid N=2,H=2 --target cuda:sm_90" in (package / "network.py").read_text()
    assert convgen("compile", files, *GRID, "-o", tmp_path).exit_code == 0
    assert not {p.name for p in package.iterdir()} & {"convolution_1.py", "norm_1.py", "ordered_sums.py"}  # a CPU's
    text = tmp_path / "schedule.txt"
    text.write_text(convgen("compile", files, *GRID, "--emit", "schedule").stdout)
    done = convgen("compile", files, "--schedule", text, "--target", "cuda:sm_90", "-o", tmp_path)
    assert done.exit_code == 0 and (package / "convolution_1.py").is_file()


def test_auto_is_planned_by_price(files: Path) -> None:
    """On any names of axes, for a machine; here nothing is worth a message."""
    words = ("--grid", "a=2", "--algorithm", "auto", "--machine", "lassen")
    (cost,) = json.loads(convgen("compile", files, "--emit", "cost", "--json", *words).stdout)
    assert cost["forward_bytes"] + cost["backward_bytes"] == 0


def test_a_machine_decides_what_travels_under_a_named_algorithm(files: Path, tmp_path: Path) -> None:
    """As simulate chooses it for that machine; of a plan, too; a program's text says it itself."""
    words = (files, *GRID, "--machine", "lassen")
    done = convgen("compile", *words, "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert "--grid N=2,H=2 --machine lassen" in (tmp_path / "UNet" / "network.py").read_text()
    (cost,) = json.loads(convgen("compile", *words, "--emit", "cost", "--json").stdout)
    (plain,) = json.loads(convgen("compile", files, *GRID, "--emit", "cost", "--json").stdout)
    assert cost["forward_bytes"] < plain["forward_bytes"]  # fewer, wider halos, where messages cost more
    assert convgen("check", *words).exit_code == 0
    assert "machine 'nowhere' is unknown" in refused("compile", files, *GRID, "--machine", "nowhere")
    text = tmp_path / "schedule.txt"
    text.write_text(convgen("compile", *words, "--emit", "schedule").stdout)
    said = refused("compile", files, "--schedule", text, "--machine", "lassen")
    assert "--machine chooses what travels meanwhile" in said and "without --machine" in said
    plan = tmp_path / "plan.yaml"
    assert convgen("plan", files, "--machine", "lassen", "--ranks", "2", "-o", plan).exit_code == 0
    assert convgen("compile", plan, "--machine", "lassen", "-o", tmp_path).exit_code == 0


def test_what_travels_is_chosen_for_the_machine_that_priced_a_plan(files: Path) -> None:
    program = compile_network(read_graph(str(files)), Grid((("N", 2), ("H", 2)))).plain
    plan = files.with_name("priced.yaml")
    plan.write_text(write_plan(plan_of(program, files.name, "lassen", 1.0)))
    own, lassen, cpu = (
        convgen("compile", plan, *named, "--emit", "schedule").stdout
        for named in ((), ("--machine", "lassen"), ("--machine", "cpu"))
    )
    assert own == lassen != cpu and own


def test_what_makes_no_sense_is_refused(files: Path) -> None:
    assert "--grid N=2,H=2" in refused("compile", files)
    assert "no algorithm bla" in refused("compile", files, *GRID, "--algorithm", "bla")
    assert "axis K" in refused("compile", files, "--grid", "K=2")
    assert "algorithm sample has no axis H" in refused("compile", files, *GRID, "--algorithm", "sample")
    assert "int8 is no type of floats" in refused("compile", files, *GRID, "--dtype", "int8")
    for command, *words in (
        ("compile", "--dump-ir=shar"),
        ("compile", "--memory-format", "channels_last"),
        ("compile", "--objective", "bytes"), ("compile", "--emit", "kernels"),
        ("check", "--interpret"),
    ):  # fmt: skip
        assert words[0] in refused(command, files, *GRID, *words)
    assert "cuda:sm_70: no kernels are made for sm_70" in refused("compile", files, *GRID, "--target", "cuda:sm_70")
    mesh = (*GRID, "--target", "sw26010")
    assert "nothing to cast" in refused("compile", files, *mesh, "--autocast", "bfloat16")
    assert "not bfloat16" in refused("compile", files, *mesh, "--dtype", "bfloat16")
    assert "computed in pieces" in refused("compile", files, *mesh, "--pass", "start-halos")
    assert "a power of two" in refused("compile", files, "--grid", "M=3,N=2", "--target", "sw26010")
    assert "which have 4 each" in refused("compile", files, "--grid", "M=2,N=5", "--target", "sw26010")
    assert "M=2,N=4" in refused("compile", files, "--grid", "N=4,M=2", "--target", "sw26010")
    if not torch.cuda.is_available():
        assert "torch sees no GPU here" in refused("check", files, *GRID, "--target", "cuda")
    layer = files.with_name("layer.yaml")
    layer.write_text("name: a\nlayer: conv2d\ninput: [1, 1, 4, 4]\nout_channels: 1\nkernel_size: 1\ngrid: {N: 1}\n")
    assert "a command for each" in refused("compile", files, layer, *GRID)


def test_kernels_of_a_network_and_the_rows_that_run_them(files: Path) -> None:
    done = convgen("compile", files, "--grid", "H=2", "--target", "cuda:sm_90", "--emit", "kernels", "--json")
    records = json.loads(done.stdout)
    assert done.exit_code == 0 and all(r["registers"] > 0 for r in records)
    assert {r["phase"] for r in records if r["rows"]} == {"forward", "backward_data", "backward_filter"}


def test_check(files: Path) -> None:
    done = convgen("check", files, "--grid", "H=2", "--json")
    (report,) = json.loads(done.stdout)
    assert done.exit_code == 0 and report["ok"] and report["counted_equals_volume"]
    assert {one["kind"] for one in report["compared"]} >= {"outputs", "change of parameters", "outputs in evaluation"}


class Unknown(torch.nn.Module):
    """An operator that no row describes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).take(torch.arange(8))


def test_what_runs_whole_is_listed_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    words = ("import", "test_networks_cli:Unknown", "--input", "2,3,6,6", "-o", "unknown.yaml")
    assert "take in the module: 576 bytes" in refused(*words, "--strict")
    assert not (tmp_path / "unknown.yaml").exists()
    done = convgen(*words)
    assert "1 operator that no row describes" in done.stdout and "576  take" in done.stdout
    explained = convgen("explain", "unknown.yaml", "--grid", "N=2").stdout
    assert "1 operator that no row describes: " in explained and "take in the module" in explained


def test_a_file_that_is_not_there_is_said_first(tmp_path: Path) -> None:
    assert "No such file" in refused("compile", tmp_path / "nothing.yaml", *GRID)


def test_files_of_another_kind_are_said_to_be(files: Path, tmp_path: Path) -> None:
    """What is imported is a factory's network or one by hand; a plan is planned no more."""
    plan = tmp_path / "p.yaml"
    assert convgen("plan", files, "--machine", "cpu", "--ranks", 2, "--grid", "a=2", "-o", plan).exit_code == 0
    for file in (files, plan):
        for inputs in ((), ("--input", "1,2,20,12")):
            text = refused("import", file, *inputs, "-o", tmp_path / "again.yaml")
            assert "has no nodes" in text and f"convgen compile {file}" in text
    assert "this is a plan, not a network" in refused("network", plan)
    assert "this is a plan, not a network" in refused("plan", plan, "--machine", "cpu", "--ranks", 2)
