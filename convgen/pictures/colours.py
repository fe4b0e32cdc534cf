"""A colour for each rank, told apart by colour-blind eyes too.

Source: Paul Tol's "light" scheme for labelled areas (personal.sron.nl/~pault), without its grey.
"""

from __future__ import annotations

_HUES = ("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#99ddff", "#bbcc33", "#aaaa00")
_LEVELS = 8


def _mixed(colour: str, white: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * white):02x}" for p in parts)


def rank_colour(rank: int, ranks: int) -> str:
    """A rank's colour: neighbouring ranks differ in hue, ranks 8 apart in lightness; after 64 ranks colours repeat."""
    levels = min(_LEVELS, -(-ranks // len(_HUES)))
    level = rank // len(_HUES) % levels
    return _mixed(_HUES[rank % len(_HUES)], 0.62 * level / max(levels - 1, 1))


def faded(colour: str) -> str:
    """The same colour for what stands in the background."""
    return _mixed(colour, 0.72)
