"""Ranks run what is printed: the steps of the program's text, in its order, forward and backward."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from free_networks import imported
from runtime_parts import ROOT
from test_networks_gpu import loaded
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.commands.one_row import compile_one_rows
from convgen.network_compiler import MEANWHILE, CompiledNetwork, compile_network
from convgen.passes.contract import NetworkPass
from convgen.program.lower import lower
from convgen.program.network_text import BACKWARD, FORWARD, steps_texts
from convgen.program.steps import Kind, Lowered, Step
from convgen.program.verify.steps import step_faults
from convgen.spec.exported import graph_of
from convgen.spec.reader import layer_to_dict, read_layer
from convgen.spec.target import CPU
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import VirtualTransport, World

sys.path.insert(0, str(ROOT))
from runtime.listing import STEP_KINDS  # isort: skip

Ran = tuple[str, str]  # of a step its kind and its key


def example(module: str, factory: str, *shape: int) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (getattr(importlib.import_module(f"examples.{module}"), factory)(), torch.randn(*shape))


EXAMPLES = {
    "resnet": example("resnet", "small_resnet", 4, 3, 16, 16),
    "unet3d": example("unet3d", "UNet3d", 2, 1, 8, 8, 8),
    "convnext": example("convnext", "small_convnext", 2, 3, 32, 32),
    "decoder": example("vae_decoder", "Decoder", 2, 4, 4, 4),
}
LAYERS = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.yaml"))
GRIDS = ({"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "H": 2})


def compiled(
    name: str, grid: dict[str, int], passes: Sequence[NetworkPass] | None = None
) -> tuple[CompiledNetwork, dict[str, Tensor], Tensor]:
    module, x = EXAMPLES[name]()
    graph, tensors = graph_of(module.train(), (x,), name=name)
    return compile_network(graph, Grid(tuple(grid.items())), passes=passes), tensors, x


def test_a_package_reads_every_kind_of_step() -> None:
    assert set(get_args(Kind)) == STEP_KINDS


def test_a_network_without_rows_is_a_package_that_checks() -> None:
    """Dropout of nothing is its input, whose gradient is a step of backward."""
    x = torch.randn(3, 5, dtype=torch.float64)
    graph, tensors = graph_of(nn.Sequential(nn.Dropout(0.0)).train(), (x,), name="as_it_is")
    found = compile_network(graph, Grid((("N", 2),)))
    assert not found.program.rows
    report = check_network(found, tensors)
    assert report.ok, report_text(report)


class Watch:
    """Of each thread what it runs, forward and backward."""

    def __init__(self, net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = sys.modules[type(net.NET).__module__]
        self.found: dict[int, list[list[Ran]]] = {}
        execute = runtime.execute

        def watched(codes: Sequence[Any], slots: list[Any]) -> None:
            ran = [(code.line.kind, code.line.key) for code in codes]
            self.found.setdefault(threading.get_ident(), []).append(ran)
            execute(codes, slots)

        monkeypatch.setattr(runtime, "execute", watched)

    def step(self, net: Any, x: Tensor, end: VirtualTransport) -> list[list[Ran]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model._calls = 1  # the first call looks for NaNs besides
        made = model(net.scatter(model._inputs[0], x, mesh))
        (made["y"] if isinstance(made, dict) else made).square().sum().backward()
        return self.found[threading.get_ident()]


def lines(text: str, section: str) -> list[str]:
    """Of a program's text."""
    _, _, rest = text.partition(f"  {section}\n")
    found: list[str] = []
    for line in rest.splitlines():
        if not line.startswith("    "):
            break
        found.append(line.strip())
    return found


def of_training(steps: Sequence[Step], read: Collection[str]) -> list[Step]:
    """Of a list, without what makes nothing that anybody reads, as a view that no other row takes.

    Args:
        read: behind it.
    """
    needed, found = set(read), list[Step]()
    for s in reversed([s for s in steps if s.when is None or s.when[1]]):
        if s.kind not in ("forward", "same", "fill") or needed & set(s.makes):
            found.append(s)
            needed |= set(s.reads)
    return found[::-1]


