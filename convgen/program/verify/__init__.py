"""The verifier: small named checks that a program is right on every rank, by index sets.

Nothing here asks how a program was made. Types say what each rank holds; the checks compare what a step reads, sends
and makes with that, rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.space import Space
from convgen.errors import InternalError
from convgen.program.forms import check_forms
from convgen.program.nodes import Schedule, Step
from convgen.program.text import describe
from convgen.program.verify.computes import (
    check_bias_is_added_once,
    check_bias_lies_as_what_it_is_added_to,
    check_every_term_is_summed_once,
    check_one_padding_fits,
    check_operands_match,
    check_rows_are_at_hand,
)
from convgen.program.verify.conversions import (
    check_conversion_is_typed,
    check_every_read_is_local,
    check_group_is_exact,
    check_no_partial_is_read_whole,
    check_sent_is_received,
    check_windows_are_needed,
)
from convgen.program.verify.facts import Facts, Fault
from convgen.program.verify.said import (
    check_every_tensor_is_stored,
    check_held_x_is_as_said,
    check_roles_are_as_computed,
)
from convgen.program.verify.structure import (
    check_computations_make_blocks,
    check_every_read_is_defined,
    check_every_value_is_read,
    check_names_are_defined_once,
    check_results_are_stored,
    check_steps_take_their_operands,
    check_types_are_layouts,
)

__all__ = ["CHECKS", "Facts", "faults", "verify"]


def check_forms_are_read_as_such(f: Facts) -> Iterator[Fault]:
    """Parts and rims are what they say, and only steps that know how read them."""
    yield from check_forms(f.schedule, f.space)


CHECKS: tuple[Callable[[Facts], Iterator[Fault]], ...] = (
    check_every_tensor_is_stored,
    check_names_are_defined_once,
    check_every_read_is_defined,
    check_every_value_is_read,
    check_types_are_layouts,
    check_results_are_stored,
    check_steps_take_their_operands,
    check_computations_make_blocks,
    check_no_partial_is_read_whole,
    check_windows_are_needed,
    check_conversion_is_typed,
    check_group_is_exact,
    check_every_read_is_local,
    check_sent_is_received,
    check_operands_match,
    check_rows_are_at_hand,
    check_one_padding_fits,
    check_every_term_is_summed_once,
    check_bias_is_added_once,
    check_bias_lies_as_what_it_is_added_to,
    check_forms_are_read_as_such,
    check_roles_are_as_computed,
    check_held_x_is_as_said,
)


def verify(schedule: Schedule, space: Space) -> None:
    """Check a schedule against every rule.

    Raises:
        InternalError: with the rule, the schedule's line, and the ranks and numbers that break it.
    """
    if schedule.grid != space.grid:
        raise InternalError(f"schedule {schedule.name} is on {schedule.grid}, its index space on {space.grid}")
    types = schedule.types()
    for fault in faults(schedule, space):
        line = ""
        if fault.step:
            text = describe(fault.step, types, transposed=space.conv.transposed)
            line = f"\n  {text} : {fault.step.type}"
        raise InternalError(f"schedule {schedule.name}, {fault.batch} samples: {fault.check}{line}\n  {fault.text}")


class Broken(NamedTuple):
    """The name of a check, its words, the step at fault, and for how many samples."""

    check: str
    text: str
    step: Step | None
    batch: int


def faults(schedule: Schedule, space: Space) -> Iterator[Broken]:
    """Every rule that a schedule breaks. Faults after the first may follow from it, or be missed because of it."""
    every = _with_a_sample_each(space.conv, space.grid, space.virtual_padding)
    for facts in (Facts(schedule, space), Facts(schedule, every)):
        for check in CHECKS:
            for step, text in check(facts):
                yield Broken(check.__name__, text, step, facts.space.conv.batch)


@lru_cache(maxsize=4)
def _with_a_sample_each(conv: Conv, grid: Grid, virtual_padding: bool) -> Space:
    """The same layer with as many samples as ranks: a module runs with any number, so a schedule holds for all."""
    return Space(replace(conv, batch=grid.enough), grid, virtual_padding=virtual_padding)
