"""Modules for target sw26010: right on virtual ranks, and what they report is what the closed forms say."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from modules import assert_counted, assert_true, draw, on_mesh, run
from sampling import draws

from convgen.commands.main import cli
from convgen.compiler import Compiled, compile_layer
from convgen.errors import InputError
from convgen.program.nodes import PHASES
from convgen.program.verify import verify
from convgen.spec.build import layer_from_dict
from convgen.spec.reader import layer_to_dict, read_csv, read_layer
from convgen.sw26010.table2.cells import read_table2
from convgen.sw26010.target.plan import plan_name, predicted
from convgen.sw26010.target.programs import local_programs
from convgen.sw26010.target.sums import Sum, run_sum, sum_counts
from convgen.sw26010.target.volume import VolumePlan, predicted_rank
from convgen.verify.check import check
from convgen.verify.mesh import mesh_report
from convgen.verify.program import RankResult, forget_module, global_tensors, load_module, reference
from convgen.verify.report import report_json, report_text
from convgen.verify.virtual import VirtualTransport, World

ROOT = Path(__file__).resolve().parent.parent
LAYER: dict[str, Any] = {
    "name": "small", "layer": "conv2d", "input": [5, 6, 7, 6], "out_channels": 4, "kernel_size": 3, "padding": 1,
    "bias": True, "dtype": "float64", "grid": {"H": 2}, "algorithm": "spatial", "target": "sw26010",
}  # fmt: skip


def compiled(**changes: Any) -> Compiled:
    return compile_layer(layer_from_dict({**LAYER, **changes}))


def reports(one: Compiled, folder: Path, calls: int = 1, level: str = "fast") -> tuple[list[Any], dict[str, Any]]:
    """Each rank's report before and after every call, the last with its backward phases; and the whole results."""
    path = folder / f"{one.layer.name}.py"
    path.write_text(one.module(), encoding="utf-8")
    layer = load_module(path)
    layer.LEVEL = level
    given = global_tensors(one.layer)

    def program(end: VirtualTransport) -> tuple[list[Any], dict[str, Any]]:
        mesh = layer.init_mesh("cpu", transport=end)
        local = {name: layer.scatter(name, value, mesh) for name, value in given.items()}
        seen: list[Any] = [layer.report(mesh)]
        y = torch.empty(0)
        x, w = (local[name].clone().requires_grad_() for name in ("x", "w"))
        for call in range(calls):
            y = layer.conv(x, w, local.get("bias"), mesh=mesh)
            if call + 1 == calls:
                y.backward(local["dy"])
            seen.append(layer.report(mesh))
        whole = {"y": layer.gather("y", y, mesh), "dx": layer.gather("dx", x.grad, mesh)}
        return seen, whole | {"dw": layer.gather("dw", w.grad, mesh)}

    try:
        ran = World(one.layer.grid.ranks).run(program)
        return [seen for seen, _ in ran], {**ran[0][1], "PLANS": layer.PLANS}
    finally:
        forget_module(layer)


@pytest.mark.parametrize("part", range(2))
def test_random_layers(part: int) -> None:
    """Any algorithm or roles, groups, strides, dilation, uneven padding, ranks with nothing to do."""
    cases = [draw(seed, most=4) for seed in range(draws(40))]
    for seed, case in list(enumerate(cases))[part::2]:
        options = replace(case.layer.options, core_groups=1 + seed % 4)
        case = on_mesh(case, options)
        verify(case.schedule, case.space)
        given = global_tensors(case.layer)
        ran = run(case, given)
        assert_true(case, ran, reference(case.layer.conv, given))
        assert_counted(case, ran)


def test_reports_equal_the_closed_forms(tmp_path: Path) -> None:
    wide = {"input": [128, 128, 3, 3], "out_channels": 64, "dtype": "float32", "grid": {"H": 1}, "bias": False}
    grouped = {"dtype": "float32", "grid": {"C": 2}, "algorithm": "stationary-x", "groups": 2}
    for changes, groups in (({}, 1), (grouped, 3), (wide, 1)):
        seen, results = reports(compiled(**changes, options={"core_groups": groups}), tmp_path)
        for rank, (before, after) in enumerate(seen):
            assert before == {} and set(after) == set(PHASES)
            for phase in PHASES:
                (plan,) = [p for p in results["PLANS"][phase] if rank in p["ranks"]]
                done = after[phase]
                assert {**done, "ranks": plan["ranks"]} == plan | {k: done[k] for k in ("call", "chosen", "level")}
                kinds = {part["plan"] for part in done["core_groups"]}
                assert kinds == ({"implicit"} if changes is wide else {"explicit"})