@pytest.mark.parametrize("passes", [None, MEANWHILE], ids=("by the timeline", "all that may travel"))
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_ranks_run_the_steps_that_are_printed(
    name: str,
    grid: dict[str, int],
    passes: Sequence[NetworkPass] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_runs_its_text(*compiled(name, grid, passes), tmp_path, monkeypatch)


@pytest.mark.parametrize("passes", [(), MEANWHILE], ids=("by the timeline", "all that may travel"))
@pytest.mark.parametrize("file", LAYERS, ids=lambda file: file.stem)
def test_a_layer_as_a_network_runs_the_steps_that_are_printed(
    file: Path, passes: Sequence[NetworkPass], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = dict.fromkeys(("grid", "algorithm", "dtype"))
    data = layer_to_dict(read_layer(str(file)).made_for(CPU)) | {"dtype": "float32", "options": {}}
    own = tmp_path / file.name
    own.write_text(json.dumps(data))
    (one,) = compile_one_rows([str(own)], passes=[str(p) for p in passes], **none)
    assert_runs_its_text(one.compiled, one.tensors, torch.randn(data["input"]), tmp_path, monkeypatch)


def assert_runs_its_text(
    one: CompiledNetwork, tensors: dict[str, Tensor], x: Tensor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, kinds and order of all that is computed, sent, waited for and added; of a step that hands something on,
    gives a gradient to autograd or renews a buffer the text has no line, or another."""
    with loaded(one, tensors, folder) as net:
        watch = Watch(net, monkeypatch)
        forward, backward = World(one.program.grid.ranks).run(lambda end: watch.step(net, x, end))[0]
    steps = lower(one.program, of_inputs=False)
    later = {n for s in steps.backward for n in s.reads} | {slot for _, slot, _ in steps.outputs}
    assert [ran for ran in forward if ran[0] != "update"] == [
        (s.kind, s.key) for s in of_training(steps.forward, later) if s.kind != "update"
    ]
    assert backward == [(s.kind, s.key) for s in of_training(steps.backward, ()) if s.kind != "gradient"]
    assert steps_texts(steps.forward, one.program) == lines(net.SCHEDULE, FORWARD)
    assert steps_texts(steps.backward, one.program) == lines(net.SCHEDULE, BACKWARD)


EDITS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "a step gone": (lambda s: [t for t in s if not t.startswith("~0, ~0.kept =")], "no step makes|no step before it"),
    "a step twice": (
        lambda s: [t for one in s for t in ([one, one] if one.startswith("~2, ") else [one])],
        "before it makes",
    ),
    "a step behind its reader": (
        lambda s: [*(t for t in s if not t.startswith("~0.x =")), *(t for t in s if t.startswith("~0.x ="))],
        "no step before it makes stem_0.x",
    ),
    "a slot that is not there": (
        lambda s: [t.replace("forward ~2 (~1)", "forward ~2 (~7)") for t in s],
        "no step makes stem_7",
    ),
    "a kind that is not there": (lambda s: [t.replace("= fetch ~0.x", "= bring ~0.x") for t in s], "no kind bring"),
    "a row that is not there": (lambda s: [t.replace("forward ~2 (", "forward ~9 (") for t in s], "no row stem_9"),
    "no step": (lambda s: [t.replace("~0.x = fetch", "~0.x fetch") for t in s], "cannot read the step"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_step_that_cant_be_is_refused(what: str, tmp_path: Path) -> None:
    edit, words = EDITS[what]
    one, tensors, x = compiled("resnet", {"H": 2})
    files = one.package(constants=bool(tensors)).files
    head, mark, text = files["network.py"].partition('    },\n    """\n')
    steps, end, rest = text.partition('    """,')
    edited = [f"    {line}" for line in edit([line.strip() for line in steps.splitlines()])]
    changed = head + mark + "\n".join(edited) + "\n" + end + rest
    assert changed != files["network.py"]

    def program(transport: VirtualTransport) -> None:
        net = imported(files | {"network.py": changed}, tmp_path)
        mesh = net.init_mesh("cpu", transport=transport)
        net.Network(mesh)(net.scatter("image", x, mesh)).sum().backward()

    with pytest.raises(Exception, match=words):
        World(2).run(program)


def test_an_edited_step_is_what_ranks_run(tmp_path: Path) -> None:
    """A rectifier less, forward and backward."""
    one, _, x = compiled("resnet", {"N": 2})
    files = one.package().files
    text = files["network.py"].replace("~2, ~2.kept = forward ~2 (~1)", "~2 = same ~2 (~1)", 1)
    text = text.replace("~2.dx0 = vjp ~2 (~2.kept, ~2.grad)", "~2.dx0 = same ~2 (~2.grad)", 1)
    module = EXAMPLES["resnet"]()[0]
    module.stem[2] = nn.Identity()
    net = imported(files | {"network.py": text}, tmp_path)

    def program(end: VirtualTransport) -> tuple[Tensor, dict[str, Tensor]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(module.state_dict())
        y = net.gather("output", model(net.scatter("image", x, mesh)), mesh)
        y.square().sum().backward()
        return y.detach(), model.full_gradients()

    found, gradients = World(2).run(program)[0]
    y = module(x)
    y.square().sum().backward()
    torch.testing.assert_close(found, y.detach(), rtol=1e-4, atol=1e-4)
    largest = max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)
    for name, p in module.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-4 * largest)


# ---- What is planted into the list is found ----


def planted(lowered: Lowered) -> Iterator[tuple[str, Lowered, bool]]:
    """Lists with one mistake each; of a step that makes what nobody reads, and hands nothing on, it is none."""
    handed = {slot for _, slot, _ in lowered.outputs}
    made = {m for s in (*lowered.forward, *lowered.backward) for m in s.makes} - handed
    for section in ("forward", "backward"):
        steps: tuple[Step, ...] = getattr(lowered, section)
        later = lowered.backward if section == "forward" else ()
        for n, step in enumerate(steps):
            read = {r for s in (*steps[n + 1 :], *later) for r in s.reads} | {slot for _, slot, _ in lowered.outputs}
            matters = bool({*step.makes} & read) or step.kind in ("update", "gradient")
            said = f"{section} {step.kind} {step.key}"
            yield f"{said} gone", replace(lowered, **{section: (*steps[:n], *steps[n + 1 :])}), matters
            makes = any(m != "_" for m in step.makes) or step.kind in ("update", "gradient")
            yield f"{said} twice", replace(lowered, **{section: (*steps[: n + 1], step, *steps[n + 1 :])}), makes
            before = next((s.makes[0] for s in reversed(steps[:n]) if s.makes and s.makes[0] not in step.reads), "_")
            for r in {r for r in step.reads if r in made}:
                other = replace(step, reads=tuple(before if one == r else one for one in step.reads))
                yield f"{said} not of {r}", replace(lowered, **{section: (*steps[:n], other, *steps[n + 1 :])}), True
            turned = replace(step, reads=step.reads[::-1])
            one = replace(lowered, **{section: (*steps[:n], turned, *steps[n + 1 :])})
            yield f"{said} of operands the other way round", one, step.kind != "add" and turned != step
            reader = next((m for m in range(n + 1, len(steps)) if {*step.makes} & {*steps[m].reads}), None)
            if reader is not None and steps[reader].when in (None, step.when):
                behind = (*steps[:n], *steps[n + 1 : reader + 1], step, *steps[reader + 1 :])
                yield f"{said} behind its reader", replace(lowered, **{section: behind}), True


@pytest.mark.parametrize("of_inputs", [False, True])
@pytest.mark.parametrize(("name", "grid"), [("resnet", {"N": 2, "H": 2}), ("unet3d", {"C": 2, "H": 2})], ids=str)
def test_no_step_can_be_missing_late_twice_or_of_others(name: str, grid: dict[str, int], of_inputs: bool) -> None:
    program = compiled(name, grid)[0].program
    lowered = lower(program, of_inputs=of_inputs)
    assert not [*step_faults(program, lowered, of_inputs=of_inputs)]
    kinds = {s.kind for s in (*lowered.forward, *lowered.backward)}
    assert {"start", "wait", "wait_bucket", "vjp_boundary", "add"} <= kinds or {"fetch", "vjp", "add"} <= kinds
    mistakes = [(what, one) for what, one, matters in planted(lowered) if matters]
    assert len(mistakes) > 300
    missed = [what for what, one in mistakes if not any(step_faults(program, one, of_inputs=of_inputs))]
    assert not missed, missed
