"""What a run did: messages, vector instructions, DMA by block size. Sums over the 64 CPEs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from convgen.sw26010.machine.faults import AccountFault


@dataclass(slots=True, kw_only=True)
class Counts:
    """Events of a run on the mesh.

    `putr` and `putc` count broadcasts on the row and column buses; 7 CPEs receive each, as `getr` and `getc`. `vmad`
    counts multiply-adds of 4 lanes (8 flops), `convert` conversions of 4 lanes between float and double, `shuffle`
    instructions of 4x4 transpositions. `functions` counts elements of which the quotient, root, power, exponential or
    logarithm is computed. `get` and `put` have bytes by block size in bytes; a block is what lies together in memory.
    `cycles` are those of one CPE's instructions, without waiting. `loops` and `loop_bytes` count loops of the
    management core, and the bytes of the tensors that they go over. `handshakes` are with core groups of the node.
    `sends` and `sent_bytes` count messages to other nodes.
    """

    putr: int = 0
    putc: int = 0
    getr: int = 0
    getc: int = 0
    vmad: int = 0
    vadd: int = 0
    vmax: int = 0
    convert: int = 0
    shuffle: int = 0
    functions: int = 0
    get_ops: int = 0
    put_ops: int = 0
    get: dict[int, int] = field(default_factory=dict[int, int])
    put: dict[int, int] = field(default_factory=dict[int, int])
    cycles: int = 0
    loops: int = 0
    loop_bytes: int = 0
    handshakes: int = 0
    sends: int = 0
    sent_bytes: int = 0

    @property
    def messages(self) -> int:
        return self.putr + self.putc

    @property
    def issued_flops(self) -> int:
        """Flops of the multiply-adds, those on padding included."""
        return 8 * self.vmad

    @property
    def get_bytes(self) -> int:
        return sum(self.get.values())

    @property
    def put_bytes(self) -> int:
        return sum(self.put.values())

    @property
    def dma_bytes(self) -> int:
        return self.get_bytes + self.put_bytes

    def add_get(self, block_bytes: int, total_bytes: int, ops: int = 1) -> None:
        if total_bytes:
            self.get[block_bytes] = self.get.get(block_bytes, 0) + total_bytes
        self.get_ops += ops

    def add_put(self, block_bytes: int, total_bytes: int, ops: int = 1) -> None:
        if total_bytes:
            self.put[block_bytes] = self.put.get(block_bytes, 0) + total_bytes
        self.put_ops += ops

    def add(self, other: Counts, times: int = 1) -> None:
        """Add `other`, that many times over."""
        for item in fields(self):
            if item.name not in ("get", "put"):
                setattr(self, item.name, getattr(self, item.name) + times * getattr(other, item.name))
        for mine, theirs in ((self.get, other.get), (self.put, other.put)):
            for block, size in theirs.items():
                mine[block] = mine.get(block, 0) + times * size


def check_account(what: str, counts: Counts, expected: Counts) -> None:
    """Raises AccountFault: a run's events are not those of its closed form; it names them, with both numbers."""
    if counts == expected:
        return
    pairs = ((item.name, getattr(counts, item.name), getattr(expected, item.name)) for item in fields(counts))
    said = [f"{name} {found}, by closed form {wanted}" for name, found, wanted in pairs if found != wanted]
    raise AccountFault(f"{what}: the run counts " + "; ".join(said))


def total(parts: Iterable[Counts]) -> Counts:
    """The sum of the parts' events."""
    everything = Counts()
    for part in parts:
        everything.add(part)
    return everything
