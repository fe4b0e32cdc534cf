# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""The envelope: one message of fixed size at the entry of each call, by which ranks that differ find that out."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .conversions import failure
from .here import Here

DETAILS = 4096  # bytes of a rank's own words, which travel only where digests differ
LONGEST = {"fault": 600, "file": 300}  # the most characters of these words; 200 for the others


def unsent() -> None:
    """Does nothing: the function to read answers with where no message was sent."""


def is_recorded(device: str) -> bool:
    """Whether a CUDA graph is being recorded: its calls begin with a message each time that it runs."""
    return device == "cuda" and torch.cuda.is_current_stream_capturing()


def code_of(*files: str) -> bytes:
    """A hash of files; one that can't be read counts as empty."""
    digest = hashlib.sha256()
    for file in files:
        try:
            content = Path(file).read_bytes()
        except OSError:
            content = b""
        digest.update(hashlib.sha256(content).digest())
    return digest.digest()


def enter(
    here: Here,
    entry: str,
    facts: Mapping[str, object] | None = None,
    *,
    instance: str = "",
    fault: Exception | None = None,
    hints: Mapping[str, str] | None = None,
) -> Callable[[], None]:
    """Begin an entry: tell the other ranks of the mesh what this one calls, and refuse what differs.

    Args:
        entry: what is called, as `forward`.
        facts: what must be alike on all ranks, by the word that a refusal has for it.
        instance: which module of several of this code.
        fault: what is wrong with this rank's own arguments; all ranks raise.
        hints: by fact, what to do where it differs.
    Returns:
        The function that reads the others' answers and raises where they differ. Without a GPU they have been read; on
        a GPU it must be called before a result of the entry is given away.
    Raises:
        RuntimeError: ranks differ; the same words on all of them.
        Exception: `fault`; on the other ranks a ValueError with its words.
    """
    layer, place = here.layer, here.place
    wrong = "" if fault is None else str(fault) or type(fault).__name__  # some errors have no words, as TimeoutError()
    if len(place.ranks) == 1 or is_recorded(layer.device):
        if fault is not None:
            raise fault
        return unsent
    meet: Any = getattr(place.transport, "meet", None)
    key = layer.identity, instance
    asks = os.environ.get("CONVGEN_AGREE") != "0"
    if meet is None or not asks:  # then ranks compare their code alone, once
        if fault is not None:
            raise fault
        if key in place.known:
            return unsent
    call = place.known[key] = place.known.get(key, 0) + 1
    said = (layer.identity, entry, instance, call, facts, wrong) if asks else (layer.identity, "off")
    mine = hashlib.sha256(repr(said).encode()).digest()
    if meet is None:
        mine, meet = layer.identity, gathers(here)
    words = f"{entry}, call {call}"
    with not_met(words, here):
        answers = meet(mine, place.ranks)

    def read() -> None:
        with not_met(words, here):
            different = len(set(answers())) > 1
        if different:
            own: dict[str, Any] = {"name": layer.name, "module": layer.identity.hex()[:8], "entry": entry}
            own |= {"file": str(Path(layer.file).absolute()), "instance": instance, "call": call}
            own |= {"checks": "on" if asks else "off (CONVGEN_AGREE=0)", "fault": wrong}
            own["facts"] = {k: ascii_of(str(v), 200) for k, v in (facts or {}).items()}
            own = {k: ascii_of(v, LONGEST.get(k, 200)) if isinstance(v, str) else v for k, v in own.items()}
            with not_met(words, here):
                texts = meet(packed_words(own), place.ranks)()
            refuse_difference(layer.name, place.ranks, [json.loads(t.decode()) for t in texts], hints or {}, fault)
        if fault is not None:
            raise fault

    if fault is None and getattr(place.transport, "defers", False):
        return read
    read()
    return unsent


def ascii_of(text: str, longest: int) -> str:
    """A text that JSON writes with at most two bytes a character."""
    return "".join(c if " " <= c <= "~" or c == "\n" else "?" for c in text[:longest])


def packed_words(own: Mapping[str, Any]) -> bytes:
    """A rank's words as a message of fixed size; facts that are too many are left out."""
    facts = dict(own.get("facts", {}))
    while len(raw := json.dumps({**own, "facts": facts}).encode()) > DETAILS:
        facts.popitem()
    return raw.ljust(DETAILS)


