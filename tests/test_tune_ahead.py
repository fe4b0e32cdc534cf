"""Compiling ahead: a compiler that dies or hangs is one candidate's failure, and the next are compiled."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from convgen.tune import ahead
from convgen.tune.ahead import Ahead

pytestmark = pytest.mark.usefixtures("forked")


class Aborts:
    @property
    def problem(self) -> Any:
        os.abort()


class Hangs:
    @property
    def problem(self) -> Any:
        while True:
            pass


class Raises:
    @property
    def problem(self) -> Any:
        raise ValueError("of no use")


def planted(kernel: object) -> Any:
    return SimpleNamespace(source="", label=type(kernel).__name__, config=SimpleNamespace(family=""), kernel=kernel)


def test_a_compiler_that_dies_or_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "COMPILE_S", 600.0)
    aborts, hangs, raises = (planted(kernel) for kernel in (Aborts(), Hangs(), Raises()))
    compilers = Ahead(1, fill=False)
    try:
        compilers.submit([raises])
        assert compilers.result(raises).said == "ValueError: of no use"
        compilers.submit([aborts, hangs])
        assert compilers.result(aborts).said == "killed the compiler"
        monkeypatch.setattr(ahead, "COMPILE_S", 1.0)
        assert compilers.result(hangs).said == "took more than 1 s"
        monkeypatch.setattr(ahead, "COMPILE_S", 600.0)
        again = planted(Raises())
        again.label = "again"
        compilers.submit([again])
        assert compilers.result(again).said == "ValueError: of no use"
    finally:
        compilers.close()
