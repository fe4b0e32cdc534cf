"""Ranks that are late, gone, wrong or run another module, on real processes: how the others end, and what they say.

Nothing here is judged by the clock. Where nobody has to wait, the time-out is so long that waiting would hang; where
somebody does, what is waited for never comes; and a rank that stays away does so until the others have ended.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_cases import CONV, GUARD_S, NEVER_S, ROWS, blocks, fault_layer, hold, limit_of, ready, told, watch
from modules import Case
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from convgen.spec.layer import Options
from convgen.verify.processes import ProcessFailed, spawn
from convgen.verify.program import global_tensors, load_module, reference, run_rank
from convgen.verify.virtual import VirtualTransport, World


def test_ranks_get_ready_on_a_busy_machine(tmp_path: Path) -> None:
    """The helper: rank 0 fails twice, after rank 1 has gone on; then the mesh and its groups are of the last world."""
    case = fault_layer("busy", "stationary-x", {"C": 2})
    case.module  # noqa: B018

    def program(rank: int) -> tuple[float, dict[str, Tensor]]:
        def begin(timeout: float) -> Any:
            if rank == 0 and timeout < 4:
                raise TimeoutError
            return case.module.init_mesh("cpu", timeout=timeout if timeout >= 4 else 0.2)  # for one who won't come

        mesh = ready(begin, rank, tmp_path)
        return limit_of(mesh.get_group("C")), run_rank(case.module, global_tensors(case.layer), mesh, []).blocks

    for limit, _ in spawn(program, 2, GUARD_S):
        assert limit >= 8.0


# ---- Other modules on other ranks ----------------------------------------------------------------------------------

CHANGES: dict[str, dict[str, Any]] = {
    "dilation": {"spatial": (replace(ROWS[0], dilation=1, pad_lo=1, pad_hi=1), ROWS[1])},  # all shapes are equal
    "padding": {"spatial": (replace(ROWS[0], pad_lo=1, pad_hi=3), ROWS[1])},  # here, too
    "channels": {"channels": 8},
    "batch": {"batch": 4},
    "extent": {"spatial": (replace(ROWS[0], extent=12), ROWS[1])},
    "bias": {"bias": False},
    "sums": {"options": Options(sums="native")},
    "hold_x": {"options": Options(hold_x="stored")},
    "dtype": {"dtype": "float32"},
    "memory format": {"memory_format": "channels_last"},
}


def two_files(folder: Path, change: str) -> tuple[list[Path], list[Case]]:
    """Two modules of one name, which no process could import both."""
    changes = CHANGES[change]
    of_conv = {k: v for k, v in changes.items() if k in ("spatial", "channels", "batch", "bias")}
    rest = {k: v for k, v in changes.items() if k not in of_conv}
    algorithm = "stationary-y" if change == "hold_x" else "stationary-x"
    grid = {"N": 2, "F": 2} if change == "hold_x" else {"N": 2, "C": 2}
    cases = [
        fault_layer("twins", algorithm, grid),
        fault_layer("twins", algorithm, grid, replace(CONV, **of_conv), **rest),
    ]
    paths = [folder / which / "twins.py" for which in ("one", "other")]
    for path, case in zip(paths, cases, strict=True):
        path.parent.mkdir()
        path.write_text(case.source, encoding="utf-8")
    assert cases[0].source != cases[1].source
    return paths, cases


def first_call(how: str, module: ModuleType, given: dict[str, Tensor], mesh: DeviceMesh) -> None:
    local = blocks(module, given, mesh)
    if how == "gather":
        module.gather("x", local["x"], mesh)
    elif how == "Conv":
        module.Conv(mesh, seed=0)(local["x"])
    else:
        module.conv(local["x"], local["w"], local.get("bias"), mesh=mesh)


@pytest.mark.parametrize(
    ("change", "how", "agree"),
    [
        *((change, "conv", agree) for change in CHANGES for agree in (False, True)),
        *((change, how, agree) for change in ("dilation", "dtype") for how in ("Conv", "gather") for agree in (0, 1)),
    ],
)
def test_other_modules(tmp_path: Path, change: str, how: str, agree: bool) -> None:
    """All ranks are told, by name and at once, and nothing but hashes and names has travelled."""
    paths, cases = two_files(tmp_path, change)

    def program(rank: int) -> tuple[str, list[tuple[str, str]], str]:
        os.environ["CONVGEN_AGREE"] = "1" if agree else "0"
        which = rank % 2
        module = load_module(paths[which])
        mesh = module.init_mesh("cpu", timeout=NEVER_S)
        seen = watch(module)
        error = told(lambda: first_call(how, module, global_tensors(cases[which].layer), mesh))
        return error, seen, module.LAYER.identity.hex()[:8]

    ran = spawn(program, 4, GUARD_S)
    hashes = [ran[0][2], ran[1][2]]
    assert hashes[0] != hashes[1]
    for error, seen, _ in ran:
        assert error == (
            "RuntimeError: twins: the ranks of this mesh don't run the same module, nothing was computed: "
            f"ranks [0, 2]: twins {hashes[0]} in {paths[0]}; ranks [1, 3]: twins {hashes[1]} in {paths[1]}"
        )
        assert not seen  # the messages that calls begin with go beside torch's collectives


def test_the_same_module_from_other_folders(tmp_path: Path) -> None:
    """Where a file lies is no difference."""
    case = fault_layer("moved", "stationary-x", {"C": 2})
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "moved.py").write_text(case.source, encoding="utf-8")

    def program(rank: int) -> list[tuple[str, str]]:
        module = load_module(tmp_path / str(rank) / "moved.py")
        mesh = module.init_mesh("cpu", timeout=NEVER_S)
        seen = watch(module)
        for _ in range(2):
            first_call("conv", module, global_tensors(case.layer), mesh)
        return seen

    for seen in spawn(program, 2, GUARD_S):
        assert len(seen) == 2


# ---- Ranks that are late, gone or wrong ----------------------------------------------------------------------------

HALO = fault_layer("halo_fault", "spatial", {"H": 2})
SUMS = fault_layer("sums_fault", "stationary-x", {"C": 2})
STEPS = {case.layer.name: [s["step"] for s in case.volume()["forward"]] for case in (HALO, SUMS)}


@pytest.mark.parametrize("case", [HALO, SUMS], ids=lambda case: case.layer.name)
@pytest.mark.parametrize("when", ["first", "second", "in forward", "backward", "gather"])
def test_a_late_rank(tmp_path: Path, case: Case, when: str) -> None:
    """TimeoutError after the time-out that init_mesh was given, with the step, and who did not come."""
    module, given, over = case.module, global_tensors(case.layer), tmp_path / "over"

    def program(rank: int) -> str:
        os.environ["CONVGEN_AGREE"] = "0" if when == "in forward" else "1"

        def begin(timeout: float) -> Any:
            mesh = module.init_mesh("cpu", timeout=timeout)
            local = blocks(module, given, mesh)
            local["w"].requires_grad_()
            local["x"].requires_grad_()
            y = None if when == "first" else module.conv(local["x"], local["w"], local["bias"], mesh=mesh)
            return mesh, local, y

        mesh, local, y = ready(begin, rank, tmp_path)
        if rank == 1:
            hold(over)
            return ""
        if when == "backward":
            error = told(lambda: y.backward(local["dy"]))
        elif when == "gather":
            error = told(lambda: module.gather("y", y, mesh))
        else:
            error = told(lambda: module.conv(local["x"], local["w"], local["bias"], mesh=mesh))
        over.touch()
        return error

    error = spawn(program, 2, GUARD_S)[0]
    volume = case.volume()
    of_backward = [s["step"] for phase in ("backward_data", "backward_filter") for s in volume[phase]]
    steps = {
        "first": ["conv, call 1: "],
        "second": ["conv, call 2: "],
        "in forward": [f"step %{step} = " for step in STEPS[case.layer.name][:1]],
        "backward": [f"step %{step} = " for step in of_backward],
        "gather": ["gather of y, call 2: "],
    }[when]
    begin = f"TimeoutError: {case.layer.name}: ranks [1] did not come to "
    assert any(error.startswith(begin + step) for step in steps), error
    if case is HALO and when in ("in forward", "backward"):
        assert "over H: rank 1: " in error


def test_nobody_comes_to_make_the_mesh(tmp_path: Path) -> None:
    over = tmp_path / "over"

    def program(rank: int) -> str:
        if rank == 1:
            hold(over)
            return ""
        error = told(lambda: SUMS.module.init_mesh("cpu", timeout=0.5))
        over.touch()
        return error

    error = spawn(program, 2, GUARD_S)[0]
    begin = "TimeoutError: sums_fault: ranks [1] did not come: rank 0 did not meet all of ranks [0, 1]: "
    assert error.startswith(begin), error


def survivors(program: Callable[[int, Callable[[str], None]], None], folder: Path, lost: int, ranks: int) -> list[str]:
    """What the ranks say that outlive rank `lost`."""

    def one(rank: int) -> None:
        program(rank, lambda text: (folder / f"{rank}.said").write_text(text, encoding="utf-8"))

    with pytest.raises(ProcessFailed):
        spawn(one, ranks, GUARD_S)
    return [(folder / f"{r}.said").read_text(encoding="utf-8") for r in range(ranks) if r != lost]


@pytest.mark.parametrize("case", [HALO, SUMS], ids=lambda case: case.layer.name)
@pytest.mark.parametrize("when", ["first", "second", "in forward"])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_is_gone(tmp_path: Path, case: Case, when: str, how: str) -> None:
    """Its connections are, too: the others are told at once."""
    module, given, begun = case.module, global_tensors(case.layer), tmp_path / "begun"

    def program(rank: int, say: Callable[[str], None]) -> None:
        os.environ["CONVGEN_AGREE"] = "0" if when == "in forward" else "1"
        mesh = module.init_mesh("cpu", timeout=NEVER_S)
        local = blocks(module, given, mesh)
        if when != "first":
            module.conv(local["x"], local["w"], local["bias"], mesh=mesh)
        if rank == 1:
            hold(begun)  # a rank that is killed earlier is another fault
        begun.touch()
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise ArithmeticError("of its own")
        say(told(lambda: module.conv(local["x"], local["w"], local["bias"], mesh=mesh)))

    (error,) = survivors(program, tmp_path, 1, 2)
    step = {"first": "conv, call 1: ", "second": "conv, call 2: "}.get(when, f"step %{STEPS[case.layer.name][0]} = ")
    assert error.startswith(f"RuntimeError: {case.layer.name}: ranks [1] did not come to {step}"), error
    if case is HALO and when == "in forward":
        assert "over H: rank 1: " in error


@pytest.mark.parametrize("when", ["first", "second"])
@pytest.mark.parametrize("agree", [False, True])
def test_a_wrong_argument_on_one_rank(tmp_path: Path, when: str, agree: bool) -> None:
    """All are told; with CONVGEN_AGREE=0 the others time out with the step's name."""
    module, given, over = HALO.module, global_tensors(HALO.layer), tmp_path / "over"

    def program(rank: int) -> str:
        os.environ["CONVGEN_AGREE"] = "1" if agree else "0"

        def begin(timeout: float) -> Any:
            mesh = module.init_mesh("cpu", timeout=NEVER_S if agree else timeout)
            local = blocks(module, given, mesh)
            if when == "second":
                module.conv(local["x"], local["w"], local["bias"], mesh=mesh)
            return mesh, local

        mesh, local = ready(begin, rank, tmp_path)
        x = local["x"].float() if rank == 1 else local["x"]
        error = told(lambda: module.conv(x, local["w"], local["bias"], mesh=mesh))
        if rank == 0:
            over.touch()
        else:
            hold(over)
        return error

    errors = spawn(program, 2, GUARD_S)
    assert errors[1].startswith("ValueError: halo_fault: on rank {'H': 1}: x, "), errors[1]
    if agree:
        told_why = errors[1].removeprefix("ValueError: ")
        why = f"ValueError: halo_fault: ranks [1] refused their arguments, nothing was computed: {told_why}"
        assert errors[0] == why
    else:
        step = "conv, call 1: " if when == "first" else f"step %{STEPS['halo_fault'][0]} = "
        assert errors[0].startswith(f"TimeoutError: halo_fault: ranks [1] did not come to {step}"), errors[0]