def refuse_difference(
    name: str,
    ranks: Sequence[int],
    said: Sequence[Mapping[str, Any]],
    hints: Mapping[str, str],
    fault: Exception | None,
) -> None:
    """Raise what ranks differ in; a rank with a fault of its own raises that later."""

    def by_value(key: str, text: Callable[[Mapping[str, Any]], str] | None = None) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, one in zip(ranks, said, strict=True):
            found.setdefault(text(one) if text else str(one.get(key)), []).append(rank)
        return dict(sorted(found.items(), key=lambda pair: pair[1]))

    def listed(found: Mapping[str, list[int]]) -> str:
        return ", ".join(f"{value} on ranks {those}" for value, those in found.items())

    modules = by_value("", lambda one: f"{one['name']} {one['module']} in {one['file']}")
    if len(by_value("", lambda one: f"{one['name']} {one['module']}")) > 1:
        found = "; ".join(f"ranks {those}: {text}" for text, those in modules.items())
        raise RuntimeError(f"{name}: the ranks of this mesh don't run the same module, nothing was computed: {found}")
    if len(found := by_value("checks")) > 1:
        raise RuntimeError(f"{name}: the ranks of this mesh check their calls or not: {listed(found)}")
    faults = {rank: one["fault"] for rank, one in zip(ranks, said, strict=True) if one["fault"]}
    if faults:
        if fault is None:
            who = "; ".join(dict.fromkeys(faults.values()))
            raise ValueError(f"{name}: ranks {sorted(faults)} refused their arguments, nothing was computed: {who}")
        return
    calls = by_value("", lambda one: f"{one['entry']}{one['instance'] and ' of ' + one['instance']}")
    calls = by_value("", lambda one: f"{one['entry']}, call {one['call']}") if len(calls) == 1 else calls
    if len(calls) > 1:
        raise RuntimeError(f"{name}: ranks are in different calls, nothing was computed: {listed(calls)}")
    facts = list(dict.fromkeys(k for one in said for k in one["facts"]))
    differ = {k: by_value("", lambda one, k=k: str(one["facts"].get(k, "nothing"))) for k in facts}
    differ = {k: found for k, found in differ.items() if len(found) > 1}
    text = "; ".join(f"{k}: {listed(found)}" for k, found in differ.items()) or "in what their words leave out"
    hint = "".join(f"; {hints[k]}" for k in differ if k in hints)
    raise RuntimeError(f"{name}: ranks differ in {said[0]['entry']}, nothing was computed: {text}{hint}")


def gathers(here: Here) -> Callable[[bytes, Sequence[int]], Callable[[], list[bytes]]]:
    """A `meet` for a transport that has none, made of its all_gather."""

    def meet(mine: bytes, ranks: Sequence[int]) -> Callable[[], list[bytes]]:
        group = here.group(tuple(here.layer.grid))
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(here.layer.device)
        got = here.place.transport.all_gather(sent, [len(mine)] * len(ranks), group)
        found = [bytes(part.tolist()) for part in got.split(len(mine))]
        return lambda: found

    return meet


@contextmanager
def not_met(what: str, here: Here) -> Generator[None]:
    """A context around the message, which no transform of torch.func sees. Errors in it say which entry the message
    begins, and which ranks did not come to it."""
    private: Any = torch._C
    apart = private._DisableFuncTorch() if private._are_functorch_transforms_active() else nullcontext()
    try:
        with apart:
            yield
    except Exception as error:
        raise failure(what, here, here.place.ranks, error) from error


def sampled(tensor: torch.Tensor) -> str:
    """A tensor's shape and type, and a hash of 64 of its elements, evenly spread, which differs where ranks hold
    different samples."""
    count, flat = tensor.numel(), tensor.detach()
    take = [i * max(count - 1, 0) // 63 for i in range(64)] if count else []
    index = torch.tensor(take, dtype=torch.int64, device=tensor.device)
    places: list[torch.Tensor] = []
    for n in reversed(tensor.shape):
        places.append(index % max(n, 1))
        index = index // max(n, 1)
    taken = flat[tuple(reversed(places))] if tensor.dim() else flat.reshape(1)
    raw = taken.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {hashlib.sha256(raw).hexdigest()[:8]}"
