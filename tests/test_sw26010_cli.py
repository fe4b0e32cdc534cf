"""`convgen sw26010 ...` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.sw26010.machine.printing import load_program
from convgen.sw26010.machine.rates import load_rates


def call(*arguments: object) -> str:
    done = CliRunner().invoke(cli, ["sw26010", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: object) -> InputError:
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(cli, ["sw26010", *map(str, arguments)], catch_exceptions=False)
    return caught.value


def test_gemm_prints_what_it_did() -> None:
    found = json.loads(call("gemm", 512, 512, 512, "--blocks", "512,512,128", "--json"))
    assert (found["putr"], found["putc"], found["getr"], found["vmad"]) == (1048576, 1048576, 7340032, 33554432)
    assert found["ldm_bytes"] == 65536
    assert found["get_bytes_by_block"] == {"128": 512 * 512 * 8, "512": 2 * 512 * 512 * 8}
    assert found["check"].endswith("events equal the closed form")
    assert round(found["ridge_flops_per_byte"], 1) == 26.5
    text = call("gemm", 33, 20, 9, "--level", "messages", "--dtype", "float32")
    assert "messages  " in text and "events equal the closed form" in text and " stalls)" in text


def test_large_gemms_are_counted_without_running() -> None:
    found = json.loads(call("gemm", 40000, 40000, 40000, "--json"))
    assert found["check"] == "not run: events by closed form" and found["seconds_by_cycles"] is None
    assert found["useful_flops"] == 2 * 40000**3
    assert found["useful_flops"] / found["seconds"] / 742.4e9 > 0.8  # large blocks: near the mesh's peak


def test_gemm_emits_the_program_that_it_runs() -> None:
    assert callable(load_program(call("gemm", 64, 64, 64, "--emit", "program")))
    assert "along_rows" in call("gemm", 64, 64, 64, "--emit", "mesh-program")


def test_swapped_buses_deadlock() -> None:
    done = CliRunner().invoke(cli, ["sw26010", "gemm", "64", "64", "64", "--swap-buses"])
    assert done.exit_code == 1
    assert done.output.startswith("deadlock: 64 of 64 CPEs wait\n  CPE(0,0) ")


def test_table2_reports_scores_with_their_split() -> None:
    found: dict[str, Any] = json.loads(call("table2", "--json"))
    assert found["fitted_layers"] == ["conv1_2", "conv4_1"]
    scores = found["scores"]
    assert [scores[name]["cells"] for name in ("fitted", "held out", "leave one layer out")] == [10, 36, 46]
    assert scores["held out"]["mean"] <= 0.12
    assert scores["held out, implicit"]["mean"] <= 0.07 and scores["held out, explicit"]["mean"] <= 0.18
    assert found["winners"]["right"] >= 28 and found["support"] == {"right": 38, "slots": 38}
    other = json.loads(call("table2", "--fit", "conv2_2,conv3_1", "--json"))
    assert other["constants"] != found["constants"]
    text = call("table2")
    assert "held out, explicit" in text and "conv1_2*" in text


def test_table2_writes_the_file_of_rates(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    call("table2", "--write", path)
    fitted = json.loads(path.read_text())["fitted"]
    for name, value in load_rates().fitted().items():
        assert fitted[name] == pytest.approx(value, rel=1e-4)


def test_allreduce_agrees_with_its_equations() -> None:
    found = json.loads(call("allreduce", "--json"))
    assert found["adjacent"]["all_reduce_s"] * 1e3 == pytest.approx(54.1704, abs=1e-4)
    assert found["round-robin"]["all_reduce_s"] * 1e3 == pytest.approx(16.8169, abs=1e-4)
    for numbering, crossing in (("adjacent", 2 * 7.68e10), ("round-robin", 2 * 3.0e8)):
        steps = found[numbering]["steps"]
        assert sum(s["seconds"] for s in steps) == pytest.approx(found[numbering]["all_reduce_s"], rel=1e-5)
        assert sum(s["crossing_bytes"] for s in steps) == crossing
    text = call("allreduce", "--nodes", 8, "--supernode", 4, "--bytes", 1024, "--oversubscription", 0.25)
    assert "round-robin" in text


def test_conv_says_what_is_possible_and_faster() -> None:
    text = call("conv", 128, 3, 224, 224, 64)
    assert text.count("implicit: C=3 is below") == 3
    text = call("conv", 128, 512, 14, 14, 512)
    assert [line.split()[1] for line in text.splitlines() if "chosen" in line] == ["implicit"] * 3
    assert callable(load_program(call("conv", 128, 64, 8, 8, 64, "--emit", "backward_filter")))
    found = json.loads(call("conv", 128, 64, 224, 224, 64, "--json"))
    assert found["backward_data"]["not_possible"] == "implicit: C=64 is below 128"
    (implicit,) = [p for p in found["forward"]["plans"] if p["plan"] == "implicit"]
    trips = (implicit["products"], implicit["data_tiles"], implicit["out_tiles"])
    assert (*trips, implicit["blocks"]["columns"]) == (448900, 156110, 50176, 58)
    assert implicit["putr"] + implicit["putc"] == 3677388800


def test_pool_runs_both_directions() -> None:
    text = call("pool", 2, 64, 9, 8, 2)
    assert "max pooling of [2, 64, 9, 8] float32 by 2 x 2" in text and "backward" in text
    text = call("pool", 1, 1, 6, 9000, 3, "--kind", "average", "--dtype", "float64")
    assert "strips of 2304 columns" in text
    assert callable(load_program(call("pool", 1, 1, 6, 6, 2, "--emit", "backward")))
    assert "cannot pool" in str(refused("pool", 1, 1, 2, 2, 3))


@pytest.mark.parametrize(
    "arguments",
    [("gemm", 64, 64, 64), ("table2",), ("allreduce", "--nodes", 16, "--supernode", 4, "--bytes", 4096)],
    ids=lambda a: a[0],
)
def test_pictures(arguments: tuple[object, ...], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.svg", "b.svg")]
    for path in paths:
        call(*arguments, "--plot", path)
    text = paths[0].read_text()
    assert text == paths[1].read_text()  # the same bytes again
    words = {"gemm": "ridge 26.5", "table2": "Predicted against published", "allreduce": "round-robin"}
    assert words[str(arguments[0])] in text


def test_what_cannot_work_is_refused() -> None:
    assert "163840 B" in str(refused("gemm", 512, 512, 512, "--blocks", "512,512,512"))
    assert "cannot read three numbers" in str(refused("gemm", 8, 8, 8, "--blocks", "8,8"))
    assert "no multiple of 32" in str(refused("gemm", 8, 8, 8, "--blocks", "8,8,8"))
    assert "no layer of Table 2" in str(refused("table2", "--fit", "conv9_9"))
    assert "no cells of these layers say" in str(refused("table2", "--fit", "conv1_1"))  # without an implicit plan
    assert "power of two" in str(refused("allreduce", "--nodes", 12))
    assert "--bytes 8" in str(refused("allreduce", "--bytes", 10))
    assert "no format of a plot" in str(refused("table2", "--plot", "x.gif"))
    assert "larger than the padded image" in str(refused("conv", 1, 1, 2, 2, 1, "--kernel", 9))
