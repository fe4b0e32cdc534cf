"""`convgen check` of networks: what is right is found right, forward, backward, in training and evaluation, and what
is wrong is found wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import Made, compiled, exported, resnet, undropped, unet
from torch import Tensor, nn

from convgen.packages import files_of, forget_package, load_package
from convgen.verify.graph_reference import run_graph
from convgen.verify.network import check_network, report_text
from convgen.verify.network_program import KINDS, OF_PARAMETERS, truth_of
from convgen.verify.parted import first_parted, verdict
from convgen.verify.virtual import VirtualTransport, World

GRIDS: list[dict[str, int]] = [{"N": 2}, {"H": 2}, {"C": 2}, {"H": 2, "W": 2}]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: ",".join(f"{a}={n}" for a, n in g.items()))
@pytest.mark.parametrize("made", [resnet, unet])
def test_a_network_is_right_on_every_grid(made: Made, grid: dict[str, int]) -> None:
    one, tensors = compiled(made, **grid)
    report = check_network(one, tensors)
    assert report.ok, report_text(report)
    assert [c.kind for c in report.compared] == list(KINDS)
    assert sum(report.bytes_sent.values()) > 0


@pytest.mark.slow
def test_processes_agree_with_virtual_ranks() -> None:
    one, tensors = compiled(resnet, H=2)
    report = check_network(one, tensors, transport="processes")
    assert report.ok, report_text(report)


def test_float32_has_a_tolerance_of_its_own() -> None:
    one, tensors = compiled(resnet, dtype="float32", N=2)
    report = check_network(one, tensors)
    assert report.ok, report_text(report)
    assert all(1e-7 < c.tolerance < 0.05 for c in report.compared)


SPOILT = [  # what a package says, something else, and which kind of tensor is wrong then
    ("bn1.dp = back bn1.dp", "bn1.dp = same bn1.dp", "gradients of parameters"),  # no all-reduce
    (", 0.1, 1e-05)", ", 0.2, 1e-05)", "buffers"),
    ("Dropout((N, 6), 0.25)", "Dropout((N, 6), 0.25, 1)", "outputs"),
    (
        "= same drop (view) when evaluation",
        "= forward drop (view, [convgen.seed]) when evaluation",
        "outputs in evaluation",
    ),
]


@pytest.mark.parametrize(("right", "wrong", "kind"), SPOILT, ids=[kind for _, _, kind in SPOILT])
def test_what_is_wrong_is_found(right: str, wrong: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tensors = compiled(resnet, N=2)

    def spoilt(*given: Any) -> dict[str, bytes]:
        files = files_of(*given)
        assert right in files["network.py"].decode()
        return files | {"network.py": files["network.py"].decode().replace(right, wrong, 1).encode()}

    monkeypatch.setattr("convgen.verify.network.files_of", spoilt)
    report = check_network(one, tensors)
    assert not report.ok
    assert kind in [c.kind for c in report.compared if not c.ok], report_text(report)
    assert bool(report.uncounted) == ("back" in right)
    last = report_text(report).splitlines()[-1]
    first = next(c for c in report.compared if c.wrong)
    assert last.startswith("WRONG: ") and f"of {sum(c.count for c in report.compared)} tensors" in last
    assert report.parted is not None and report.parted.name in first.wrong and report.parted.text in last
    assert ("what was sent is not what VOLUME says" in last) == bool(report.uncounted)


def test_the_first_wrong_element_is_said() -> None:
    """Rank 1 holds rows 2 and 3 of 4; of its block [1, 2] is off, on rank 0 nothing is."""
    truth = torch.arange(12.0).view(4, 3)
    blocks = [(0, (0, 0), truth[:2].clone()), (1, (2, 0), truth[2:].clone())]
    assert first_parted("y", blocks, truth, 0.1) is None
    blocks[1][2][1, 2] += 0.25
    assert first_parted("y", blocks, truth, 0.5) is None
    found = first_parted("y", blocks, truth, 0.1)
    assert found is not None and (found.rank, found.index) == (1, (3, 2))
    assert found.text == "y[3, 2] is 11.25 on rank 1, 11 on one device"
    blocks[0][2][1, 0] = float("nan")
    assert (found := first_parted("y", blocks, truth, 0.1)) is not None and found.index == (1, 0)
    assert verdict(3, [], None) == "ok: 3 of 3 tensors right"
    assert verdict(3, ["y"], found, ["more"]) == f"WRONG: 1 of 3 tensors (y); the first: {found.text}; more"


def test_of_gradients_the_row_that_backward_comes_to_first_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients but the last ones are wrong: of those the row next to the output is the first."""
    one, tensors = compiled(resnet, N=2)

    def doubled(*given: Any) -> dict[str, dict[str, torch.Tensor]]:
        found = truth_of(*given)
        return found | {OF_PARAMETERS: {n: 2 * t for n, t in found[OF_PARAMETERS].items()}}

    monkeypatch.setattr("convgen.verify.network.truth_of", lambda *a, **k: doubled(*a))
    report = check_network(one, tensors)
    reads = [name for row in one.program.rows for name in row.bound.reads]
    assert report.parted is not None and report.parted.name in reads
    later = reads[reads.index(report.parted.name) + 1 :]
    wrong = next(c for c in report.compared if c.kind == OF_PARAMETERS).wrong
    same_row = next(row.bound.reads for row in one.program.rows if report.parted.name in row.bound.reads)
    assert not set(later) & set(wrong) - set(same_row)


