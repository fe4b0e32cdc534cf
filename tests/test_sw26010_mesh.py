"""The emulated mesh: what programs may do, and that a wrong one ends in an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convgen.sw26010.gemm.plan import resident
from convgen.sw26010.gemm.program import gemm_program, swap_buses
from convgen.sw26010.machine.core_group import CoreGroup
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.faults import (
    Deadlock,
    DmaFault,
    LdmOverflow,
    MessageFault,
    PrecisionFault,
    UndrainedFifo,
)
from convgen.sw26010.machine.memory import Dram
from convgen.sw26010.machine.mesh import VectorMesh
from convgen.sw26010.machine.printing import load_program


def gemm_operands(size: int, dtype: str = "float64") -> list[Dram]:
    rng = np.random.default_rng(0)
    return [Dram(name, rng.standard_normal((size, size)).astype(dtype)) for name in "ABC"]


def edited(*edits: tuple[str, str]) -> Any:
    """The printed program of a 32^3 GEMM with lines changed."""
    text = gemm_program(resident(32, 32, 32), messages=True)
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return load_program(text)


def test_one_broadcast_reaches_the_seven_others_of_the_row() -> None:
    seen: list[tuple[int, int]] = []

    def program(cpe: Any) -> Any:
        if cpe.column == 3:
            yield from cpe.putr(np.full(4, float(cpe.row)))
        else:
            message = yield from cpe.getr()
            assert message.tolist() == [cpe.row] * 4
            seen.append((cpe.row, cpe.column))

    counts = MessageMesh().run(program)
    assert sorted(seen) == [(i, j) for i in range(8) for j in range(8) if j != 3]
    assert (counts.putr, counts.getr, counts.putc, counts.getc) == (8, 56, 0, 0)


def test_messages_of_a_bus_arrive_in_order() -> None:
    def program(cpe: Any) -> Any:
        for value in range(20):  # more than a FIFO holds: the sender stalls
            if cpe.row == 0:
                yield from cpe.putc(np.full(4, float(value)))
            else:
                message = yield from cpe.getc()
                assert message[0] == value

    mesh = MessageMesh(CoreGroup(fifo_depth=2))
    assert mesh.run(program).getc == 20 * 56
    assert mesh.stalls > 0


def test_swapped_buses_as_the_papers_text_has_them_deadlock() -> None:
    # [SW] 4.1: A "in the same column by column register communication", B "in the same row".
    printed = gemm_program(resident(32, 32, 32), messages=True)
    program = load_program(swap_buses(printed))
    assert swap_buses(swap_buses(printed)) == printed != swap_buses(printed)
    with pytest.raises(Deadlock, match="64 of 64 CPEs wait") as caught:
        MessageMesh().run(program, *gemm_operands(32))
    assert len(caught.value.waiting) == 64
    first = caught.value.waiting[0]
    assert (first.row, first.column) == (0, 0) and len(first.peers) >= 1
    assert "CPE(0,0)" in str(caught.value)


def test_a_skipped_send_deadlocks_and_says_who_waits() -> None:
    program = edited(
        (
            "yield from cpe.putr(av[-1])",
            "if (t, n, m, k, v, cpe.row) != (0, 0, 0, 0, 0, 5): yield from cpe.putr(av[-1])",
        )
    )
    with pytest.raises(Deadlock) as caught:
        MessageMesh().run(program, *gemm_operands(32))
    # Row 5 lacks a message: its last receive waits for ever, and what column partners still send has no room.
    assert any(w.row == 5 and w.operation == "getr" for w in caught.value.waiting)


def test_a_skipped_receive_is_seen_although_the_program_ends() -> None:
    last = "(t, n, m, k, v, cpe.id) == (7, 0, 0, KL - 1, 0, 9)"
    program = edited(
        ("(yield from cpe.getr(t))", f"cpe.load(a, k, v) if {last} else (yield from cpe.getr())"),
    )
    with pytest.raises(UndrainedFifo, match=r"1 on the row bus at CPE\(1,1\)"):
        MessageMesh().run(program, *gemm_operands(32))


def test_a_fifo_of_one_message_is_enough() -> None:
    plan = resident(32, 32, 32)
    program = load_program(gemm_program(plan, messages=True))
    results = []
    for depth in (1, 4):
        operands = gemm_operands(32)
        mesh = MessageMesh(CoreGroup(fifo_depth=depth))
        mesh.run(program, *operands)
        results.append(operands[2].region(0, 0, 32, 32).copy())
    assert np.array_equal(*results)


@pytest.mark.parametrize(
    "message", [np.zeros(5), np.zeros(3), np.zeros(4, np.float32), np.zeros(8, np.float32)], ids=str
)
def test_a_message_is_one_register_of_doubles(message: Any) -> None:
    def program(cpe: Any) -> Any:
        yield from cpe.putr(message)

    with pytest.raises(MessageFault, match="a message is 4 doubles in 32 B"):
        MessageMesh().run(program)


def test_ldm_overflow() -> None:
    def program(cpe: Any) -> Any:
        cpe.ldm("fits", 1, 8192)  # 65536 B, all of it
        cpe.ldm("more", 1, 1)
        yield from ()

    with pytest.raises(LdmOverflow, match=r"CPE\(0,0\): more\[1, 1\] needs 8 B of LDM; 65536 of 65536 B"):
        MessageMesh().run(program)


def test_data_may_not_be_used_before_it_is_waited_for() -> None:
    with pytest.raises(DmaFault, match="a is used before its dma_get was waited for"):
        MessageMesh().run(edited(("                cpe.dma_wait(a)\n", "")), *gemm_operands(32))


@pytest.mark.parametrize("mesh", [MessageMesh, VectorMesh])
@pytest.mark.parametrize(
    ("instruction", "said"),
    [
        ("zero(a)", "a is written to before its dma_get was waited for"),
        ("pick(a, b, 0, 1)", "a is written to before its dma_get was waited for"),
        ("transpose(a, b)", "a is written to before its dma_get was waited for"),
        ("zero(b)", "the program ends before the dma_get into a was waited for"),
    ],
)
def test_a_buffer_is_left_alone_while_data_is_under_way_into_it(mesh: Any, instruction: str, said: str) -> None:
    """The hardware would leave whatever comes last."""
    text = f"""
def program(cpe, A):
    a, b = cpe.ldm("a", 8, 8), cpe.ldm("b", 8, 8)
    cpe.zero(b)
    cpe.dma_get(a, A, 0, 0)
    cpe.{instruction}
    {"return ()" if mesh is VectorMesh else "yield from ()"}
"""
    with pytest.raises(DmaFault, match=said):
        mesh().run(load_program(text), gemm_operands(8)[0])


def test_floats_are_not_doubles() -> None:
    with pytest.raises(PrecisionFault, match="widen it first"):
        MessageMesh().run(
            load_program(gemm_program(resident(32, 32, 32), messages=True)), *gemm_operands(32, "float32")
        )


def test_memory_is_reached_inside_its_bounds_only() -> None:
    def program(cpe: Any, source: Dram) -> Any:
        cpe.dma_get(cpe.ldm("a", 8, 8), source, -1, 0)
        yield from ()

    with pytest.raises(DmaFault, match="from row -1"):
        MessageMesh().run(program, gemm_operands(8)[0])
    with pytest.raises(DmaFault, match="outside"):
        _ = Dram("x", np.zeros((2, 3, 4)))[2]
