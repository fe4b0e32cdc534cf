"""Modules compiled together, which import the runtime from beside, against the same modules with it pasted in; and how
runtimes, even of several versions, live in one folder and one process.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from generate import algorithm_problem
from modules import Case, draw, make, on_gpu, on_mesh, run, with_dtype
from sampling import cases_of
from test_module_contract import BIASED, SQUARE, Alone, assert_opchecks, blocks
from torch import Tensor
from torch.distributed.tensor import DTensor

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.emit.module import emit_module
from convgen.emit.paste import SharedRuntime, shared_runtime
from convgen.kernels.choose import choose_kernels
from convgen.spec.layer import Options
from convgen.verify.processes import run_processes, spawn
from convgen.verify.program import forget_module, global_tensors, load_module
from convgen.verify.virtual import VirtualTransport, World

ROOT = Path(__file__).resolve().parent.parent


def named(name: str, algorithm: str, grid: dict[str, int], conv: Conv = BIASED, **changes: Any) -> Case:
    problem = algorithm_problem(algorithm, conv, Grid(tuple(grid.items())))
    return make(problem, name, random.Random(name), **{"memory_format": "contiguous", **changes})


def another_version() -> SharedRuntime:
    """The runtime after a change that no user sees."""
    text = shared_runtime().text + "\n# of another version\n"
    return SharedRuntime(f"_convgen_runtime_{hashlib.sha256(text.encode()).hexdigest()[:8]}", text)


def write(case: Case, folder: Path, beside: SharedRuntime) -> Path:
    """The case's module and its runtime, as files."""
    kernels = choose_kernels(case.layer, case.schedule, case.space) if case.layer.target.is_gpu else ()
    folder.mkdir(exist_ok=True)
    (folder / f"{beside.name}.py").write_text(beside.text, encoding="utf-8")
    path = folder / f"{case.layer.name}.py"
    text = emit_module(case.layer, case.schedule, case.space, kernels, beside=beside)
    path.write_text(text, encoding="utf-8")
    return path


def load(case: Case, folder: Path, beside: SharedRuntime | None = None) -> ModuleType:
    return load_module(write(case, folder, beside or shared_runtime()), interpret=case.layer.target.is_gpu)


@pytest.fixture
def forgotten() -> Iterator[list[ModuleType]]:
    """Modules whose op names are given back after the test."""
    made: list[ModuleType] = []
    yield made
    for module in made:
        forget_module(module)


# ---- The same numbers ----------------------------------------------------------------------------------------------

