"""The Triton source of a kernel, from a problem and a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from convgen.kernels.config import Config, alignment, even, largest, rows_alignment
from convgen.kernels.environment import environment
from convgen.kernels.families import of_gpu, pointer
from convgen.kernels.on_cpu import cpu_module, cpu_source
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words
from convgen.spec.target import Target


@dataclass(frozen=True)
class Kernel:
    """A local kernel: the problems of all ranks that it serves, and its configuration.

    Attributes:
        problems: one a rank; they differ in extents only.
        open: whether it takes extents as arguments and so serves other extents, too: it is compiled once for all of
            them, while constants are compiled anew for each. Extents that its family can't do are convolved by
            pointers.
    """

    problems: tuple[Problem, ...]
    config: Config
    target: Target
    open: bool = False

    @cached_property
    def problem(self) -> Problem:
        return largest(self.problems)

    @property
    def name(self) -> str:
        return f"{self.problem.phase}_{self.config.family}"

    def source(self) -> str:
        """Triton functions, and the function of the phase's name that launches them; on a CPU that of ATen's calls."""
        return self._source

    @cached_property
    def _source(self) -> str:
        p = self.problem
        if self.target.is_cpu:
            return cpu_source(p, self.config)
        if not self.open:
            return self._printed(self.name, self._words(p.phase))
        made, words = of_gpu(self.config), self._words(f"{p.phase}_by_{self.config.family}")
        whole = {} if made.NEEDS else words.rows_aligned
        conditions = [f"math.prod(s.{t}) % {n} == 0" for t, n in whole.items() if n > 1]
        conditions += made.conditions(replace(p, rim=None if p.rim is None else words.rims))
        given = {"p": p, "t": words, "conditions": conditions, "kernel": self._printed(self.name, words)}
        if conditions:
            usual = replace(self, config=pointer.default(p, self.target))
            rest = usual._words(f"{p.phase}_at_any", aligned_rows=False)
            given["rest"] = usual._printed(f"{p.phase}_any", rest)
        return environment().get_template("kernels/open.py.jinja").render(**given)

    def _words(self, entry: str, *, aligned_rows: bool = True) -> Words:
        """The words that the kernel's template gets.

        Args:
            entry: the name of the function that launches it.
            aligned_rows: whether a sample's rows, where they lie side by side, are always a multiple of what these
                ranks' rows are.
        """
        p, made = self.problem, of_gpu(self.config)
        aligned = (alignment(self.problems, "x"), alignment(self.problems, "y"))
        return made.words(p)(
            p,
            float32=self.target.float32_products,
            tf32=self.target.tf32_products,
            even=even(self.problems, self.config),
            aligned=aligned,
            single_channels=made.SINGLE_CHANNELS,
            grouped=any(q.groups > 1 for q in self.problems),
            rims=max(q.rim or 0 for q in self.problems),
            multiplies=p.dtype != "float64" or self.target.multiplies_float64,
            rows=(rows_alignment(self.problems, "x"), rows_alignment(self.problems, "y")) if aligned_rows else (1, 1),
            open=self.open,
            entry=entry,
            alike=len({(q.channels, q.filters) for q in self.problems}) == 1,
        )

    def _printed(self, name: str, words: Words) -> str:
        p, config = self.problem, self.config
        template = environment().get_template(f"kernels/{of_gpu(config).TEMPLATE.format(phase=p.phase)}")
        return template.render(name=name, p=p, t=words, bias=p.bias, split=config.split, config=config)


def reads_boxes(kernels: Sequence[Kernel]) -> bool:
    return any("boxes" in of_gpu(k.config).NEEDS for k in kernels)


def launch_source(kernels: Sequence[Kernel], *, alone: bool = False) -> str:
    """The source of what launches kernels, and of functions that they share.

    Args:
        alone: whether they stand without a module's runtime around them.
    """
    rims = any(k.problem.rim is not None for k in kernels)
    rounds = any(k.problem.dtype == "tfloat32" for k in kernels)
    rim_boxes = any(k.problem.rim is not None and "boxes" in of_gpu(k.config).NEEDS for k in kernels)
    turns = any(not k.problem.channels_last and "boxes" in of_gpu(k.config).NEEDS for k in kernels)
    aten = any("aten" in of_gpu(k.config).NEEDS for k in kernels)
    template = environment().get_template("kernels/launch.py.jinja")
    boxes, target = reads_boxes(kernels), kernels[0].target if kernels else None
    arch = f"sm_{target.arch}" if target is not None and target.kind == "cuda" else ""
    given = {"rims": rims, "rounds_tf32": rounds, "boxes": boxes, "aten": aten, "rim_boxes": rim_boxes, "arch": arch}
    given |= {"turns": turns, "counts": any("= counters(" in k.source() for k in kernels), "alone": alone}
    given["open"] = any(k.open for k in kernels)
    return template.render(**given).rstrip("\n")


def kernel_module(kernels: Sequence[Kernel]) -> str:
    """A module of nothing but these kernels, of different phases: what tuning, tests and inspection import.

    A CPU's has one kernel.
    """
    if kernels[0].target.is_cpu:
        (kernel,) = kernels
        return cpu_module(kernel.problem, kernel.config)
    launch = launch_source(kernels, alone=True)
    counts, boxes, bounded = "ModuleType" in launch, reads_boxes(kernels), "lru_cache" in launch
    standard = [
        "import math",
        *["import sys"] * counts,
        "import warnings",
        f"from functools import cache{', lru_cache' * bounded}",
    ]
    standard += [*["from types import ModuleType"] * counts, "from typing import Any, NamedTuple"]
    others = ["import torch", "import triton", "import triton.language as tl", "from torch import Tensor"]
    others += ["from triton.tools.tensor_descriptor import TensorDescriptor"] * boxes
    head = "\n".join(["from __future__ import annotations", "", *standard, "", *others])
    parts = [head, launch, *(k.source() for k in kernels)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
