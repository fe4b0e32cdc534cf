"""The loop of a kernel that makes its products, read from the assembled code: instructions by class.

A loop is where a branch goes back to. What a warp issues in one pass of it is counted, and what its matrix
instructions multiply and read, which their names say: HGMMA.64x128x16 is one warp group's share of a step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COPIES = ("copy 16", "copy 8", "copy 4", "copy 2", "tensor copy")  # bytes of a thread, or by the copy engine
CLASSES = ("matrix", *COPIES, "shared", "integer", "float", "wait", "other")

_LABEL = re.compile(r"\s*(\.L[\w.$]*):")
_CODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_BACK = re.compile(r"\bBRA\b.*?`?\((\.L[\w.$]*)\)")
_GUARD = re.compile(r"^@!?U?P\w+\s+")
_GROUP = re.compile(r"(?:HGMMA|IGMMA|QGMMA|DGMMA)\.64x(\d+)x(\d+)\.\w+(?:\.(\w+))?")  # of four warps
_WARP = re.compile(r"(?:HMMA|IMMA|DMMA)\.(\d+)")  # 16816: 16 x 8 x 16, of one warp

_MATRIX = re.compile(r"[HIQD]GMMA|[HID]MMA|UTC\w*MMA")
_INTEGER = re.compile(
    r"U?(IMAD|IADD|LEA|ISETP|SEL|LOP|SHF|IABS|VIADD|VIMNMX|IMNMX|MOV|PRMT|BFE|BREV|FLO|POPC|SGXT|BMSK)|I2F|F2I|I2I"
    r"|PLOP3|UPLOP3|R2UR|P2R|R2P|S2R|S2UR|CS2R|LDC|ULDC|MUFU|VOTE|UP2UR|UR2UP|R2B|ELECT"
)
_WAIT = re.compile(
    r"BAR|DEPBAR|LDGDEPBAR|WARPSYNC|WARPGROUP|SYNCS|NANOSLEEP|ERRBAR|FENCE|MEMBAR|CCTL|ARRIVES|UTMACMDFLUSH"
)
_ALL_DONE = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b")  # of a warp group's matrix instructions
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True, slots=True)
class Loop:
    """One pass of a loop, by one warp.

    Attributes:
        counts: the number of instructions of each of the CLASSES that occur.
        products: a warp's share of the products that its matrix instructions make; 0 where their names don't say.
        matrix_bytes: a warp's share of the bytes of shared memory that they read.
        moved_bytes: bytes of shared memory that other instructions read and write, without the copy engine's.
        exposed: instructions of a warp while none of its matrix instructions is at work: behind a wait for all of them,
            up to the next one; 0 where the loop waits for earlier ones alone.
        narrowest_copy: bytes that a thread moves by the narrowest copy; 16 if only the copy engine copies, 0 without
            copies.
    """

    counts: tuple[tuple[str, int], ...]
    products: int
    matrix_bytes: int
    moved_bytes: int
    narrowest_copy: int
    exposed: int = 0

    @property
    def instructions(self) -> int:
        return sum(n for _, n in self.counts)

    @property
    def by_class(self) -> dict[str, int]:
        return dict(self.counts)


def matrix_loop(text: str) -> Loop | None:
    """The innermost loop with most matrix instructions of a kernel as nvdisasm prints it.

    Where all steps are unrolled, the loop is everything from the first copy to the last matrix instruction. None
    without matrix instructions.
    """
    code, labels = _read(text)
    places = [i for i, line in enumerate(code) if _class(line) == "matrix"]
    if not places:
        return None
    loops = [(lo, hi) for lo, hi in _loops(code, labels) if any(lo <= i <= hi for i in places)]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    copies = [i for i, line in enumerate(code) if _class(line) in COPIES]
    unrolled = min([*copies, *places]), places[-1]
    lo, hi = max(inner, key=lambda a: sum(a[0] <= i <= a[1] for i in places), default=unrolled)
    return _counted(code[lo : hi + 1])


def _read(text: str) -> tuple[list[str], dict[str, int]]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _CODE.search(line):
            code.append(found[1])
    return code, labels


def _loops(code: Sequence[str], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    """First and last instruction of each loop."""
    for i, line in enumerate(code):
        back = _BACK.search(line)
        if back and labels.get(back[1], i + 1) <= i:
            yield labels[back[1]], i


def _words(line: str) -> list[str]:
    """The name of an instruction and the words behind its dots."""
    return _GUARD.sub("", line).split()[0].split(".")


def _class(line: str) -> str:
    name, *more = _words(line)
    if _MATRIX.fullmatch(name):
        return "matrix"
    if name in ("UTMALDG", "UBLKCP"):
        return "tensor copy"
    if name in ("LDGSTS", "LDG", "LD"):
        return f"copy {max(_width(more), 2)}"
    if name in ("LDS", "LDSM", "STS", "STSM", "ATOMS"):
        return "shared"
    if _WAIT.match(name):
        return "wait"
    if _INTEGER.match(name):
        return "integer"
    return "float" if name.startswith(("F", "HADD", "HMUL", "HFMA")) else "other"


def _width(words: Sequence[str]) -> int:
    """How many bytes a thread's access has."""
    return next((_WIDTHS[w] for w in words if w in _WIDTHS), 4)


def _counted(body: Sequence[str]) -> Loop:
    counts: Counter[str] = Counter(_class(line) for line in body)
    products = read = moved = 0
    for line in body:
        made, taken = _matrix(line)
        products, read = products + made, read + taken
        moved += _moved(line)
    widths = [int(name.split()[1]) for name in counts if name.startswith("copy")] + [16] * ("tensor copy" in counts)
    ordered = tuple((name, counts[name]) for name in CLASSES if counts[name])
    return Loop(ordered, products, read, moved, min(widths, default=0), _exposed(body))


def _exposed(body: Sequence[str]) -> int:
    """How many instructions of a pass stand behind a wait that leaves no matrix instruction at work, up to the next
    one."""
    at_work, found = True, 0
    for once_more, line in ((n, line) for n in range(2) for line in body):  # a pass starts as one ends
        if _ALL_DONE.search(line):
            at_work = False
        elif _class(line) == "matrix":
            at_work = True
        elif once_more and not at_work:
            found += 1
    return found


def _matrix(line: str) -> tuple[int, int]:
    """Products of a matrix instruction, and bytes of shared memory that it reads, a warp's share of both."""
    if group := _GROUP.search(line):
        columns, depth = int(group[1]), int(group[2])
        size = {"BF16": 2, "F16": 2, "TF32": 4}.get(group[3] or "", 2)
        of_registers = re.match(r"\S+ R\w+, R\w+", _GUARD.sub("", line))  # its first operand lies there
        rows = 0 if of_registers else 64
        return 16 * columns * depth, (rows + columns) * depth * size // 4
    if warp := _WARP.search(line):
        digits = warp[1]  # 16816, 1688, 884
        sides = (16, 8, int(digits[3:])) if digits.startswith("168") else (8, 8, 4)
        return sides[0] * sides[1] * sides[2], 0
    return 0, 0


def _moved(line: str) -> int:
    """How many bytes of shared memory a warp reads or writes by an instruction."""
    if line.startswith("@!PT"):  # never executed
        return 0
    name, *more = _words(line)
    if name in ("LDSM", "STSM"):
        digits = [w for w in more if w in ("1", "2", "4")]
        return 128 * int(digits[-1] if digits else "1")
    if name in ("LDS", "STS", "LDGSTS"):
        return 32 * _width(more)
    return 0