# ---- Time-outs -----------------------------------------------------------------------------------------------------

GRID4 = fault_layer("limits", "stationary-w", {"C": 2, "F": 2})


@pytest.mark.parametrize("ranks", [None, (3, 1, 0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("asked", [None, 1234.0])
def test_groups_have_the_time_out_wanted(ranks: tuple[int, ...] | None, asked: float | None) -> None:
    """The mesh's, or the default group's: those of the axes, DeviceMesh's own, and those made on first use."""
    module, given = GRID4.module, global_tensors(GRID4.layer)

    def program(rank: int) -> tuple[float, list[float]]:
        mesh = module.init_mesh("cpu", ranks=ranks, timeout=asked)
        run_rank(module, given, mesh, [])
        module.gather("y", module.scatter("y", given["dy"], mesh), mesh)
        world = dist.distributed_c10d._world.pg_map
        limits = [limit_of(mesh.get_group(axis)) for axis in ("C", "F")]
        limits += [limit_of(group) for group in world if group is not dist.group.WORLD]
        return limit_of(dist.group.WORLD), limits

    for default, limits in spawn(program, 4, GUARD_S):
        assert default not in (1234.0, 1800.0)  # torch's own default says nothing
        assert len(limits) >= 5
        assert set(limits) == {asked or default}


def test_groups_of_a_users_mesh_have_the_default_groups() -> None:
    module, given = GRID4.module, global_tensors(GRID4.layer)

    def program(rank: int) -> tuple[float, set[float]]:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("C", "F"))
        theirs = set(dist.distributed_c10d._world.pg_map)
        run_rank(module, given, mesh, [])
        ours = set(dist.distributed_c10d._world.pg_map) - theirs
        return limit_of(dist.group.WORLD), {limit_of(group) for group in ours}

    for default, limits in spawn(program, 4, GUARD_S):
        assert limits == {default}


def test_the_default_groups_time_out_ends_a_lone_rank(tmp_path: Path) -> None:
    """Without timeout=; the default group had long enough to begin, and then 1 s."""
    over = tmp_path / "over"

    def program(rank: int) -> tuple[str, float]:
        if rank == 1:
            hold(over)
            return "", 0.0
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
        taken = SUMS.module.default_timeout().total_seconds()
        error = told(lambda: SUMS.module.init_mesh("cpu"))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GUARD_S), dist.group.WORLD)
        over.touch()
        return error, taken

    error, taken = spawn(program, 2, GUARD_S)[0]
    assert taken == 1.0
    begin = "TimeoutError: sums_fault: ranks [1] did not come: rank 0 did not meet all of ranks [0, 1]: "
    assert error.startswith(begin), error


