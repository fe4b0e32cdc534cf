"""Packages that are kept between runs: CACHE/networks/NAME_KEY, trusted only as what was written there.

A package is code, and whoever may write to its folder may run code of theirs. So it is used only where the folder and
each file belong to this user (or root) and nobody else may write them, and where each file, with no other beside, has
the hash in the folder's manifest. Files are read once: what was hashed is what runs. Anything else is made again.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from convgen import __version__
from convgen.errors import CacheWarning
from convgen.files import said
from convgen.knobs import cache_folder
from convgen.resources import PACKAGE, data_file

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
FORMAT = 1
TRIES = 8  # times that another process may put something else there meanwhile
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # errors of renaming a folder to a name that is taken


@cache
def own_hash() -> str:
    """The hash of all that convgen generates packages from: its code, and its templates."""
    digest = hashlib.sha256(__version__.encode())
    for root, ending in ((PACKAGE, "*.py"), (data_file("templates"), "*")):
        for path in sorted(root.rglob(ending)):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def key_of(said: object, tensors: Mapping[str, Tensor]) -> str:
    """The key of a package: a hash of convgen's own code, of what the package was compiled from, and of values in it.

    Args:
        said: an object whose repr has all that the package depends on (graph, grid, algorithm).
    """
    digest = hashlib.sha256(f"{own_hash()}\0{said!r}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(_raw(tensor))
    return digest.hexdigest()[:20]


def _raw(tensor: Tensor) -> bytes:
    import torch

    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def cached(name: str, key: str, kind: str = "networks") -> Path:
    """The folder where something is kept: CACHE/KIND/NAME_KEY."""
    return cache_folder() / kind / f"{name}_{key}"


# ---- Reading ----


class _UnsoundError(Exception):
    """A folder is not what was written; the text says why."""


def kept(folder: Path) -> dict[str, bytes] | None:
    """The files of a folder by name, as `keep` wrote them; None where the folder is not there.

    Warns (CacheWarning) where something else is there, with what differs from what was written.
    """
    try:
        return _read(folder)
    except _UnsoundError as error:
        text = f"{said(folder)} is not used, and made again: {error}"
        warnings.warn(text, CacheWarning, stacklevel=2)
        return None


def _read(folder: Path) -> dict[str, bytes] | None:
    """The files of a folder; raises _UnsoundError."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _UnsoundError(f"it is no folder that can be read ({error.strerror})") from None
    try:
        _check_owner(os.fstat(handle), "it")
        found = {name: _bytes_of(name, handle) for name in sorted(os.listdir(handle))}
    except OSError as error:
        raise _UnsoundError(f"it can't be read ({error.strerror})") from None
    finally:
        os.close(handle)
    text = found.pop(MANIFEST, None)
    if text is None:
        raise _UnsoundError(f"it has no {MANIFEST}")
    if text != _manifest(folder.name, found):
        raise _UnsoundError(_difference(text, folder.name, found))
    return found


def _bytes_of(name: str, folder: int) -> bytes:
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise _UnsoundError(f"{name} is in it, which is no file")
        _check_owner(facts, name)
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _check_owner(facts: os.stat_result, what: str) -> None:
    if facts.st_uid not in (os.geteuid(), 0):
        raise _UnsoundError(f"{what} belongs to user {facts.st_uid}, not to {os.geteuid()}")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _UnsoundError(f"others may write {what} (mode {stat.S_IMODE(facts.st_mode):o})")


def _manifest(name: str, files: Mapping[str, bytes]) -> bytes:
    hashes = {n: hashlib.sha256(files[n]).hexdigest() for n in sorted(files)}
    return (json.dumps({"format": FORMAT, "name": name, "files": hashes}, indent=1) + "\n").encode()


def _difference(text: bytes, name: str, files: Mapping[str, bytes]) -> str:
    """The first difference from the manifest, as a sentence."""
    try:
        hashes: dict[str, str] = dict(json.loads(text)["files"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"{MANIFEST} is damaged"
    for one in sorted({*hashes, *files}):
        if one not in files:
            return f"{one} is missing"
        if one not in hashes:
            return f"{one} is in it, which convgen did not write"
        if hashlib.sha256(files[one]).hexdigest() != hashes[one]:
            return f"{one} is another than was written"
    return f"its {MANIFEST} is not that of {name}, or of another format"


# ---- Writing ----


def keep(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Put files into the cache in place of what is there. Ranks and processes may do so at once: all write the same.

    Returns:
        Where they are: the folder; or, where that can't be written (CacheWarning says why), one gone with this process.
    """
    why = put(folder, files)
    if not why:
        return folder
    text = f"cannot keep {said(folder)}: {why}; CONVGEN_CACHE=DIR with a folder of your own keeps it for the next run"
    warnings.warn(text, CacheWarning, stacklevel=2)
    own = _private() / folder.name
    _put(own, files)
    return own


def put(folder: Path, files: Mapping[str, bytes]) -> str:
    """Put files into the cache as `keep` does; gives the reason where that can't be, else ""."""
    try:
        _put(folder, files)
        return "" if _read(folder) == files else "it has something else by now"
    except OSError as error:
        return error.strerror or str(error)
    except _UnsoundError as error:
        return str(error)


def _put(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent, ignore_cleanup_errors=True) as work:
        new = Path(work) / "new"
        new.mkdir(mode=0o700)
        for name, data in {**files, MANIFEST: _manifest(folder.name, files)}.items():
            handle = os.open(new / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "wb") as file:
                file.write(data)
        for k in range(TRIES):
            try:
                new.rename(folder)
                return
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
            with suppress(_UnsoundError):
                if _read(folder) == files:
                    return  # another process was first
            with suppress(FileNotFoundError):  # another process has moved it away
                folder.rename(Path(work) / f"old{k}")
        raise OSError(errno.EBUSY, "others write there at the same time")


@cache
def _private() -> Path:
    """A folder of this process alone, removed at its end."""
    made, owner = Path(tempfile.mkdtemp(prefix="convgen-packages-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a forked one
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made
