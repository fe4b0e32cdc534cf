"""What networks for a GPU make of the tuner's databases, and what of them is tuned."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from small_networks import exported, resnet, unet

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.kernels.problem import Problem
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.parallel import from_torch
from convgen.spec.graph_file import constants_path, write_graph
from convgen.spec.safetensors import tensors_bytes
from convgen.spec.target import read_target
from convgen.tune.apply import with_measured_networks
from convgen.tune.candidates import candidates, source_of
from convgen.tune.database import Entry, update
from convgen.tune.device import Device, versions
from convgen.tune.key import key_of
from convgen.tune.wanted import of_networks
from convgen.verify.network import check_network, report_text

GPU = Device("Test GPU", "cuda:sm_90")
SM_90 = read_target(GPU.target)
TARGET = SM_90.known()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def convgen(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def small_resnet(**axes: int) -> tuple[CompiledNetwork, dict[str, Any]]:
    graph, tensors = exported(resnet)
    return compile_network(graph, Grid(tuple(axes.items())), target=SM_90), tensors


def remember(cache: Path, problems: list[Problem], draw: random.Random, **changed: object) -> dict[str, str]:
    """Entries of problems, each any legal configuration but the first. Their texts, by key."""
    made: dict[str, str] = {}
    for problem in problems:
        config = draw.choice(candidates(problem, TARGET)[1:]).config
        values: dict[str, Any] = {
            "kernel": str(config), "ms": 0.5, "p20": 0.4, "p80": 0.6, "aten_ms": 0.7, "ratio": 1.4, "share": 0.5,
            "bound": "compute", "error": 1e-7, "tried": 3, "of": 30, "effort": "full", "versions": versions(TARGET),
            "source": source_of(problem, config, TARGET),
        }  # fmt: skip
        made[key_of(problem)] = str(config)
        update(cache / "devices" / GPU.file_name, GPU, {key_of(problem): Entry(**(values | changed))})
    return made


def chosen(network: CompiledNetwork) -> dict[str, str]:
    """The kernels of a network without steps behind their sums, by key."""
    return {
        key_of(kernel.problem): str(kernel.config)
        for file in network.kernels
        if not file.epilogue
        for kernel in file.kernels
    }


@pytest.mark.parametrize(("seed", "axes"), [(0, {"H": 2}), (1, {"N": 2}), (2, {"C": 2})])
def test_kernels_are_as_measured_and_right(cache: Path, seed: int, axes: dict[str, int]) -> None:
    plain, tensors = small_resnet(**axes)
    wanted = [one.problem for one in of_networks([plain])]
    assert {key_of(p) for p in wanted} <= {key_of(p) for f in plain.kernels for k in f.kernels for p in k.problems}
    entries = remember(cache, wanted, random.Random(seed))
    (tuned,), remarks = with_measured_networks([plain])
    found = chosen(tuned)
    for key, config in entries.items():
        assert found.get(key, config) == config
    assert sum(key in found for key in entries) > len(entries) / 2, "else steps stand behind all"
    assert tuned.package().files != plain.package().files
    assert chosen(plain) != found and not any("default" in line for line in remarks)
    report = check_network(tuned, tensors, interpret=True)
    assert report.ok, report_text(report)


def test_what_is_wanted_is_what_ranks_launch() -> None:
    """Rows whose gradients are rows of their own run forward alone; these run one phase."""
    network, _ = small_resnet(H=2)
    of_rows = {use.layer: 0 for one in of_networks([network]) for use in one.uses}
    convolutions = [row for row in network.program.rows if "conv_forward" in row.bound.operation.name]
    assert len(of_rows) == len(convolutions)
    phases = {(use.layer, use.phase) for one in of_networks([network]) for use in one.uses}
    assert len(phases) == 3 * len(convolutions)
    derived = [d for row in convolutions for _, d in row.derived]
    assert derived, "else nothing tells phases apart"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "unet.yaml"
    graph, tensors = exported(unet)
    path.write_text(write_graph(graph))
    constants_path(path).write_bytes(tensors_bytes(tensors))
    return path


GIVEN = ("--grid", "H=2", "--target", "cuda:sm_90")


def problems_of(file: Path) -> list[Problem]:
    graph, _ = exported(unet)
    return [one.problem for one in of_networks([compile_network(graph, Grid((("H", 2),)), target=SM_90)])]


def written(file: Path, folder: Path, *words: str) -> tuple[dict[str, str], str]:
    done = convgen("compile", file, *GIVEN, *words, "-o", folder)
    assert not done.exception, done.output
    return {p.name: p.read_text() for p in (folder / "UNet").glob("convolution_*.py")}, done.stderr


def test_compile_takes_entries_says_what_lacks_and_takes_none_untuned(file: Path, cache: Path, tmp_path: Path) -> None:
    plain, said = written(file, tmp_path / "plain")
    count = len(problems_of(file))
    assert f"0 of {count} measured" in said and "nothing was measured for cuda:sm_90" in said
    entries = remember(cache, problems_of(file)[:2], random.Random(0))
    tuned, said = written(file, tmp_path / "tuned")
    assert plain.keys() == tuned.keys() and f"2 of {count} measured" in said and "convgen tune measures them" in said
    for config in entries.values():
        assert any(config in text for text in tuned.values())
    untuned, said = written(file, tmp_path / "untuned", "--untuned")
    assert untuned == plain and not said


def test_a_stale_entry_is_said_and_not_used(file: Path, cache: Path, tmp_path: Path) -> None:
    plain, _ = written(file, tmp_path / "plain")
    remember(cache, problems_of(file), random.Random(0), source="0" * 12)
    stale, said = written(file, tmp_path / "stale")
    assert stale == plain and "stale, not used" in said and "printed as 000000000000" in said
    assert "more stale entries" in said


def test_a_package_from_python_is_made_again_when_more_is_measured(cache: Path) -> None:
    module = torch.nn.Conv2d(8, 8, 3, padding=1)
    given: dict[str, Any] = {"grid": "N=2", "target": "cuda:sm_90", "name": "one"}

    def kernels() -> str:
        package = from_torch(module, (torch.zeros(4, 8, 8, 8),), **given)
        return (Path(package.__file__).parent / "convolution_1.py").read_text()

    plain = kernels()
    (problem, *_) = [p.problem for p in of_networks([one_convolution(module)]) if p.problem.phase == "forward"]
    (config,) = remember(cache, [problem], random.Random(3)).values()
    assert config not in plain and config in kernels()


def one_convolution(module: torch.nn.Module) -> CompiledNetwork:
    from convgen.spec.exported import graph_of

    graph, _ = graph_of(module, (torch.zeros(4, 8, 8, 8),), name="one")
    return compile_network(graph, Grid((("N", 2),)), target=SM_90)


def test_tune_takes_a_networks_problems(file: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it would measure")
    done = convgen("tune", file, *GIVEN, "--effort", "quick", "--budget", "1e-9", "--json")
    assert not done.exception, done.output
    assert f"time is up: {len(problems_of(file))} problems" in done.stderr and json.loads(done.stdout) == []


def test_what_makes_no_sense_is_refused(file: Path) -> None:
    for words, said in (
        (("--grid", "H=2"), "for cpu a network's convolutions are ATen's"),
        ((*GIVEN, "--partitions", "1,2"), "--partitions is of layers"),
        (("--target", "cuda:sm_90"), "says no grid"),
    ):
        done = convgen("tune", file, *words)
        assert isinstance(done.exception, InputError) and said in str(done.exception), done.output
