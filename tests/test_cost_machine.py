"""Machine files: those shipped, those of users, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from convgen.cost.machine import Level
from convgen.cost.machines import default_machine, load_machine, machine_names
from convgen.errors import InputError
from convgen.resources import data_file
from convgen.spec.build import layer_from_dict
from convgen.spec.layer import DTYPES, Layer
from convgen.spec.target import KINDS

PROBES = "measured_convolutions: [{channels: 1, filters: 1, taps: 1, pixels: 1, efficiency: "
MISFITS = "measured_collectives: [{collective: all_reduce, "
ONE = "ranks: 2, bytes: [1], over_model: [1]}"


def layer(**keys: object) -> Layer:
    base = {"name": "a", "layer": "conv1d", "input": [2, 4, 8], "out_channels": 4, "kernel_size": 3, "grid": {"N": 2}}
    return layer_from_dict(base | keys)


def test_every_target_has_a_machine() -> None:
    assert set(KINDS) <= set(machine_names())
    for target, machine in (("cpu", "cpu"), ("cuda:sm_90", "cuda"), ("hip:gfx942", "hip"), ("sw26010", "sw26010")):
        assert default_machine(layer(target=target)).name == machine


def test_shipped_machines_are_complete() -> None:
    for name in machine_names():
        machine = load_machine(name)
        assert machine.name == name
        assert all(machine.flops_per_s(dtype) > 0 for dtype in DTYPES)
        assert machine.add_s_per_byte > 0


def test_a_layer_names_its_machine(tmp_path: Path) -> None:
    assert default_machine(layer(machine="hip")).name == "hip"
    file = tmp_path / "mine.yaml"
    file.write_text(data_file("tuning", "machines", "cpu.yaml").read_text().replace("name: cpu", "name: mine"))
    assert default_machine(layer(machine=str(file))).name == "mine"


def test_an_unknown_machine_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InputError) as caught:
        load_machine("cudda")
    assert "'cudda'" in caught.value.fact
    assert "cuda" in caught.value.hint
    assert "sw26010" in caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("latency_s: 3.0e-5", "latency_s: -1", "latency_s can't be -1"),
        ("latency_s: 3.0e-5", "latency: 3.0e-5", "unknown key 'latency'"),
        ("latency_s: 3.0e-5", "latency_s: 1e-320", "latency_s can't be 1e-320"),
        ("launch_s: 1.0e-5", "launch_s: 1e308", "launch_s can't be 1e+308"),
        ("efficiency: 0.5", "efficiency: 1.5", "efficiency can't be 1.5"),
        ("efficiency: 0.5", "efficiency: yes", "efficiency can't be 'yes'"),
        ("  float16: 6.656e+11", "", "float16 in peak_flops_per_s is missing"),
        ("ranks_per_node: 16", "ranks_per_node: 0", "ranks_per_node can't be 0"),
        ("name: cpu", "name: 3", "name can't be 3"),
        ("launch_s: 1.0e-5", "", "launch_s of a machine is missing"),
        ("launch_s: 1.0e-5", f"launch_s: 1e-5\n{PROBES}[0.1, 0.2]}}]", "efficiency has 2 numbers"),
        ("launch_s: 1.0e-5", f"launch_s: 1e-5\n{PROBES}[0.1, 0, 1]}}]", "efficiency can't be 0"),
        ("launch_s: 1.0e-5", f"launch_s: 1e-5\n{MISFITS}ranks: 2, bytes: [1, 2], over_model: [1]}}]", "2 bytes and 1"),
        ("launch_s: 1.0e-5", f"launch_s: 1e-5\n{MISFITS}ranks: 2, bytes: [2, 1], over_model: [1, 1]}}]", "ascend"),
        ("launch_s: 1.0e-5", f"launch_s: 1e-5\n{MISFITS}ranks: 0, bytes: [1], over_model: [1]}}]", "ranks can't be 0"),
        ("launch_s: 1.0e-5", f"launch_s: 1e-5\n{MISFITS}{ONE}, {{collective: all_reduce, {ONE}]", "is measured twice"),
        ("launch_s: 1.0e-5", "launch_s: 1e-5\nmeasured_collectives: {}", "measured_collectives is no list"),
        ("launch_s: 1.0e-5", "launch_s: 1e-5\nprocessor_s_per_byte: 1e-9", "processor_s_per_byte alone"),
        ("launch_s: 1.0e-5", "launch_s: 1e-5\nmessage_processor_s: -1", "message_processor_s alone"),
        (
            "launch_s: 1.0e-5",
            "launch_s: 1e-5\nprocessor_s_per_byte: 0\nmessage_processor_s: -1",
            "message_processor_s can't be -1",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = data_file("tuning", "machines", "cpu.yaml").read_text()
    assert old in text
    file = tmp_path / "m.yaml"
    file.write_text(text.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_machine(str(file))
    assert said in caught.value.fact
    assert caught.value.where.startswith(str(file))
    assert caught.value.hint


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(InputError, match="can't read"):
        load_machine("no/such/machine.yaml")


def test_choosing_needs_neither_torch_nor_sympy() -> None:
    """Compiling must start quickly."""
    code = "import sys, convgen.plan.choose, convgen.cost.schedule; print({'torch', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_machines_with_levels() -> None:
    lassen = load_machine("lassen")
    assert [(level.name, level.ranks) for level in lassen.levels] == [("socket", 2), ("node", 4), ("machine", None)]
    assert lassen.memory_bytes == 16e9
    assert load_machine("taihulight").collectives.all_reduce == "hierarchical-halving"
    assert load_machine("cpu").levels == (Level(name="machine", latency_s=3e-5, bytes_per_s=2e9),)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    ranks: 4\n", "    ranks: 3\n", "level node has 3 ranks, and socket in it 2"),
        ("    ranks: 4\n", "", "level node has no ranks"),
        ("    shared_bytes_per_s: 2.5e+10", "    ranks: 8", "level machine is the last and has 8 ranks"),
        ("    ranks: 2\n", "    ranks: 2\n    shared_bytes_per_s: 1\n", "level socket shares links out of nothing"),
        ("ranks_per_node: 4", "ranks_per_node: 3", "ranks_per_node is 3, and levels have 2, 4 ranks"),
        ("  - name: node", "  - name: socket", "two levels have one name"),
        ("    bytes_per_s: 3.0e+10", "    bytes_per_s: 0", "levels.1.bytes_per_s can't be 0"),
        ("    bytes_per_s: 3.0e+10", "    rate: 3.0e+10", "unknown key 'rate' in levels.1"),
        ("all_reduce: ring", "all_reduce: rings", "all_reduce can't be by 'rings'"),
        ("all_reduce: ring", "allreduce: ring", "unknown collective 'allreduce'"),
        ("memory_bytes: 1.6e+10", "memory_bytes: lots", "memory_bytes can't be 'lots'"),
    ],
)
def test_wrong_levels_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = data_file("tuning", "machines", "lassen.yaml").read_text()
    assert old in text
    file = tmp_path / "m.yaml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_machine(str(file))
    assert said in caught.value.fact
    assert caught.value.where.startswith(str(file))
    assert caught.value.hint
