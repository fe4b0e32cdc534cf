"""The two families of errors: the input is wrong (yours, with a way out), or convgen is (ours). And warnings.

An inner function states the fact by raising `InputError(fact, ...)`; the boundary that knows the file
adds where it stands. Printed:

    error: role C on axis 'chan' needs at most one group a rank
      layer   mixer: conv2d C=32 groups=8                            (mixer.yaml:4)
      axis    chan: 2 ranks, so 4 groups a rank                      (mixer.yaml:11)
      try     role G on chan (no communication), or chan: 8
"""

from __future__ import annotations

from dataclasses import dataclass, field

EXTRAS = {  # by package, the extra of convgen's that installs it
    "torch": "torch", "triton": "triton", "matplotlib": "plot", "filelock": "tune", "h5py": "data", "zarr": "data",
    "netCDF4": "data", "nibabel": "data", "tifffile": "data", "safetensors": "data", "fsspec": "data",
}  # fmt: skip


def installing(package: str, extra: str = "") -> str:
    """How to install a package. convgen is on no index, so its extras are installed from a checkout."""
    return f"pip install {package}, or pip install '.[{extra or EXTRAS[package]}]' in a checkout of convgen"


@dataclass(frozen=True, slots=True)
class Note:
    """One line below an error: a label, a fact, and the key path of the file that the fact is about."""

    label: str
    text: str
    path: tuple[str | int, ...] = ()


class ConvgenError(Exception):
    """Base of every error that convgen raises on purpose."""


@dataclass(eq=False)
class InputError(ConvgenError):
    """The user's input can't work. Exit code 2.

    Args:
        fact: one sentence, what is wrong, with the numbers.
        path: key path in the layer file that the fact is about, e.g. `("grid", "chan")`.
        notes: further lines (layer, axis, ...).
        hint: what would work.
        where: `file:line`, filled in by the boundary that knows the file.
    """

    fact: str
    path: tuple[str | int, ...] = ()
    notes: tuple[Note, ...] = ()
    hint: str = ""
    where: str = ""
    located: dict[tuple[str | int, ...], str] = field(default_factory=dict[tuple[str | int, ...], str])

    def __post_init__(self) -> None:
        super().__init__(self.fact)

    def __str__(self) -> str:
        lines = [f"error: {self.fact}" + (f"  ({self.where})" if self.where else "")]
        for note in self.notes:
            text = f"  {note.label:<7} {note.text}"
            where = self.located.get(note.path, "") if note.path else ""
            lines.append(f"{text:<72} ({where})" if where else text)
        if self.hint:
            lines.append(f"  {'try':<7} {self.hint}")
        return "\n".join(lines)


class IdleAxisWarning(UserWarning):
    """An axis of a grid splits nothing: ranks that differ in it alone compute the same."""


class CacheWarning(UserWarning):
    """The cache holds something else than was written there, which is made again; or the cache can't be written."""


class InternalError(ConvgenError):
    """convgen broke a rule of its own. Exit code 3; the message says how to report it."""
