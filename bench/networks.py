"""Public networks, whole: what their operators become, what runs whole, and how exact they are on virtual ranks.

    python bench/networks.py [--library timm ...] [--models resnet18 ...] [--grids N=2 H=2,W=2 ...] [--steps 3]
        [--eval] [--table FILE]
    python bench/networks.py --list [--library timm ...]

The models are those of bench/zoo, a table a library. Small configurations and random weights, every parameter drawn
anew (heads of zeros and scales of 1e-6 hide errors), in float64. A line a model: calls of ATen's operators and how many
sorts of them, what ran whole and its share of the flops, seconds of the import, of the processor, and torch.export's
among them; then a line a grid: errors of outputs, of gradients of inputs, of parameters, of buffers, and of what steps
of training change, relative to the largest entry (docs/design.md, Networks), bytes sent by all ranks in a step, seconds
of compiling. Models of packages that are not installed are left out.

Some cast to float32 inside, whatever they are given. What such a one rounds itself is measured: its graph with every
cast left out, against it. On ranks it may be 1e-6 off, or four times as far as it is from that.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from networks_on_ranks import Imported, check, draw_parameters, imported, random_input, truth_of
from zoo import LIBRARIES, MODELS

from convgen.errors import InputError
from convgen.operations.calls import Whole
from convgen.operations.row import At, Operation
from convgen.spec.aten.describe import describe
from convgen.spec.text import parse_grid
from convgen.verify.graph_reference import run_graph

FLAT = ("N=2", "H=2", "H=3", "C=2", "H=2,W=2", "N=2,C=2")
DEEP = ("N=2", "D=2", "H=3", "C=2", "D=2,H=2", "N=2,C=2", "D=2,H=2,W=2")


def without_draws(model: nn.Module) -> nn.Module:
    """Dropouts of nothing: what is drawn is compared elsewhere (tests/test_aten.py)."""
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "_drop_connect_rate", "drop_connect_rate"):
            if isinstance(getattr(module, name, None), float) and "drop" in (name + type(module).__name__).lower():
                setattr(module, name, 0.0)
            elif name == "p" and type(module).__name__ == "StochasticDepth":
                module.p = 0.0
    return model


def whole(operation: Operation) -> At:
    signature = operation.signatures[0]
    box = tuple(tuple((0, n) for n in o.shape) for o in signature.inputs)
    return At({i: (0, n) for i, n in signature.extents}, box, box)


def flops(operation: Operation) -> int:
    """Of a row on one device; of what runs whole torch's own count, or an operation an element."""
    work = operation.work(0, whole(operation))
    if not isinstance(operation, Whole):
        return work.flops
    found = 0
    try:
        with FlopCounterMode(display=False) as counter:
            operation.local(0, whole(operation), *(torch.zeros(s, dtype=torch.float64) for s in operation.shapes))
        found = counter.get_total_flops()
    except (RuntimeError, TypeError, IndexError):
        pass
    return max(found, work.elements)


@contextmanager
def timed_export(into: list[float]) -> Generator[None]:
    """Adds the processor's seconds in torch.export to `into`."""
    home, program = torch.export, torch.export.ExportedProgram
    before = home.export, program.run_decompositions

    def timed(function: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            start = process_time()
            try:
                return function(*given, **named)
            finally:
                into.append(process_time() - start)

        return run

    home.export, program.run_decompositions = map(timed, before)
    try:
        yield
    finally:
        home.export, program.run_decompositions = before


def own_rounding(given: Imported) -> float:
    """How far a module that casts to float32 is from its graph in float64: of outputs and gradients the largest error,
    relative to the largest entry of all gradients of its kind."""
    module, x = given.module, given.inputs[0]
    state = {n: t.detach().clone() for n, t in module.state_dict().items()} | given.constants
    parameters = {n: state[n].requires_grad_() for n, _ in module.named_parameters()}
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    made = run_graph(given.graph, state | {given.graph.inputs[0].name: one}, training=module.training)
    exact = [made.outputs[name] for name, _ in given.graph.outputs]
    module.zero_grad()
    found = [t for t in tree_leaves(module(two)) if t is not None]
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in found]
    for ys in (exact, found):
        smooth = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in smooth], [dy for _, dy in smooth])
    pairs = [*zip(found, exact, strict=True), (two.grad, one.grad)]
    floor = 1e-3 * max(p.grad.abs().max().item() for p in module.parameters() if p.grad is not None)
    pairs += [(p.grad, parameters[n].grad) for n, p in module.named_parameters()]
    errors = [
        ((a - b).abs().max() / max(b.abs().max().item(), floor if k > len(found) else 0.0, 1e-30)).item()
        for k, (a, b) in enumerate(pairs)
        if a is not None and b is not None and a.numel()
    ]
    return max(errors)


