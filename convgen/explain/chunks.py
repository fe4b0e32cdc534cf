"""Chunks of a file beside the blocks of ranks, as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from convgen.data.chunks import Straddling, Where
from convgen.explain.words import bytes_text, plural
from convgen.spec.text import aligned

MOST = 8  # how many chunks' numbers a line names


def chunks_json(title: str, found: Straddling) -> dict[str, Any]:
    """A record for each rank, with the fields of `Share`; a region is pairs."""
    whole = asdict(found) | {"title": title, "straddling": found.count}
    shares = [asdict(one) | {"region": [[s.start, s.stop] for s in one.region]} for one in found.shares]
    return whole | {"shares": shares}


def chunks_text(title: str, found: Straddling) -> str:
    """The text: a line for each region with the ranks that read it, and which chunks straddle."""
    ranks: dict[str, list[int]] = {}
    for rank, share in enumerate(found.shares):
        ranks.setdefault(_region(share.region), []).append(rank)
    table = [("ranks", "region", "chunks", "its bytes", "bytes read")]
    for region, those in ranks.items():
        share = found.shares[those[0]]
        chunks = f"{share.chunks}" if found.chunks else "none"
        read = (bytes_text(share.region_bytes), bytes_text(share.chunk_bytes))
        table.append((_numbers(those), region, chunks, *read))
    return "\n".join([title, *aligned(table, right=(2, 3, 4), indent="  "), *_lines(found)])


def _lines(found: Straddling) -> Iterator[str]:
    own, read = (sum(getattr(s, k) for s in found.shares) for k in ("region_bytes", "chunk_bytes"))
    more = f", {read / own:.3g} times what the regions have" if own and read != own else ""
    yield f"read by all ranks: {bytes_text(read)}{more}"
    if found.chunks is None:
        yield "the array has no chunks: what is read is what the regions have"
        return
    if not found.count:
        yield f"none of {plural(found.total, 'chunk')} straddles: blocks end where chunks do"
        return
    yield f"{found.count} of {plural(found.total, 'chunk')} straddle:"
    for d, (numbers, extent) in enumerate(zip(found.numbers, found.chunks, strict=True)):
        if numbers:
            yield f"  along dimension {d} blocks end inside of chunks {_numbers(numbers)}, of {extent} each"
    yield f"  chunks of {list(found.serving)} serve, and of what divides these: they end where blocks do"


def _numbers(of: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, of[:MOST])) + f" and {len(of) - MOST} more" * (len(of) > MOST)


def _region(region: Where) -> str:
    if any(s.stop <= s.start for s in region):
        return "nothing"
    return f"[{', '.join(f'{s.start}:{s.stop}' for s in region)}]"
