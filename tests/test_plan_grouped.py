"""`convgen plan --groups G`: the plan of the network with grouped convolutions, and what that brings."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.spec.graph_grouped import grouped
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict


def network(groups: int = 1) -> dict[str, Any]:
    """Convolutions of 3 channels, of one filter and of two groups already stay as they are."""
    conv = {"kind": "conv", "kernel_size": 3, "padding": 1}
    return {
        "name": "six",
        "input": [4, 3, 24, 24],
        "nodes": [
            {"name": "a", "out_channels": 16} | conv,
            {"name": "b", "out_channels": 32, "groups": groups, "bias": True} | conv,
            {"kind": "relu"},
            {"name": "c", "out_channels": 16, "groups": 2} | conv,
            {"name": "d", "out_channels": 8, "groups": groups} | conv,
            {"name": "e", "out_channels": 1} | conv,
        ],
    }


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for groups in (1, 4):
        (tmp_path / f"{groups}.yaml").write_text(json.dumps(network(groups)))
    monkeypatch.chdir(tmp_path)


def run(line: str) -> Any:
    return CliRunner().invoke(cli, shlex.split(line)[1:], catch_exceptions=False)


def test_it_is_the_network_with_these_groups() -> None:
    plain, other = (network_graph(network_from_dict(network(groups))) for groups in (1, 4))
    graph, modules = grouped(plain, 4)
    assert (graph.calls, modules) == (other.calls, ("b", "d"))
    shapes = [{v.name: v.shape for v in one.parameters} for one in (graph, other)]
    assert shapes[0] == shapes[1]


def test_the_plan_is_that_network_s_and_says_what_it_brings() -> None:
    line = "convgen plan {}.yaml --machine lassen --ranks 4 --json{}"
    plain, wished, other = (json.loads(run(line.format(*of)).stdout) for of in ((1, ""), (1, " --groups 4"), (4, "")))
    said = wished.pop("what_if")
    assert said == {"groups": 4, "layers": ["b", "d"], "ungrouped_seconds": plain["overlapped_seconds"]}
    assert plain.pop("what_if") is other.pop("what_if") is None
    assert wished == other
    text = run("convgen plan 1.yaml --machine lassen --ranks 4 --groups 4").stdout
    (said,) = [one for one in text.splitlines() if one.startswith("groups ")]
    assert "4, as if, of b, d; a step of the network as it is takes" in said and "times as long" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--ranks 2 --groups 5", "no convolution of six has channels and filters that divide by 5 groups"),
        ("--ranks 2 --groups 4 -o plan.yaml", "the plan is of another network"),
        ("--ranks 2,4 --groups 4", "--groups is of one plan of a network"),
        ("--ranks 2 --groups 4 --try 2", "--groups is of one modelled plan"),
    ],
)
def test_refused(line: str, said: str) -> None:
    words = shlex.split(f"plan 1.yaml --machine lassen {line}")
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)
    assert said in str(caught.value)
