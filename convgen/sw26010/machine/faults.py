"""What a CPE program can do wrong; the emulator stops at each instead of going on with wrong numbers."""

from __future__ import annotations

from dataclasses import dataclass

from convgen.errors import ConvgenError


class MeshFault(ConvgenError):
    """A CPE program broke a rule of the machine."""


class LdmOverflow(MeshFault):
    """A buffer does not fit into what is left of the local directive memory."""


class MessageFault(MeshFault):
    """What a CPE sends over a bus is not one 256-bit register of doubles."""


class DmaFault(MeshFault):
    """A transfer that DMA cannot do, or data used before the transfer was waited for."""


class PrecisionFault(MeshFault):
    """Floats in LDM used as doubles, or the other way round."""


class AccountFault(MeshFault):
    """A run counts other events than its closed form: something was left out, or done twice."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A CPE that cannot go on: the operation it stands at, and the CPEs that could release it."""

    row: int
    column: int
    operation: str  # getr, getc, putr or putc
    peers: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        why = "an empty FIFO, for" if self.operation.startswith("get") else "a full FIFO of"
        return f"CPE({self.row},{self.column}) {self.operation}: {why} {_cpes(self.peers)}"


class Deadlock(MeshFault):
    """Every CPE that has not ended waits. `waiting` says who, at what, and for whom."""

    def __init__(self, waiting: tuple[Waiting, ...]) -> None:
        self.waiting = waiting
        shown = [f"  {w}" for w in waiting[:8]]
        more = [f"  and {len(waiting) - 8} more"] if len(waiting) > 8 else []
        super().__init__("\n".join([f"deadlock: {len(waiting)} of 64 CPEs wait", *shown, *more]))


class UndrainedFifo(MeshFault):
    """The program ended and messages were never received: some CPE computed with the wrong ones."""

    def __init__(self, left: tuple[tuple[str, int, int, int], ...]) -> None:
        self.left = left  # bus, row, column, messages
        named = ", ".join(f"{messages} on the {bus} bus at CPE({i},{j})" for bus, i, j, messages in left[:4])
        more = f" and at {len(left) - 4} more CPEs" if len(left) > 4 else ""
        super().__init__(f"messages sent but never received: {named}{more}")


class HandshakeFault(MeshFault):
    """Core groups of a node that wait for each other are at different synchronisations."""

    def __init__(self, own: int, others: list[int]) -> None:
        said = f"a core group is at synchronisation {own} of its node, others at {', '.join(map(str, others))}"
        super().__init__(f"{said}: a handshake is missing")


def _cpes(peers: tuple[tuple[int, int], ...]) -> str:
    return "any of " * (len(peers) > 1) + " ".join(f"({i},{j})" for i, j in peers)