def test_the_levels_of_emulation_agree(tmp_path: Path) -> None:
    one = compiled(input=[2, 3, 4, 4], options={"core_groups": 2})
    ran = [reports(one, tmp_path, level=level) for level in ("messages", "exact", "fast")]
    for name in ("y", "dx", "dw"):
        assert torch.equal(ran[0][1][name], ran[1][1][name])
        assert torch.allclose(ran[0][1][name], ran[2][1][name], rtol=0, atol=1e-13)
    unsaid = [[{**r[-1][phase], "level": ""} for r in seen for phase in PHASES] for seen, _ in ran]
    assert unsaid[0] == unsaid[1] == unsaid[2]
    with pytest.raises(InputError, match="no level of emulation is named slow"):
        reports(one, tmp_path, level="slow")


def test_three_dimensions_are_taps_added_up(tmp_path: Path) -> None:
    layer: dict[str, Any] = {
        "layer": "conv3d", "input": [3, 4, 5, 4, 6], "kernel_size": [3, 3, 2], "stride": [2, 1, 1], "groups": 2,
        "padding": [[1, 2], [1, 1], [0, 1]], "dilation": [1, 2, 1], "grid": {"D": 2},
    }  # fmt: skip
    one = compiled(**layer)
    for changes in ({"options": {"core_groups": 3}}, {"dtype": "float32"}):
        one = compiled(**layer, **changes)
        report = check(one)
        assert report.ok and report.mesh is not None and report.mesh.wrong == (), report_text(one, report)
    plans = one.mesh_plans()
    volume = plans["forward"][0][1]
    assert isinstance(volume, VolumePlan)
    depth = volume.problem.depth
    assert depth is not None
    met = sum(len(tap.y_rows) for tap in volume.taps)
    assert sum(tap.plan.problem.n for tap in volume.taps) == 3 * met < 3 * depth.out * depth.kernel  # no padding
    account = predicted_rank(volume)
    assert [part["tap"] for part in account["core_groups"]] == [tap.at for tap in volume.taps]
    assert account["sum_of_taps"]["dma_bytes"] == 3 * 4 * sum(tap.add.elements for tap in volume.taps if tap.add)
    assert predicted_rank(plans["backward_filter"][0][1])["sum_of_taps"] is None
    names = {program.name for program in local_programs(volume)}
    assert "forward_add" in names and "forward_im2col" in names
    added = sum(program.counts.dma_bytes for program in local_programs(volume))
    blocks = (account["get_bytes_by_block"], account["put_bytes_by_block"])
    assert added == sum(size for sizes in blocks for size in sizes.values())


def test_the_levels_agree_in_three_dimensions(tmp_path: Path) -> None:
    one = compiled(layer="conv3d", input=[1, 2, 3, 3, 3], out_channels=2, grid={"D": 1})
    ran = [reports(one, tmp_path, level=level) for level in ("messages", "exact")]
    for name in ("y", "dx", "dw"):
        assert torch.equal(ran[0][1][name], ran[1][1][name])


def test_the_first_two_calls_try_both_plans(tmp_path: Path) -> None:
    layer = {"input": [128, 64, 2, 2], "out_channels": 64, "dtype": "float32", "bias": False, "grid": {"N": 1}}
    one = compiled(**layer, algorithm="sample", options={"plan": "trial"})
    ((_, *seen),), _ = reports(one, tmp_path, calls=3)
    plans = [(c["forward"]["core_groups"][0]["plan"], *c["forward"]["chosen"]) for c in seen]
    assert plans == [
        ("explicit", "first trial"),
        ("implicit", "second trial"),
        ("implicit", "the faster of two trials"),
    ]
    assert seen[2]["backward_data"]["chosen"] == ["the only one"]  # C=64 is below 128
    assert seen[0]["forward"]["seconds"] > seen[1]["forward"]["seconds"]