def test_processes_that_cant_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where autograd has threads, with a torch that is built for GPUs: fresh interpreters, the same result."""
    monkeypatch.setattr("convgen.verify.processes.how_to_start", lambda: "spawn")
    one, tensors = compiled(resnet, N=2)
    report = check_network(one, tensors, transport="processes")
    assert report.ok, report_text(report)


def test_the_reference_is_the_module() -> None:
    """The graph on one device, and the module itself: in training, with what buffers become, and in evaluation."""
    for made_by in (undropped, unet):
        (module, x), (graph, tensors) = made_by(), exported(made_by)
        state = {n: t.detach().clone() for n, t in module.state_dict().items()} | tensors
        for training in (True, False):
            made = run_graph(graph, state | {"x": x}, training=training)
            truth = module.train(training)(x)
            truth = truth if isinstance(truth, dict) else {"output": truth}
            for name, y in truth.items():
                torch.testing.assert_close(made.outputs[name], y, rtol=1e-11, atol=1e-11)
            if training:
                assert made.updates
                for name, value in made.updates.items():
                    torch.testing.assert_close(value, module.state_dict()[name], rtol=1e-11, atol=1e-11)
                state |= made.updates


# ---- Training ----


def test_twenty_steps_of_training_are_those_of_one_device(tmp_path: Path) -> None:
    """SGD with momentum on 4 ranks: losses, parameters and running statistics."""
    module, _ = undropped()
    several = [torch.randn(3, 3, 29, 22, dtype=torch.float64) for _ in range(2)]
    goals = [torch.randn(3, 5, dtype=torch.float64) for _ in range(2)]
    one, tensors = compiled(undropped, N=2, H=2)
    for name, data in files_of(one, tensors).items():
        (tmp_path / name).write_bytes(data)
    net = load_package(tmp_path)
    start = {n: t.clone() for n, t in module.state_dict().items()}

    def train(model: nn.Module, step: Callable[[Tensor], Tensor]) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        losses: list[float] = []
        for k in range(20):
            optimizer.zero_grad()
            loss = (step(several[k % 2]) - goals[k % 2]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def program(end: VirtualTransport) -> tuple[list[float], dict[str, Tensor]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(start)
        losses = train(model, lambda x: net.gather("output", model(net.scatter("x", x, mesh)), mesh))
        return losses, model.full_state_dict()

    try:
        found = World(4).run(program)
    finally:
        forget_package(net)
    losses = train(module, module)
    assert losses[-1] < losses[0] / 2
    for mine, state in found:
        torch.testing.assert_close(mine, losses, rtol=1e-10, atol=0)
        for name, truth in module.state_dict().items():
            torch.testing.assert_close(state[name], truth, rtol=1e-10, atol=1e-10)


FORGETFUL = """
import pickle, sys
from pathlib import Path
from convgen.packages import forget_package, load_package
from convgen.verify.virtual import World

first, second = Path(sys.argv[1]), Path(sys.argv[2])
forget_package(load_package(first))
net = load_package(second)

def program(end):
    model = net.Network(net.init_mesh("cpu", transport=end), seed=0, parameters="blocks")
    state = pickle.loads(pickle.dumps(model.state_dict()))
    assert all(type(state[n]) is type(t) for n, t in model.state_dict().items())
    return sum("Block" in type(t).__name__ for t in state.values())

print(World(2).run(program))
"""


def test_blocks_are_pickled_by_a_package_that_is_there(tmp_path: Path) -> None:
    """Also where the one that was loaded first is forgotten: classes are shared, functions are looked up by name."""
    one, tensors = compiled(resnet, C=2)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        for file, data in files_of(one, tensors).items():
            (tmp_path / name / file).write_bytes(data)
    words = [sys.executable, "-c", FORGETFUL, str(tmp_path / "first"), str(tmp_path / "second")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.strip("[]\n").split(","))) > 0