def test_init_process_groups_time_out_is_taken(tmp_path: Path) -> None:
    """As it was given there, in a world of one, which waits for nobody."""
    alone = fault_layer("alone", "stationary-x", {"C": 1})
    alone.module  # noqa: B018

    def program(_: int) -> list[float]:
        dist.destroy_process_group()
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=3))
        mesh = alone.module.init_mesh("cpu")
        return [limit_of(dist.group.WORLD), limit_of(mesh.get_group("C"))]

    assert spawn(program, 1, GUARD_S) == [[3.0, 3.0]]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA runtime error", "RuntimeError"),
        ("the run time environment is gone", "RuntimeError"),
        ("Connection closed by peer", "RuntimeError"),
        ("Timed out waiting 2000ms for recv operation to complete", "TimeoutError"),
        ("Wait timeout", "TimeoutError"),
        ("the operation time-out was reached", "TimeoutError"),
    ],
)
def test_what_is_taken_for_a_time_out(text: str, kind: str) -> None:
    class Failing(VirtualTransport):
        meet = None  # as of a transport that has none

        def all_gather(self, tensor: Tensor, splits: Any, group: Any) -> Tensor:
            raise RuntimeError(text)

    def program(end: VirtualTransport) -> str:
        mesh = SUMS.module.init_mesh("cpu", transport=Failing(end._world, end.rank))
        local = blocks(SUMS.module, global_tensors(SUMS.layer), mesh)
        return told(lambda: SUMS.module.conv(local["x"], local["w"], local["bias"], mesh=mesh))

    assert World(2).run(program) == [f"{kind}: sums_fault: conv, call 1: {text}"] * 2


