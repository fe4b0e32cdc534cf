"""Values kept for the sizes of the last calls, so that any number of sizes takes bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Recent:
    """Values by their keys; those that were asked for last are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, key: Hashable, make: Callable[[], Any], most: int) -> Any:
        """The value of a key; it is made if it is not there.

        Args:
            most: how many values are kept, this one among them.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._kept[key] = make()
        while len(self._kept) > max(most, 1):
            self._kept.popitem(last=False)
        return made
