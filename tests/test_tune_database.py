"""The tuner's memory: keys, files, trials; several writers; what is broken or foreign is refused and left alone."""

from __future__ import annotations

import json
import multiprocessing
import random
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import PHASES, random_problem

from convgen.errors import InputError
from convgen.kernels.config import Config, parse_config
from convgen.tune.database import Ceilings, Database, Entry, read_database, update
from convgen.tune.device import Device, this_cpu
from convgen.tune.key import key_of, problem_of
from convgen.tune.trials import Trial, append, read_trials

DEVICE = Device("Some CPU, 2 threads", "cpu", 2)
CEILING = '{"flops_per_s": {"float32": 1.0}, "bytes_per_s": 1.0, "floor_us": 1.0}'


def entry(**given: Any) -> Entry:
    values = {
        "kernel": "arranged last=1 C=1 F=16 samples=0 cut=1", "ms": 0.5, "p20": 0.4, "p80": 0.6, "aten_ms": 0.7,
        "ratio": 1.4, "share": 0.5, "bound": "compute", "error": 1e-7, "tried": 3, "of": 30, "effort": "full",
        "versions": {"torch": "2.13.0"}, "source": "0123456789ab",
    }  # fmt: skip
    return Entry(**(values | given))


def key(n: int) -> str:
    return f"float32 contiguous forward N{n} C3 F4 W:5>5 k1 s1 d1 b0"


def test_keys_are_problems_and_back() -> None:
    rng = random.Random(3)
    seen = set[str]()
    for i in range(300):
        p = random_problem(rng, PHASES[i % 3], dtype=rng.choice(("float32", "bfloat16")), rim=rng.choice((None, 0, 3)))
        assert problem_of(key_of(p)) == p
        seen.add(key_of(p))
    assert len(seen) > 290


@pytest.mark.parametrize("text", ["", "float32", key(1)[:-1], key(1) + " ", key(1).replace("N1", "N-1"), "x" + key(1)])
def test_other_texts_are_no_keys(text: str) -> None:
    with pytest.raises(InputError, match="no local problem"):
        problem_of(text)


def test_configurations_are_texts_and_back() -> None:
    for text in (
        "aten",
        "box TN=1 TH=8 TW=16 BF=64 BC=32 warps=8 stages=3",
        "pointer BF=64 BC=32 BP=64 warps=4 stages=3 split=7",
    ):
        assert str(parse_config(text)) == text
    assert parse_config("aten") == Config("aten", warps=0, stages=0)
    with pytest.raises(InputError, match="no kernel"):
        parse_config("pointer BP=64 BP=32")


def test_a_file_has_a_line_an_entry_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    for n in random.Random(0).sample(range(40), 40):
        update(path, DEVICE, {key(n): entry(tried=n + 1)})
    made = read_database(path)
    assert made is not None and made.entries == {key(n): entry(tried=n + 1) for n in range(40)}
    lines = [line for line in path.read_text().splitlines() if line.startswith("  ")]
    assert len(lines) == 40 and lines == sorted(lines)
    assert path.read_text() == made.text() and Database.model_validate(json.loads(made.text())) == made
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_ceilings_are_the_best_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    update(path, DEVICE, {}, Ceilings(flops_per_s={"float32": 5.0}, bytes_per_s=7.0, floor_us=2.0))
    made = update(path, DEVICE, {}, Ceilings(flops_per_s={"float32": 4.0}, bytes_per_s=8.0, floor_us=3.0))
    assert made.ceilings == Ceilings(flops_per_s={"float32": 5.0}, bytes_per_s=8.0, floor_us=2.0)


def write_many(path: str, first: int) -> None:
    for n in range(first, first + 15):
        update(Path(path), DEVICE, {key(n): entry()})
        append(Path(path).with_suffix(".jsonl"), Trial(key(n), "aten", 1.0, "", "", {}, "0" * 12))


def test_writers_side_by_side_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(str(path), 100 * i)) for i in range(3)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(1800)
        assert w.exitcode == 0
    made = read_database(path)
    assert made is not None and set(made.entries) == {key(100 * i + n) for i in range(3) for n in range(15)}
    assert len(list(read_trials(path.with_suffix(".jsonl")))) == 45


def spoiled() -> list[tuple[str, str, str]]:
    """A name, the text of a file, and what the refusal says."""
    good = Database(device=DEVICE.name, target="cpu", entries={key(1): entry(), key(2): entry()}).text()
    return [
        ("cut off", good[:-40], "is no JSON"),
        ("another file", "name: layer\n", "is no JSON"),
        ("a list", "[1, 2]\n", "no table of measured kernels"),
        ("another format", good.replace('"format": 1', '"format": 9'), "this is format 9"),
        ("a time that is none", good.replace('"ms": 0.5', '"ms": -1', 1), ":7"),
        ("no kernel", good.replace("arranged last=1", "arranged last=x", 1), "no kernel"),
        ("another key", good.replace(key(2), "gemm 1"), "no local problem"),
        ("a key twice", good.replace(key(2), key(1)), "twice"),
        ("an unknown field", good.replace('"tried": 3', '"tried": 3, "luck": 1', 1), "luck"),
        ("a ceiling of nothing", good.replace("null", CEILING.replace("1.0", "0")), ":5"),
        ("a ceiling without end", good.replace("null", CEILING.replace("1.0", "Infinity")), "is no table"),
        ("a median outside of its percentiles", good.replace('"p20": 0.4', '"p20": 0.55', 1), "p20 0.55"),
        ("a number of many digits", good.replace('"tried": 3', '"tried": ' + "9" * 5000, 1), "is no table"),
        ("brackets in brackets", "[" * 100_000, "is no table"),
        ("a kernel without a name", good.replace("arranged last=1 C=1 F=16 samples=0 cut=1", " ", 1), ":7"),
        ("a key of nothing", good.replace("k1 s1", "k1 s0"), "no local problem"),
        ("a key with zeros before", good.replace("N2 C3", "N02 C3"), "no local problem"),
        ("a key of many digits", good.replace("N2 C3", f"N{'2' * 5000} C3"), "no local problem"),
        ("another device", good.replace(DEVICE.name, "Other CPU, 2 threads"), "not of"),
        ("another target", good.replace('"target": "cpu"', '"target": "cuda:sm_90"'), "not of"),
    ]


@pytest.mark.parametrize(("name", "text", "said"), spoiled(), ids=[s[0] for s in spoiled()])
def test_what_is_broken_is_refused_and_left_alone(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        update(path, DEVICE, {key(3): entry()})
    assert said in str(error.value) and str(path) in str(error.value) and "left as it is" in str(error.value)
    assert path.read_text() == text, name


def test_a_trial_that_was_cut_off_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    made = [Trial(key(n), "aten", float(n), "", "", {"torch": "1"}, "0" * 12) for n in (1, 2)]
    append(path, made[0])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    append(path, made[1])
    assert list(read_trials(path)) == made


def test_a_device_is_named_with_its_threads() -> None:
    assert this_cpu(1).name != this_cpu(2).name and this_cpu(3).threads == 3
    assert this_cpu(2).file_name.endswith("2_threads.json")