def test_four_core_groups_split_the_samples(tmp_path: Path) -> None:
    layer = {"input": [9, 6, 7, 6], "grid": {"N": 1}, "algorithm": "sample"}
    (((_, one),), single), (((_, four),), split) = (
        reports(compiled(**layer, options={"core_groups": groups}), tmp_path) for groups in (1, 4)
    )
    for name in ("y", "dx"):
        assert torch.equal(single[name], split[name])
    assert torch.allclose(single["dw"], split["dw"], rtol=0, atol=1e-13)
    for phase in PHASES:
        parts = four[phase]["core_groups"]
        assert [part["samples"] for part in parts] == [[0, 3], [3, 5], [5, 7], [7, 9]]
        after = four[phase]["sum_of_dw"]
        assert (after is None) == (phase != "backward_filter")
        assert four[phase]["cycles"] == max(part["cycles"] for part in parts) + (after["cycles"] if after else 0)
        assert sum(part["cycles"] for part in parts) == one[phase]["cycles"] > four[phase]["cycles"]
        assert four[phase]["vmad"] == one[phase]["vmad"]
        assert four[phase]["seconds"] < one[phase]["seconds"]
    assert four["backward_filter"]["sum_of_dw"]["dma_bytes"] == 5 * single["dw"].nbytes  # four read, one written


@pytest.mark.parametrize("task", [Sum(4, 5000, "float32"), Sum(2, 3, "float64"), Sum(3, 140000, "float64")], ids=str)
def test_sums(task: Sum) -> None:
    parts = np.random.default_rng(0).standard_normal((task.groups, task.elements)).astype(task.dtype)
    result, counts = run_sum(task, parts)
    want = parts[0].astype(float)
    for part in parts[1:]:
        want = want + part
    assert np.array_equal(result, want.astype(task.dtype))
    assert counts == sum_counts(task)


def test_another_number_of_samples(tmp_path: Path) -> None:
    one = compiled(input=[128, 64, 2, 2], out_channels=64, bias=False, grid={"N": 1}, algorithm="sample")
    path = tmp_path / "small.py"
    path.write_text(one.module(), encoding="utf-8")
    layer = load_module(path)
    x, w = torch.randn(3, 64, 2, 2, dtype=torch.float64), torch.randn(64, 64, 3, 3, dtype=torch.float64)
    try:
        mesh = layer.init_mesh("cpu", transport=VirtualTransport(World(1), 0))
        y = layer.conv(x, w, mesh=mesh, batch=3)
        (done,) = layer.report(mesh)["forward"]["core_groups"]
    finally:
        forget_module(layer)
    assert torch.allclose(y, torch.nn.functional.conv2d(x, w, padding=1), rtol=0, atol=1e-12)
    assert layer.PLANS["forward"][0]["core_groups"][0]["plan"] == "implicit"
    assert (done["plan"], done["not_possible"]) == ("explicit", "implicit: N=3 is no multiple of 128")


def test_processes() -> None:
    report = check(compiled(), transport="processes")
    assert report.ok and report.mesh is not None, report


def test_check_compares_events_with_the_closed_forms() -> None:
    one = compiled(options={"core_groups": 2, "plan": "trial"})
    report = check(one)
    assert report.ok and report.mesh is not None and report.mesh.wrong == ()
    text = report_text(one, report)
    assert "events equal the closed forms on every rank" in text and "backward_filter     0  explicit" in text
    assert report_json(one, report)["mesh"]["ranks"][1]["forward"]["ldm_bytes"] > 0
    first, second = report.mesh.reports
    first = {**first, "forward": {**first["forward"], "vmad": first["forward"]["vmad"] + 1}}
    del second["backward_data"]
    found = mesh_report(one, [RankResult({}, (), first), RankResult({}, (), second)])
    assert found is not None and found.wrong == ((0, "forward"), (1, "backward_data"))
    wrong = replace(report, mesh=found)
    assert not wrong.ok and "forward on rank 0, backward_data on rank 1" in report_text(one, wrong)