def a_model(name: str, train: bool) -> tuple[Imported, str] | None:
    """And what its import took."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, shape = MODELS[name]()
        except ImportError as error:
            print(f"{name:22} left out: {error}")
            return None
        model = without_draws(model).to(torch.float64)
        draw_parameters(model)
        exports: list[float] = []
        start = process_time()
        with timed_export(exports):
            given = imported(model, random_input(shape), train=train)
        took = process_time() - start
        return given, f"import {given.seconds:.1f} s ({took:.1f} s of processor, torch.export {sum(exports):.1f} s)"


def row_of(name: str, given: Imported, took: str) -> str:
    found = describe(given.graph.at(given.graph.batch))
    each = [(number, flops(row.operation)) for number, row in zip(found.calls, found.rows, strict=True)]
    total, alone = sum(f for _, f in each), sum(f for number, f in each if number in found.whole)
    sorts = {c.op for c in given.graph.calls}
    ran = Counter(given.graph.calls[n].op for n in found.whole)
    said = ", ".join(f"{op} x{n}" for op, n in ran.items()) or "nothing"
    share = f"{100 * alone / max(total, 1):.2g} %"
    return (
        f"{name:22} {len(given.graph.calls)} calls of {len(sorts)} operators, {len(found.rows)} rows; "
        f"whole: {said} ({share}); {took}"
    )


def table_row(line: str, rows: Sequence[tuple[str, tuple[float, ...]]]) -> str:
    """Of a model: `line` as `row_of` has it, and what was found on grids."""
    name, counts = line.split(maxsplit=1)
    size, _, rest = counts.partition("; whole: ")
    errors = (f"{max(e[k] for _, e in rows):.0e}" for k in range(5))
    cells = (name, size, rest.partition(";")[0], ", ".join(text for text, _ in rows), *errors)
    return f"| {' | '.join(cells)} |\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", nargs="*", choices=LIBRARIES, default=[*LIBRARIES], help="all by default")
    parser.add_argument("--models", nargs="*", choices=MODELS, metavar="MODEL", help="instead of whole libraries")
    parser.add_argument("--list", action="store_true", help="the models' names, and no more")
    parser.add_argument("--grids", nargs="*", help="N=2 H=2,W=2 ...; by default some for each model")
    parser.add_argument(
        "--table", help="file that gets a line of Markdown a model: grids that are right, largest errors"
    )
    parser.add_argument("--steps", type=int, default=3, help="of training, compared after the first gradients")
    parser.add_argument("--eval", action="store_true", help="in evaluation, else in training")
    asked = parser.parse_args(arguments)
    names = asked.models or [name for library in asked.library for name in LIBRARIES[library]]
    if asked.list:
        print("\n".join(names))
        return 0
    torch.set_default_dtype(torch.float64)
    wrong = 0
    for name in names:
        try:
            made = a_model(name, not asked.eval)
            if made is None:
                continue
            given, took = made
            line = row_of(name, given, took)
            print(line, flush=True)
        except Exception as error:
            print(f"{name:22} FAILED to import: {type(error).__name__}: {error}", flush=True)
            wrong += 1
            continue
        deep = given.inputs[0].dim() == 5
        narrow = any(r is not None and r.dtype == "float32" for call in given.graph.calls for r in call.results)
        own = own_rounding(given) if narrow else 0.0
        inside = f" (float32 inside: {own:.0e} itself)" * narrow
        rows: list[tuple[str, tuple[float, ...]]] = []
        truth = truth_of(given, steps=0 if asked.eval else asked.steps)
        for text in asked.grids or (DEEP if deep else FLAT):
            grid = parse_grid(text)
            try:
                found = check(given, grid, truth=truth)
            except InputError as error:
                print(f"  {text:10} refused: {error}", flush=True)
                wrong += 1
                continue
            except Exception as error:
                print(f"  {text:10} FAILED: {type(error).__name__}: {str(error)[:500]}", flush=True)
                wrong += 1
                continue
            worst = max(found.outputs, found.inputs, found.parameters, found.buffers)
            loose = max(1e-6, 4 * own)
            right = found.right or (narrow and max(worst, found.steps) <= loose and not found.volume)
            wrong += not right
            if right:
                errors = (found.outputs, found.inputs, found.parameters, found.buffers, found.steps)
                rows.append((text.replace(",", " "), errors))
            steps = f"{found.steps:.0e}" + f" ({found.limit:.0e} allowed)" * (found.steps > 1e-8)
            print(
                f"  {text:10} y {found.outputs:.0e}  dx {found.inputs:.0e}  dw {found.parameters:.0e}  "
                f"buffers {found.buffers:.0e}  steps {steps}  {found.sent / 1e6:8.2f} MB  "
                f"compiled in {found.compiled:.1f} s  "
                f"{'right' if right else f'WRONG {found.worst} {found.volume}'}{inside}",
                flush=True,
            )
        if asked.table and rows:
            with open(asked.table, "a", encoding="utf-8") as table:
                table.write(table_row(line, rows))
    print(f"{wrong} wrong or refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
