"""The lines of a generated module's phases: a call for each step of the schedule, with the step's text above as a
comment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from convgen.algebra.conv import Conv
from convgen.algebra.layout import Layout
from convgen.emit.literals import literal
from convgen.program.liveness import Stretch, backward_stretches, forward_stretch
from convgen.program.nodes import Compute, Convert, Schedule, Step
from convgen.program.text import describe

Key = tuple[str, tuple[tuple[str, ...], ...], tuple[bool, ...]]


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """A layout constant of the module, of one of the runtime's classes of layouts."""

    name: str
    kind: Literal["Layout", "Window", "PaddedWindow"]
    tensor: str
    axes: tuple[tuple[str, ...], ...]
    rows: tuple[bool, ...]
    text: str


class LayoutNames:
    """Each distinct layout of a schedule once, named after the first value that has it.

    `virtual`: whether local convolutions pad by themselves, so that windows have no rows of zeros.
    """

    def __init__(self, schedule: Schedule, *, virtual: bool) -> None:
        self.virtual = virtual
        self.table: dict[Key, NamedLayout] = {}
        for tensor, layout in schedule.stored:
            self._add(tensor, layout)
        for _, step in schedule.steps():
            self._add(step.result, step.type)

    def _add(self, value: str, layout: Layout) -> None:
        key = self._key(layout)
        if key not in self.table:
            text = str(layout).split(" partial")[0]
            window = "Window" if self.virtual else "PaddedWindow"
            kind = window if layout.has_window else "Layout"
            self.table[key] = NamedLayout(value.upper(), kind, *key, text)

    @staticmethod
    def _key(layout: Layout) -> Key:
        return layout.tensor, layout.axes, tuple(w is not None for w in layout.windows)

    def of(self, layout: Layout) -> str:
        return self.table[self._key(layout)].name


class Lines:
    """Writes the body of `run_forward` and `run_backward`.

    Args:
        ways: the phases whose local convolution is a function in the module, instead of ATen's.
    """

    def __init__(self, schedule: Schedule, conv: Conv, names: LayoutNames, ways: Collection[str] = ()) -> None:
        self.schedule, self.conv, self.names, self.ways = schedule, conv, names, ways
        self.types = schedule.types()
        self.forms, self.owned = schedule.forms(), schedule.owned()
        self.sources = {s.result: s for _, s in schedule.steps() if isinstance(s, Convert)}

    def forward(self) -> list[str]:
        held = self.schedule.held()
        lines = self._body(forward_stretch(self.schedule))
        return [*lines, f"return {', '.join(('y', *held))}{'' if held else ','}"]

    def backward(self) -> list[str]:
        lines: list[str] = []
        for stretch in backward_stretches(self.schedule):
            lines.append(f"if {' or '.join(f'need_{r}' for r in stretch.needed)}:")
            lines += [f"    {line}" for line in self._body(stretch)]
        return lines

    def _body(self, stretch: Stretch) -> list[str]:
        """The calls of these steps; each value is deleted after its last reader."""
        lines: list[str] = []
        for step, gone in zip(stretch.steps, stretch.dropped, strict=True):
            lines.append(f"# {describe(step, self.types, transposed=self.conv.transposed)} : {step.type}")
            lines.append(f"{step.result} = {self._call(step)}")
            if gone:
                lines.append(f"del {', '.join(gone)}")
        return lines

    def _call(self, step: Step) -> str:
        name = self.names.of
        match step:
            case Compute(operation="add_bias", inputs=(source, bias)):
                ones = ", 1" * len(self.conv.spatial)
                return f"{source}.add_({bias}.view(-1{ones}))"
            case Compute(operation="sum_bias", inputs=(source,)):
                dims = (0, *range(2, 2 + len(self.conv.spatial)))
                return f"{source}.sum({dims})"
            case Convert(kind="slice"):
                src, dst = name(self.types[step.source]), name(step.type)
                call = f"take({step.source}, {src}, {dst}, here)"
                own = step.result in self.owned
                return f"{call}.clone(memory_format=LAYER.format({src}.tensor))" if own else call
            case Convert(form="parts"):
                src = name(self.types[step.source])
                return f'all_gather_parts("{step.result}", {step.source}, {src}, {literal(step.over)}, here)'
            case Convert(form="rim"):
                return f'exchange_rim("{step.result}", {step.source}, {self.rim(step)}, here)'
            case Convert():
                src, dst = name(self.types[step.source]), name(step.type)
                tail = f"{step.source}, {src}, {dst}, {literal(step.over)}, here)"
                if step.kind in ("all_to_all", "exchange"):
                    return f'rearrange("{step.result}", "{step.kind}", {tail}'
                return f'{step.kind}("{step.result}", {tail}'
            case Compute() if self.names.virtual:
                rims = [v for v in step.inputs if self.forms.get(v) == "rim"]
                inputs = [self.sources[v].source if v in rims else v for v in step.inputs]
                return f"{step.operation}({', '.join([*inputs, *rims])}, here)"
            case Compute():
                return self._convolve(step)

    def rim(self, step: Convert) -> str:
        """The text of layouts and axes of an exchange whose result stays a rim."""
        return f"{self.names.of(self.types[step.source])}, {self.names.of(step.type)}, {literal(step.over)}"

    def fake(self, value: str) -> str:
        """The text of a tensor like one that forward returns."""
        layout = self.names.of(self.types[value])
        match self.forms.get(value):
            case "parts":
                return f"x.new_empty(math.prod(here.shape({layout})))"
            case "rim":
                return f"x.new_empty(rim_size({self.rim(self.sources[value])}, here))"
            case _:
                return f"here.empty({layout}, x)"

    def _convolve(self, step: Compute) -> str:
        types = {t.tensor: t for t in (step.type, *(self.types[v] for v in step.inputs))}
        inputs = ", ".join(step.inputs)
        if step.operation == "conv_forward" and len(step.inputs) == 2:
            inputs += ", None"
        padding = "[" + ", ".join(self._padding(i, types) for i in range(len(self.conv.spatial))) + "]"
        kernel = self.conv.direct_phase(step.phase)
        way = f", {kernel}" if kernel in self.ways else ""
        return f"{step.operation}(LAYER, {inputs}, {padding}, here.shape({self.names.of(step.type)}){way})"

    def _padding(self, i: int, types: dict[str, Layout]) -> str:
        """The text of one spatial dimension's zero padding, equal on both sides, as the local convolution gets it."""
        fine, coarse = types[self.conv.fine], types[self.conv.coarse]
        if coarse.windows[2 + i] is not None:
            return f"here.below({i}, {self.names.of(fine)}, {self.names.of(coarse)})"
        if fine.windows[2 + i] is not None or fine.axes[2 + i]:
            return "0"
        return str(self.conv.spatial[i].pad_lo)
