# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Arrays of files, which every process opens for itself: ranks, and the workers that are forked of them."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from convgen.data.chunks import Where
from convgen.data.formats import FORMATS, Asked, Held, format_of
from convgen.errors import InputError
from convgen.late import np, torch

MOST_OPEN = 64  # files of a process: samples may be a file each, and systems let a process have 1024


def open(
    path: str | os.PathLike[str],
    name: str | None = None,
    mode: str = "r",
    *,
    dims: Sequence[int | None] | None = None,
    missing: str = "raise",
    format: str | None = None,
) -> FileArray:
    """An array of a file, to be read and written by region. The file is opened when something is asked of it, so that
    a rank that can't open it fails where all ranks are told: in `Blocks`, and in `write`.

    Args:
        path: of a file of numpy (.npy), torch (.pt), safetensors, HDF5, Zarr, NetCDF, NIfTI or TIFF; of HDF5, Zarr and
            TIFF also a URL that fsspec knows.
        name: of the array, where the file has several; of TIFF the series' number.
        mode: "r" reads, "r+" writes too (.npy, HDF5, Zarr, NetCDF).
        dims: for each dimension of the array which one of the file it is, as of torch's `permute`; None is a new one of
            extent 1. A NIfTI volume, whose dimensions are X, Y and Z, is [1, Z, Y, X] by `(None, 2, 1, 0)`.
        missing: what a chunk is that the file lacks, of Zarr, HDF5 and TIFF: "raise", or "fill", with their fill value
            (of NetCDF: elements that have it, which are masked otherwise); "raise" asks the file for each chunk first.
        format: the format's name, where the suffix doesn't say it.

    Raises:
        InputError: no such format, mode or way; when it is opened: no such file or array, what can't be read of it, or
            a library is not installed.
    """
    return FileArray(os.fspath(path), name, mode, dims, missing, format)