CASES = {
    **{f"layer {i}": draw(70 + i, least=2) for i in cases_of(8, "shared")},
    "float16": with_dtype(draw(80, algorithm="spatial", least=2), "float16"),
    "bfloat16": with_dtype(draw(81, algorithm="stationary-x", least=2), "bfloat16"),
    "a GPU's": on_gpu(draw(1003, most=4)),
    "a GPU's halos": on_gpu(draw(1010, most=4)),
    "a mesh's": on_mesh(with_dtype(draw(5, algorithm="sample", least=2, most=2), "float32"), Options()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equal_to_pasted_bit_by_bit(case: Case, tmp_path: Path) -> None:
    given = global_tensors(case.layer)
    pasted = run(case, given)
    forget_module(case.module)
    beside = replace(case)
    beside.__dict__.update(schedule=case.schedule, module=load(case, tmp_path))
    assert type(beside.module.LAYER) is not type(case.module.LAYER)
    shared = run(beside, given)
    forget_module(beside.module)
    for a, b in zip(pasted, shared, strict=True):
        assert a.blocks.keys() == b.blocks.keys()
        assert all(torch.equal(a.blocks[name], b.blocks[name]) for name in a.blocks), str(case)
        assert a.sent == b.sent


def test_on_processes_with_pasted_on_some(tmp_path: Path) -> None:
    """As right with either; ranks have the same files, as what they call is known by its code."""
    case = named("together", "stationary-w", {"C": 2, "F": 2}, dtype="float64")
    given = global_tensors(case.layer)
    case.module  # noqa: B018  its file, before any fork
    pasted, shared = Path(case.module.__file__ or ""), write(case, tmp_path, shared_runtime())
    forget_module(case.module)

    def program(rank: int) -> str:
        module = load_module(pasted if rank % 2 else shared)
        mesh = module.init_mesh("cpu")
        local = {name: module.scatter(name, value, mesh) for name, value in given.items()}
        with pytest.raises(RuntimeError, match="don't run the same module") as refused:
            module.conv(local["x"], local["w"], local["bias"], mesh=mesh)
        return str(refused.value)

    assert len(set(spawn(program, 4))) == 1
    for path in (pasted, shared):
        one = run_processes(path, 4, given, 300.0)
        steps = [s for phase in case.volume().values() for s in phase]
        assert [[s["bytes_sent_per_rank"][r] for s in steps] for r in range(4)] == [[b for _, b in o.sent] for o in one]


# ---- Ways to import ------------------------------------------------------------------------------------------------

PROGRAM = """
import importlib.util, pickle, sys
sys.modules["convgen"] = None  # any import of it fails
import torch, torch.distributed as dist

def by_path(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER + f"/{name}.py")
    module = importlib.util.module_from_spec(spec)
    if REGISTER:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

before = list(sys.path)
IMPORT
assert sys.path == before
runtimes = {name for name in sys.modules if "_convgen_runtime_" in name}
assert len(runtimes) == 1, runtimes
assert first.Block is second.Block and first.ConvModule is second.ConvModule and first.Conv is not second.Conv
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
mesh = first.init_mesh("cpu")
for layer in (first, second):
    x = layer.scatter("x", torch.ones(4, 6, 7, 6, dtype=torch.float64), mesh).requires_grad_()
    y = layer.Conv(mesh, seed=0, parameters="blocks")(x)
    y.sum().backward()
    assert layer.gather("y", y, mesh).shape == (4, 8, 7, 6) and layer.gather("dx", x.grad, mesh).shape == x.shape
if REGISTER:
    conv = first.Conv(mesh, parameters="blocks")
    with open(sys.argv[1] + ".pickle", "wb") as file:
        file.write(pickle.dumps(conv.weight))
dist.destroy_process_group()
print("done")
"""
FOLDER_ON_PATH = "sys.path.insert(0, FOLDER); before = list(sys.path); import first, second"
WAYS = {
    "on sys.path": (FOLDER_ON_PATH, True),
    "a package": (
        "sys.path.insert(0, FOLDER + '/..'); before = list(sys.path); from build import first, second",
        True,
    ),
    "by path, without sys.modules": ("first, second = by_path('first'), by_path('second')", False),
}


@pytest.mark.parametrize("way", WAYS)
def test_imported_from_anywhere(way: str, tmp_path: Path) -> None:
    """And a Block that one process has pickled another reads, by the same import path."""
    folder = tmp_path / "build"
    for name in ("first", "second"):
        write(named(name, "sample", {"N": 1}, dtype="float64"), folder, shared_runtime())
    lines, register = WAYS[way]
    program = f"FOLDER, REGISTER = {str(folder)!r}, {register}\n" + PROGRAM.replace("IMPORT", lines)
    assert python(program, tmp_path, str(tmp_path / "store")) == "done\n"
    if register:
        path = str(folder.parent if way == "a package" else folder)
        reads = "import pickle, sys; block = pickle.loads(open(sys.argv[1] + '.pickle', 'rb').read())\n"
        reads += "print(block.held.name, tuple(block.shape))"
        found = python(f"import sys; sys.path.insert(0, {path!r})\n{reads}", tmp_path, str(tmp_path / "store"))
        assert found == "first weight (8, 6, 3, 3)\n"


def python(program: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


# ---- One process, several runtimes ---------------------------------------------------------------------------------


def test_two_versions_in_one_folder_and_process(tmp_path: Path, forgotten: list[ModuleType]) -> None:
    """And a module with its own, on one mesh: Blocks mix, norms are of all, and item() is mended once."""
    cases = [named(f"version_{i}", "stationary-w", {"C": 2, "F": 2}, dtype="float64") for i in range(3)]
    versions = [shared_runtime(), another_version()]
    modules = [load(case, tmp_path, version) for case, version in zip(cases[:2], versions, strict=True)]
    modules.append(cases[2].module)
    forgotten += modules
    assert len({m.LAYER.__class__ for m in modules}) == 3
    assert len({m.Block for m in modules}) == 1
    assert sorted(p.name for p in tmp_path.glob("_convgen_*.py")) == sorted(f"{v.name}.py" for v in versions)
    handler = DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default]
    given = global_tensors(cases[0].layer)
    plain = [torch.nn.Conv2d(6, 8, 3, padding=1, dtype=torch.float64) for _ in modules]
    for i, conv in enumerate(plain):
        torch.manual_seed(i)
        conv.reset_parameters()
    y = plain[2](given["x"]) + plain[1](given["x"]) * plain[0](given["x"])
    y.backward(given["dy"])
    expected = torch.nn.utils.clip_grad_norm_([p for conv in plain for p in conv.parameters()], 0.5)
    torch.optim.SGD([p for conv in plain for p in conv.parameters()], lr=0.1).step()

    def program(end: VirtualTransport) -> None:
        mesh = modules[1].init_mesh(transport=end)
        convs = [m.Conv(mesh, seed=i, parameters="blocks") for i, m in enumerate(modules)]
        parameters = [p for conv in convs for p in conv.parameters()]
        x = modules[2].scatter("x", given["x"], mesh)
        y = convs[2](x) + convs[1](x) * convs[0](x)
        y.backward(modules[0].scatter("dy", given["dy"], mesh))
        norms = [m.clip_grad_norm_(parameters, 1e9) for m in modules]
        norms.append(modules[end.rank % 2].clip_grad_norm_(parameters, 0.5))
        assert all(torch.allclose(n, expected, rtol=1e-12) for n in norms)
        torch.optim.SGD(parameters, lr=0.1).step()
        for conv, module, whole in zip(convs, modules, plain, strict=True):
            torch.testing.assert_close(
                module.gather("w", conv.weight, mesh), whole.weight.detach(), rtol=1e-10, atol=1e-12
            )

    World(4).run(program)
    assert handler is DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default]


def test_one_graph_of_two_modules(tmp_path: Path, forgotten: list[ModuleType]) -> None:
    # Of no shape that tests on processes have: torch remembers the mesh of a DTensor by its shape and the mesh's.
    cases = [named(f"graph_{i}", "stationary-y", {"N": 2, "F": 2}, SQUARE, dtype="float64") for i in range(2)]
    modules = [load(case, tmp_path) for case in cases]
    forgotten += modules
    torch._dynamo.reset()
    mesh = modules[0].init_mesh(transport=Alone(rank=0, size=4))
    for kind in ("dtensors", "blocks"):
        convs = [m.Conv(mesh, seed=i, parameters=kind) for i, m in enumerate(modules)]
        x = modules[0].scatter("x", global_tensors(cases[0].layer)["x"], mesh)

        def both(x: Tensor, convs: list[Any] = convs) -> Tensor:
            return convs[0](x) * torch.relu(convs[1](x))

        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), both(x), rtol=1e-12, atol=1e-12)