# ---- Loaded by hand, and another number of samples -----------------------------------------------------------------


def test_loaded_without_sys_modules(tmp_path: Path) -> None:
    """As by spec_from_file_location, module_from_spec and exec_module, and nothing else."""
    case = fault_layer("by_hand", "stationary-x", {"C": 2})
    path = tmp_path / "by_hand.py"
    path.write_text(case.source, encoding="utf-8")
    given = global_tensors(case.layer)

    def program(rank: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        spec = importlib.util.spec_from_file_location("by_hand", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert "by_hand" not in sys.modules
        mesh = module.init_mesh("cpu")
        got = run_rank(module, given, mesh, []).blocks
        whole = {name: module.gather(name, block, mesh) for name, block in got.items()}
        conv = module.Conv(mesh, seed=0)
        conv.load_full(given["w"], given["bias"])
        x = module.scatter("x", given["x"], mesh)
        y = conv(x)
        y.sum().backward()
        return whole, module.gather("y", y.detach(), mesh), module.gather("dw", conv.weight.grad.to_local(), mesh)

    truth = reference(CONV, given)
    summed = reference(CONV, {**given, "dy": torch.ones_like(given["dy"])})
    for whole, y, dw in spawn(program, 2, GUARD_S):
        for name, value in whole.items():
            torch.testing.assert_close(value, truth[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(y, truth["y"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dw, summed["dw"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["conv", "gather", "Conv"])
@pytest.mark.parametrize(("at", "named"), [(0, True), (1, False), (2, False)])
def test_another_number_of_samples_is_asked_for_batch(how: str, at: int, named: bool) -> None:
    """Only where nothing else differs: batch= would not help with another extent."""
    module = SUMS.module

    def program(rank: int) -> str:
        mesh = module.init_mesh("cpu", timeout=NEVER_S)
        local = blocks(module, global_tensors(SUMS.layer), mesh)
        shape = list(local["x"].shape)
        shape[at] += 1
        local["x"] = torch.zeros(shape, dtype=torch.float64)

        def call() -> None:
            if how == "gather":
                module.gather("x", local["x"], mesh)
            elif how == "Conv":
                module.Conv(mesh)(local["x"])
            else:
                module.conv(local["x"], local["w"], local["bias"], mesh=mesh)

        return told(call)

    for error in spawn(program, 2, GUARD_S):
        assert error.startswith("ValueError: sums_fault: on rank {'C': "), error
        assert error.endswith("; batch= tells the global number of samples, if it is another one") == named, error
