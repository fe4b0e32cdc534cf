"""The GEMM's program: from a plan to the text that one CPE, or the mesh at once, runs."""

from __future__ import annotations

import re
from functools import cache

from convgen import __version__
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.machine.core_group import SW26010
from convgen.sw26010.machine.printing import print_program, steps


@cache
def gemm_program(plan: GemmPlan, *, messages: bool) -> str:
    """Text of the program.

    Args:
        messages: for one CPE, message by message; else for the mesh at once.
    """
    return print_program("gemm", gemm_context(plan, messages=messages))


def swap_buses(text: str) -> str:
    """The program as the text of [SW] 4.1 has it: A along columns, B along rows. It deadlocks."""
    swapped = {"putr": "putc", "putc": "putr", "getr": "getc", "getc": "getr"}
    return re.sub(r"(?<=cpe\.)(putr|putc|getr|getc)(?=\()", lambda match: swapped[match[1]], text)


def gemm_context(plan: GemmPlan, *, messages: bool) -> dict[str, object]:
    """Everything that templates/sw26010/gemm.py.jinja names, and nothing else."""
    ml, nl, kl = plan.tile
    a_rows = {False: ("{k} + j * KL", "m + i * ML"), True: ("m + i * ML", "{k} + j * KL")}[plan.a_transposed]
    b_rows = {False: ("n + j * NL", "{k} + i * KL"), True: ("{k} + i * KL", "n + j * NL")}[plan.b_transposed]

    def at(place: tuple[str, str], k: str) -> str:
        return ", ".join(p.format(k=k) if k else p.replace("{k} + ", "") for p in place)

    times = "" if plan.images == 1 else f"{plan.images} times "
    kind = "double buffered" if plan.double_buffer else "single buffered"
    return {
        **steps(messages=messages),
        "header": (
            f"Printed by convgen {__version__} (sw26010 gemm).",
            f"gemm      {times}M={plan.m} N={plan.n} K={plan.k} {plan.dtype}; {kind}",
            f"LDM       {plan.ldm_bytes} of {SW26010.ldm_bytes} B in each CPE",
        ),
        "memory_note": _memory_note(plan),
        "m": plan.m, "n": plan.n, "k": plan.k, "images": plan.images,
        "bm": plan.bm, "bn": plan.bn, "bk": plan.bk,
        "ml": ml, "nl": nl, "kl": kl,
        "accumulate": plan.accumulate,
        "floats": plan.dtype == "float32",
        "double_buffer": plan.double_buffer,
        "a_transposed": plan.a_transposed,
        "b_transposed": plan.b_transposed,
        "a_next_shape": "ML, KL" if plan.a_transposed else "KL, ML",
        "b_next_shape": "KL, NL" if plan.b_transposed else "NL, KL",
        "a_into": "a_next" if plan.double_buffer or plan.a_transposed else "a",
        "b_into": "b_next" if plan.double_buffer or plan.b_transposed else "b",
        "a_at0": at(a_rows, ""), "a_at": at(a_rows, "k"), "a_at_next": at(a_rows, "k + BK"),
        "b_at0": at(b_rows, ""), "b_at": at(b_rows, "k"), "b_at_next": at(b_rows, "k + BK"),
    }  # fmt: skip


def _memory_note(plan: GemmPlan) -> str:
    turned = [name for name, is_turned in (("A", plan.a_transposed), ("B", plan.b_transposed)) if is_turned]
    return f" ({' and '.join(turned)} row-major, turned round in LDM)" if turned else ""