class FileArray:
    """What `open` gives; `str` of it says the file and the array. Slices are tuples of slices without a step.

    Attributes:
        one_writer: whether ranks have to write one after the other, whatever its chunks are.
    """

    _held: Held | None = None

    def __init__(
        self, path: str, name: str | None, mode: str, dims: Sequence[int | None] | None, missing: str,
        format: str | None,
    ) -> None:  # fmt: skip
        self._format = FORMATS[format_of(path, format)]
        self._asked = Asked(path, name, mode, missing == "fill")
        self._dims = None if dims is None else tuple(dims)
        self._stamp: Any = None
        self._seen: Any = None
        if missing not in ("raise", "fill"):
            raise InputError(f"missing={missing!r}", hint="'raise', or 'fill'")
        writes = ("r", "r+") if self._format.writes and not self._asked.is_url else ("r",)
        if mode not in writes:
            raise InputError(f"{self}: mode {mode!r}", hint=" or ".join(writes))
        if self._asked.is_url and not self._format.urls:
            urls = ", ".join(n for n, one in FORMATS.items() if one.urls)
            raise InputError(f"{self}: behind a URL files are read of {urls}", hint="a copy of it")
        self.one_writer = mode == "r+" and self._format.one_writer

    def __str__(self) -> str:
        return self._asked.path + (f"::{self._asked.name}" if self._asked.name is not None else "")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None}

    def __del__(self) -> None:
        if self._held is not None:  # perhaps in a thread of a library's, for which another waits that has the lock
            _LEFT.append(self._held)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._dimmed(self._facts()[0], 1)

    @property
    def dtype(self) -> Any:
        """As the file has it; of scaled numbers (NetCDF, NIfTI) those that are kept, not those that are read."""
        return self._facts()[1]

    @property
    def scales(self) -> bool:
        """Whether what is written becomes other numbers in the file's type, by a scale and an offset."""
        return self._facts()[4]

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """Extents of what is read at once."""
        return self._dimmed(self._facts()[2], 1)

    @property
    def shards(self) -> tuple[int, ...] | None:
        """Extents of what is written at once, where those are not the chunks'."""
        return self._dimmed(self._facts()[3], 1)

    def __getitem__(self, where: Any) -> Any:
        where = self._slices(where)
        with self._used("r") as held:
            shape, kind = tuple(held.array.shape), held.array.dtype
            there = self._in_file(where, shape)
            extents = tuple(s.stop - s.start for s in there)
            if not all(extents):
                full = torch.empty(extents, dtype=kind) if isinstance(kind, torch.dtype) else np.empty(extents, kind)
            else:
                lost = None if self._asked.fill else next(held.absent(there), None)
                if lost is not None:
                    raise _Fact(
                        f"chunk {lost} is not there, and would be read as the array's fill value; missing='fill' takes "
                        "it so, of a file whose writer leaves out what has that value alone"
                    )
                full = held.array[there]
            return self._as_dims(full, where)

    def __setitem__(self, where: Any, part: Any) -> None:
        where = self._slices(where)
        with self._used("r+") as held:
            there = self._in_file(where, tuple(held.array.shape))
            if all(s.stop > s.start for s in there):
                held.array[there] = self._of_dims(part)
                getattr(held.array, "flush", lambda: None)()

    def close(self) -> None:
        """What is open; it is opened again when something is asked."""
        with _LOCK:
            held, self._held = self._held, None
            if held is not None:
                _OPEN.pop(self, None)
                held.close()

    @contextmanager
    def _used(self, mode: str) -> Generator[Held]:
        """The file, open; what is raised meanwhile says which one it is."""
        with _LOCK:
            try:
                _close_left()
                if self._held is not None and self._stamp != self._stamped(self._held):
                    self.close()
                held = self._held or self._open(mode if self.one_writer else self._asked.mode)
                self._held = held
                _OPEN.pop(self, None)
                _OPEN[self] = None  # the last one is the last one used
                while len(_OPEN) > MOST_OPEN and (oldest := next(iter(_OPEN))) is not self:
                    oldest.close()
                yield held
            except InputError:
                raise
            except Exception as error:
                said = str(error) if isinstance(error, _Fact) else f"{type(error).__name__}: {error}"
                raise OSError(f"{self}: {said}") from error
            finally:
                if self.one_writer:
                    self.close()

    def _open(self, mode: str) -> Held:
        """Raises InputError: it can't be opened. _Fact: it is no more what it was."""
        asked = Asked(self._asked.path, self._asked.name, mode, self._asked.fill)
        try:
            held = self._format.opens(asked)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{self} can't be opened: {type(error).__name__}: {error}") from error
        if not hasattr(held.array, "shape"):
            held.close()
            raise InputError(f"{self} has a {type(held.array).__name__}, which is no array", hint="a file of one array")
        facts = tuple(held.array.shape), held.array.dtype, held.chunks, held.shards, held.scales
        if self._seen is None:
            dims = self._dims
            if dims is not None and sorted(d for d in dims if d is not None) != [*range(len(facts[0]))]:
                held.close()
                raise InputError(f"{self} has shape {facts[0]}, and dims={dims}", hint="each dimension once")
            self._seen = facts
        elif facts[:2] != self._seen[:2]:
            held.close()
            was, now = (f"{shape} of {kind}" for shape, kind, *_ in (self._seen, facts))
            raise _Fact(f"it is {now}, and was {was} when it was first opened")
        self._stamp = self._stamped(held)
        return held

    def _stamped(self, held: Held) -> Any:
        """What changes with the file, of which a mapped part may then be none: a process would end there."""
        if self._asked.is_url:
            return None
        found = os.stat(held.watched or self._asked.path)
        return found.st_ino, found.st_size, found.st_mtime_ns if self._asked.mode == "r" else 0

    def _facts(self) -> Any:
        if self._seen is None:
            with self._used("r"):
                pass
        return self._seen

    def _dimmed(self, extents: Any, new: Any) -> Any:
        """The file's extents as the array's."""
        if extents is None or self._dims is None:
            return extents
        return tuple(new if d is None else extents[d] for d in self._dims)

    def _slices(self, where: Any) -> Where:
        given = where if isinstance(where, tuple) else (where,)
        shape = self.shape
        if len(given) > len(shape) or not all(isinstance(s, slice) and s.step in (None, 1) for s in given):
            raise TypeError(f"{self} has slices for its {len(shape)} dimensions, got {where}")
        found = [slice(*s.indices(n)[:2]) for s, n in zip(given, shape, strict=False)]
        return (*[slice(s.start, max(s.start, s.stop)) for s in found], *[slice(0, n) for n in shape[len(given) :]])

    def _in_file(self, where: Where, shape: tuple[int, ...]) -> Where:
        if self._dims is None:
            return where
        return tuple(where[self._dims.index(d)] for d in range(len(shape)))

    def _as_dims(self, part: Any, where: Where) -> Any:
        if self._dims is None:
            return part
        kept = [d for d in self._dims if d is not None]
        part = part.permute(kept) if isinstance(part, torch.Tensor) else part.transpose(kept)
        part = part[tuple(None if d is None else slice(None) for d in self._dims)]
        return part[tuple(s if d is None else slice(None) for s, d in zip(where, self._dims, strict=True))]

    def _of_dims(self, part: Any) -> Any:
        if self._dims is None:
            return part
        kept = [d for d in self._dims if d is not None]
        part = part[tuple(0 if d is None else slice(None) for d in self._dims)]
        return part.transpose([kept.index(d) for d in range(len(kept))])


class _Fact(Exception):
    """What is the case with a file; the file is said where it is used."""


# A library's state is not the child's where a process is forked in the middle of a read, nor is an open file's place:
# nothing is read meanwhile, and both open their files again.
_LOCK = threading.RLock()
_OPEN: weakref.WeakKeyDictionary[FileArray, None] = weakref.WeakKeyDictionary()
_LEFT: deque[Held] = deque()  # of arrays that are no more


def _close_left() -> None:
    while _LEFT:
        _LEFT.popleft().close()


def _before_fork() -> None:
    _LOCK.acquire()
    _close_left()
    for one in list(_OPEN):
        one.close()


os.register_at_fork(before=_before_fork, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
