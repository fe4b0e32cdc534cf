"""Names that layers can't have: a file of theirs would be imported in place of something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from convgen.errors import InputError
from convgen.spec.names import check_name, identifier
from convgen.spec.network_reader import read_network
from convgen.spec.reader import read_csv, read_layer, read_layers
from convgen.spec.taken import PACKAGES, STANDARD, TAKEN

LAYER = "layer: conv1d, input: [1, 2, 9], out_channels: 4, kernel_size: 3, grid: {W: 2}"


@pytest.mark.parametrize("name", ["json", "math", "random", "typing", "_json", "torch", "numpy", "sympy", "convgen"])
def test_a_layer_file_is_refused_with_a_name_that_would_do(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"# a layer\n{{name: {name}, {LAYER}}}\n")
    with pytest.raises(InputError, match=f"would hide .* {name}") as caught:
        read_layer(file)
    assert (caught.value.where, caught.value.hint) == (f"{file}:2", f"name: {name}_layer")
    file.write_text(file.read_text().replace(f"name: {name}", caught.value.hint))
    assert read_layer(file).name == f"{name}_layer"


def test_networks_and_plans_are_refused_too(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: net\ninput: [1, 2, 9]\nnodes:\n- {name: random, kind: conv, out_channels: 4, kernel_size: 3}\n"
    )
    with pytest.raises(InputError, match="hide Python's module random") as caught:
        read_network(file)
    assert caught.value.where == f"{file}:4"
    file.write_text(file.read_text().replace("name: random", "name: fine").replace("name: net", "name: random"))
    assert read_network(file).name == "random"  # which names no file
    file.write_text(f"plan: a\nlayers:\n- {{name: fine, {LAYER}}}\n- {{name: random, {LAYER}}}\n")
    with pytest.raises(InputError, match="hide Python's module random") as caught:
        read_layers(file)
    assert caught.value.where == f"{file}:4"


def test_names_made_of_others_step_aside(tmp_path: Path) -> None:
    """Rows of tables have names of their own, which need not be Python's."""
    file = tmp_path / "a.csv"
    file.write_text("name,N,C,H,W,F,K,S,P\nrandom,1,1,4,4,1,1,1,0\n")
    assert [layer.name for layer in read_csv(file, grid={"N": 1})] == ["random_layer"]


def test_all_that_python_and_torch_import_is_taken() -> None:
    assert set(sys.stdlib_module_names) <= STANDARD
    code = (
        "import json, sys, torch, torch.distributed, torch.distributed.device_mesh, triton\n"
        "print(json.dumps(sorted(n for n, m in sys.modules.items() if '.' not in n and getattr(m, '__spec__', None))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    loaded = {name for name in json.loads(done.stdout) if name.isidentifier()}
    assert {"torch", "triton", "typing_extensions"} <= loaded
    assert loaded <= TAKEN | {"sitecustomize", "usercustomize"}


def test_every_refusal_has_a_way_out() -> None:
    for name in sorted(TAKEN):
        with pytest.raises(InputError, match="would hide"):
            check_name(name)
        assert check_name(identifier(name)) == f"{name}_layer"


def test_the_lists_are_apart() -> None:
    assert not STANDARD & PACKAGES