def test_the_module_imports_the_emulator_and_nothing_else_of_convgen() -> None:
    imported = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(compiled().module()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert [name for name in imported if str(name).startswith("convgen")] == ["convgen.sw26010.target.local"]


def test_programs_and_what_they_count() -> None:
    file = str(ROOT / "examples" / "sw26010_core_groups.yaml")
    done = CliRunner().invoke(cli, ["compile", file, "--emit", "kernels", "--json"], catch_exceptions=False)
    records = json.loads(done.output)
    assert [r["name"] for r in records] == [
        "forward_im2col", "forward_gemm", "backward_data_gemm", "backward_data_col2im",
        "backward_filter_im2col", "backward_filter_gemm", "backward_filter_sum",
    ]  # fmt: skip
    one = compile_layer(read_layer(file))
    for phase, plans in one.mesh_plans().items():
        ((ranks, plan),) = plans
        mine, account = [r for r in records if r["phase"] == phase], predicted(plan)
        for key in ("putr", "getc", "vmad", "vadd", "convert", "get_operations", "issued_flops"):
            assert sum(r[key] for r in mine) == account[key], (phase, key)
        assert max(r["shared_bytes"] for r in mine) == account["ldm_bytes"]
        assert all(r["ranks"] == list(ranks) and r["registers"] in (24, None) for r in mine)
    text = CliRunner().invoke(cli, ["compile", file, "--emit", "kernels"], catch_exceptions=False).output
    assert "forward_im2col, backward_filter_im2col" in text and "yield from cpe.putr" in text
    ast.parse(text)


def test_full_layers_choose_and_count_as_table_2_does() -> None:
    layers = read_csv(str(ROOT / "tuning" / "layers" / "vgg16.csv"), grid={"N": 1}, algorithm="sample", dtype="float32")
    rows = {row.name: row for row in read_table2()}
    assert len(layers) == 13
    for layer in layers:
        plans = compile_layer(layer, target="sw26010").mesh_plans()
        for phase, ((_, plan),) in plans.items():
            (share,) = plan.shares
            assert share.problem == rows[layer.name].problem
            kinds = {plan_name(p) for p, _ in share.choice.plans}
            published = rows[layer.name].published_s
            for kind in ("implicit", "explicit"):
                assert kind in kinds or (phase, kind) not in published, (layer.name, phase)
        if layer.name == "conv1_2":
            account = predicted(plans["forward"][0][1])
            assert account["core_groups"][0]["plan"] == "implicit"
            assert account["putr"] + account["putc"] == 3677388800
            assert account["get_bytes_by_block"] == {"32": 7354777600, "64": 5115412480}
            assert account["put_bytes_by_block"] == {"64": 1644167168}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bfloat16"}, "computes float32 and float64, not bfloat16"),
        ({"dtype": "tfloat32"}, "not tfloat32"),
        ({"layer": "conv3d", "input": [1, 1, 3, 3, 9000], "grid": {"D": 1}}, "a row of 9000 columns"),
        ({"input": [1, 1, 3, 9000]}, "a row of 9000 columns and its line in LDM: 144016 of 65536 B"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_the_mesh_cannot_do_is_refused_when_compiled(changes: dict[str, Any], words: str) -> None:
    for refuse in (Compiled.module, Compiled.mesh_plans):
        with pytest.raises(InputError) as caught:
            refuse(compiled(**changes))
        assert words in str(caught.value) and "target: cpu" in str(caught.value)


def test_options_of_the_mesh_are_for_the_mesh() -> None:
    for key, value in (("core_groups", 4), ("plan", "trial")):
        with pytest.raises(InputError, match=f"options.{key} {value} is of target sw26010, the target is cpu"):
            compiled(target="cpu", options={key: value})
        layer = layer_from_dict({**LAYER, "options": {key: value}})
        assert layer_from_dict(layer_to_dict(layer)) == layer
        with pytest.raises(InputError, match="the target is cuda"):
            compile_layer(layer, target="cuda")
    for wrong in ({"core_groups": 5}, {"core_groups": 0}, {"plan": "both"}):
        with pytest.raises(InputError, match="can't be"):
            compiled(options=wrong)


def test_auto_models_the_core_groups() -> None:
    one, four = (compiled(algorithm="auto", options={"core_groups": n}).machine for n in (1, 4))
    assert four.memory_bytes_per_s == 4 * one.memory_bytes_per_s and four.ranks_per_node == 1
    assert four.flops_per_s("float64") == 4 * one.flops_per_s("float64")