def test_opcheck_beside(tmp_path: Path, forgotten: list[ModuleType]) -> None:
    case = named("opcheck_beside", "stationary-w", {"C": 2, "F": 2}, dtype="float64")
    own = replace(case)
    own.__dict__.update(schedule=case.schedule, module=load(case, tmp_path))
    forgotten.append(own.module)
    assert_opchecks(own)


def test_refusals_name_the_layer(tmp_path: Path, forgotten: list[ModuleType]) -> None:
    """Each module's own, though one runtime says so."""
    for i, grid in enumerate(({"N": 2, "C": 2}, {"N": 4, "C": 1})):
        case = named(f"refuses_{i}", "stationary-x", grid, dtype="float64")
        own = replace(case)
        own.__dict__.update(schedule=case.schedule, module=load(case, tmp_path))
        forgotten.append(own.module)
        mesh = own.module.init_mesh(transport=Alone(rank=0, size=4))
        local = blocks(own, mesh)
        with pytest.raises(
            ValueError, match=re.escape(f"refuses_{i}: on rank {dict.fromkeys(grid, 0)}: x, this rank's")
        ):
            own.module.conv(local["x"].float(), local["w"], local["bias"], mesh=mesh)


# ---- The command ---------------------------------------------------------------------------------------------------

FILES = ("examples/res5a_branch2b.yaml", "examples/spatial_2x2.yaml")


def compiled(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(cli, ["compile", *words, "-o", str(folder)])
    assert not done.exception, (done.output, done.exception)
    return done.stdout


def test_several_files_share_and_one_does_not(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    files = [str(ROOT / f) for f in FILES]
    assert compiled(two, *files).count(".py") == 2
    beside = shared_runtime()
    names = {p.name for p in two.iterdir()}
    assert names == {"res5a_branch2b.py", "spatial_2x2.py", f"{beside.name}.py"}
    text = (two / f"{beside.name}.py").read_text(encoding="utf-8")
    assert beside.name == f"_convgen_runtime_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    compiled(one, files[0])
    assert [p.name for p in one.iterdir()] == ["res5a_branch2b.py"]
    alone, together = ((d / "res5a_branch2b.py").read_text(encoding="utf-8") for d in (one, two))
    assert beside.name in together and beside.name not in alone
    printed = CliRunner().invoke(cli, ["compile", *files, "--emit", "module"]).stdout
    assert printed.startswith(alone) and "_convgen_runtime_" not in printed
    before = {p: p.read_bytes() for p in two.iterdir()}
    compiled(two, *files)
    assert before == {p: p.read_bytes() for p in two.iterdir()}


def test_a_strangers_file_of_the_runtimes_name_is_kept(tmp_path: Path) -> None:
    path = tmp_path / f"{shared_runtime().name}.py"
    path.write_text("mine\n")
    done = CliRunner().invoke(cli, ["compile", *(str(ROOT / f) for f in FILES), "-o", str(tmp_path)])
    assert done.exception is not None
    assert "is no module that convgen generated" in str(done.exception)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
