"""YAML 1.2 to plain data with lines; everything that could surprise is refused with its line."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from convgen.errors import InputError
from convgen.spec.yaml import parse_yaml, read_yaml


def refusal(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "f.yaml")
    assert caught.value.hint
    return caught.value


def test_scalars_follow_the_core_schema() -> None:
    text = (
        "a: 12\nb: -0x1F\nc: 0o17\nd: 1e3\ne: .5\nf: yes\ng: True\nh: ~\ni:\nj: '1'\nk: 012\nl: on\nm: 1_000\n"
        "n: -.inf\no: +7\np: 0b1\nq: 0x1F\nr: 1:30\ns: 2020-01-01\n"
    )
    values = parse_yaml(text).data
    assert values == {
        "a": 12, "b": "-0x1F", "c": 15, "d": 1000.0, "e": 0.5, "f": "yes", "g": True, "h": None, "i": None,
        "j": "1", "k": 12, "l": "on", "m": "1_000", "n": -math.inf, "o": 7, "p": "0b1", "q": 31, "r": "1:30",
        "s": "2020-01-01",
    }  # fmt: skip
    assert [type(v) for v in values.values()].count(bool) == 1
    nan = parse_yaml("a: .nan").data["a"]
    assert isinstance(nan, float) and math.isnan(nan)


def test_escaped_surrogate_pairs_are_one_character() -> None:
    assert parse_yaml(r'{"a": "\ud835\udd38", "\u00e9": 1}').data == {"a": "𝔸", "é": 1}


def test_letters_of_the_papers_stay_text() -> None:
    assert parse_yaml("N: 1\ny: [N, n, Y, off]").data == {"N": 1, "y": ["N", "n", "Y", "off"]}


def test_lines_of_key_paths() -> None:
    source = parse_yaml("# comment\na: 1\nb:\n  c:\n    - 2\n    - {d: 3,\n       e: 4}\n", "f.yaml").source
    assert source.lines == {
        (): 2, ("a",): 2, ("b",): 3, ("b", "c"): 4, ("b", "c", 0): 5, ("b", "c", 1): 6, ("b", "c", 1, "d"): 6,
        ("b", "c", 1, "e"): 7,
    }  # fmt: skip
    assert source.where(("b", "c", 1, "missing", 7)) == "f.yaml:6"
    assert source.where(()) == "f.yaml:2"


def test_aliases_are_copies() -> None:
    data = parse_yaml("a: &x [1, &y {k: 2}]\nb: *x\nc: *y\n").data
    assert data == {"a": [1, {"k": 2}], "b": [1, {"k": 2}], "c": {"k": 2}}
    assert data["a"] is not data["b"]


def test_core_tags_that_say_what_is_so_are_read() -> None:
    assert parse_yaml("a: !!str 3\nb: !!int 4\nc: !!seq [1]\nd: !!map {}\n").data == {
        "a": "3", "b": 4, "c": [1], "d": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fact", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' stands twice, first on line 1", 3),
        ("a: {b: 1,\n b: 2}", "key 'b' stands twice, first on line 1", 2),
        ("a: 1\nb: &x [1, *x]\n", "alias '*x' stands inside its own anchor", 2),
        ("a: 1\nb: *x\n", "names no anchor above it", 2),
        ("a: 1\n---\nb: 1\n", "a second YAML document begins", 2),
        ("a: 1\n...\n---\n", "a second YAML document begins", 3),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", "python/object/apply:os.system' is not allowed", 2),
        ("a: !foo 1\n", "tag '!foo' is not allowed", 1),
        ("a: ! 1\n", "tag '!' is not allowed", 1),
        ("a: !!int 'x'\n", "tag '!!int' on text", 1),
        ("a: !!binary aGk=\n", "tag '!!binary' is not allowed", 1),
        ("a: !!set {b}\n", "tag '!!set' is not allowed", 1),
        ("# nothing\n- 1\n", "the file holds a list, not a mapping", 2),
        ("a\n", "the file holds text, not a mapping", 1),
        ("3\n", "the file holds an integer, not a mapping", 1),
        ("", "the file is empty", 1),
        ("\n# only a comment\n", "the file is empty", 1),
        ("---\n", "the file is empty", 1),
        ("a: 1\n2: b\n", "key 2 is an integer, not a name", 2),
        ("a: 1\ntrue: b\n", "key true is a truth value, not a name", 2),
        ("a: 1\nnull: b\n", "key null is null, not a name", 2),
        ("a: 1\n[b]: c\n", "a list can't be a key", 2),
        ("? {a: 1}\n: c\n", "a mapping can't be a key", 1),
        ("a:\n  " + "[" * 40 + "]" * 40, "nested more than 32 deep", 2),
        ("%YAML 1.1\n---\na: 1\n", "this is YAML 1.1, convgen reads YAML 1.2", 2),
        ("a: 1\nb: [1, 2\n", "not YAML", 2),
        ("a: 1\nb: c: d\n", "not YAML: mapping values are not allowed here", 2),
        ("a: 1\n\tb: 2\n", "not YAML", 2),
        ("a: 'x\n", "not YAML", 1),
        ('a: 1\nb: "\\UFFFFFFFF"\n', "not YAML", 1),
        ('a: 1\nb: "\\ud800"\n', "half a surrogate pair", 2),
        ("a: 1\nb: 99999999999999999999\n", "doesn't fit in 64 bits", 2),
        ("b: 0x" + "f" * 5000, "doesn't fit in 64 bits", 1),
        ("b: " + "9" * 5000, "doesn't fit in 64 bits", 1),
    ],
)
def test_refusals(text: str, fact: str, line: int) -> None:
    error = refusal(text)
    assert fact in error.fact
    assert error.where == f"f.yaml:{line}"


def test_aliases_that_multiply_are_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "aliases written out" in refusal("\n".join(lines)).fact


@pytest.mark.parametrize(
    ("raw", "fact", "line"),
    [
        (b"a: 1\nb: \xff\n", "not UTF-8 text: byte 0xff at offset 8", 2),
        (b"\xef\xbb\xbfa: 1\nb: \xff\n", "not UTF-8 text: byte 0xff at offset 11", 2),
        (b"a: 1\nb: \x00\n", "control character U+0000", 2),
        (b"\x7fELF", "control character U+007F", 1),
        ("a: 1\n".encode("utf-16"), "not UTF-8 text", 1),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, raw: bytes, fact: str, line: int) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_yaml(path)
    assert fact in caught.value.fact
    assert caught.value.where == f"{path}:{line}"


def test_byte_order_mark_and_dos_lines(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: [2,\r\n 3]\r\n")
    document = read_yaml(path)
    assert document.data == {"a": 1, "b": [2, 3]}
    assert document.source.lines["b", 1] == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null")):
        with pytest.raises(InputError) as caught:
            read_yaml(path)
        assert reason in caught.value.fact and caught.value.where == str(path)
    big = tmp_path / "big.yaml"
    big.write_text("a: 1\n" * 200_000)
    with pytest.raises(InputError, match="larger than 524288 bytes"):
        read_yaml(big)


def test_importing_the_reader_loads_no_numpy() -> None:
    code = "import sys, convgen.spec.yaml; print('numpy' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())
    assert out.stdout.split() == ["False", "False"]


def _env() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
