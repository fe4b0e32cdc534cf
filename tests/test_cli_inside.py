"""Looking inside a compilation and putting a hand in: --dump-ir, --time-passes, --pass, --schedule."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner, Result
from generate import random_axes, random_roles
from modules import draw
from sampling import draws

from convgen.algebra.conv import PHASES
from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import redistribute
from convgen.algebra.space import Space
from convgen.commands.main import cli
from convgen.commands.stages import Times
from convgen.compiler import PIPELINE, SCHEDULES, compile_layer
from convgen.errors import InputError
from convgen.passes.contract import Context
from convgen.program.build import lower
from convgen.program.nodes import Convert, Schedule
from convgen.program.text import parse, show
from convgen.spec.reader import read_layers
from convgen.verify.check import check

LAYER = """\
name: small
layer: conv2d
input: [4, 8, 6, 6]
out_channels: 8
kernel_size: 3
padding: 1
bias: true
grid: {C: 2, H: 2, N: 1}
algorithm: stationary-x
"""


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(LAYER)
    return path


def convgen(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def schedule_of(layer: Path) -> str:
    return convgen("compile", layer, "--emit", "schedule").stdout


def plain(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


# ---- --dump-ir, --time-passes, --pass


def test_every_pass_is_dumped_as_text_that_reads_back(layer: Path) -> None:
    done = convgen("compile", layer, "--emit", "schedule", "--dump-ir")
    texts = re.split(r"^# ", done.stderr, flags=re.MULTILINE)[1:]
    assert [text.splitlines()[0].split(":")[0] for text in texts] == [f"small after {stage}" for stage in SCHEDULES]
    same = [text.splitlines()[0] for text in texts if text.splitlines()[0].endswith(": as before")]
    assert same == [f"small after {name}: as before" for name in ("fuse-bias", "hold-x", "fuse-layouts")]
    dumped = [parse("# " + text) for text in texts if "as before" not in text]
    assert len(dumped) == 2 and dumped[-1] == parse(done.stdout)


def test_one_pass_is_dumped_whether_or_not_it_changed_anything(layer: Path) -> None:
    for name, count in (("share", 11), ("hold-x", 13), ("lower", 13)):
        done = convgen("compile", layer, "--emit", "schedule", f"--dump-ir={name}")
        assert done.stderr.splitlines()[0] == f"# small after {name}"
        assert len(list(parse(done.stderr).steps())) == count


def test_a_file_behind_dump_ir_is_a_file(layer: Path) -> None:
    done = convgen("compile", "--dump-ir", layer, "--emit", "schedule")
    assert done.exit_code == 0 and "after share" in done.stderr


def test_what_can_not_be_dumped_is_refused(layer: Path, tmp_path: Path) -> None:
    done = convgen("compile", layer, "--dump-ir=shar")
    assert isinstance(done.exception, InputError) and "share" in done.exception.hint
    (tmp_path / "s.txt").write_text(schedule_of(layer))
    done = convgen("compile", layer, "--dump-ir", "--schedule", tmp_path / "s.txt")
    assert isinstance(done.exception, InputError) and "none runs on an edited schedule" in done.exception.fact


def test_times_are_of_every_stage(layer: Path) -> None:
    done = convgen("compile", layer, "--emit", "module", "--time-passes")
    rows = [line.split() for line in done.stderr.splitlines()]
    assert [row[0] for row in rows] == ["read", "choose", *SCHEDULES, "kernels", "emit", "total"]
    assert all(re.fullmatch(r"\d+\.\d\d", row[1]) and row[2] == "ms" for row in rows)
    assert done.stdout == convgen("compile", layer, "--emit", "module").stdout


def test_times_add_up() -> None:
    ticks = iter((1.0, 1.5, 2.5, 2.75, 3.0))
    times = Times(lambda: next(ticks))
    for stage in ("read", "hold-x{choice=stored}", "emit", "hold-x"):
        times(stage)
    assert times.seconds == {"read": 0.5, "hold-x": 1.25, "emit": 0.25}
    assert plain(times.text())[-1] == "total 2000.00 ms 100%"


def test_a_pass_takes_options(layer: Path) -> None:
    done = convgen("compile", layer, "--emit", "schedule", "--pass", "hold-x{choice=stored}", "--dump-ir=hold-x")
    assert "hold_x: stored" in done.stdout
    assert done.stderr.splitlines()[0] == "# small after hold-x{choice=stored}"
    module = convgen("compile", layer, "--emit", "module", "--pass", "hold-x{choice=stored}").stdout
    assert "#   convgen compile small.yaml --pass 'hold-x{choice=stored}'" in module
    done = convgen("compile", layer, "--pass", "hold-y")
    assert isinstance(done.exception, InputError) and "no pass is named 'hold-y'" in done.exception.fact


# ---- --schedule


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90", "sw26010"])
def test_a_schedule_that_was_not_edited_makes_the_same_module(layer: Path, tmp_path: Path, target: str) -> None:
    words = ("compile", layer, "--target", target, "--emit")
    (tmp_path / "s.txt").write_text(convgen(*words, "schedule").stdout)
    assert convgen(*words, "module", "--schedule", tmp_path / "s.txt").stdout == convgen(*words, "module").stdout


@pytest.mark.slow
def test_an_edited_schedule_is_compiled_and_right(layer: Path, tmp_path: Path) -> None:
    """dy is gathered for backward_filter again: more is sent, less is kept between the phases."""
    text = schedule_of(layer)
    gather = next(line for line in text.splitlines() if "%dy_gathered = " in line)
    head, tail = text.split("  backward_filter:\n")
    again = gather.replace("%dy_gathered", "%dy_again") + "  # again\n"
    tail = again + tail.replace("%dy_gathered,", "%dy_again,")
    (tmp_path / "s.txt").write_text(f"{head}  backward_filter:\n{tail}")
    done = convgen("compile", layer, "--schedule", tmp_path / "s.txt", "-o", tmp_path / "out")
    assert done.exit_code == 0, done
    module = (tmp_path / "out" / "small.py").read_text()
    assert "#   convgen compile small.yaml --schedule small.txt" in module and str(tmp_path) not in module
    done = convgen("check", layer, "--schedule", tmp_path / "s.txt", "--json")
    assert done.exit_code == 0, done
    assert "edited" in convgen("explain", layer, "--schedule", tmp_path / "s.txt").stdout


@pytest.mark.slow
def test_what_is_held_can_be_edited(tmp_path: Path) -> None:
    """hold_x is what the schedule says, in the module's SPEC too."""
    (path := tmp_path / "small.yaml").write_text(LAYER.replace("x", "y", 1).replace("stationary-x", "stationary-w"))
    path.write_text(LAYER.replace("C: 2, H: 2, N: 1", "F: 2").replace("stationary-x", "stationary-y"))
    stored = convgen("compile", path, "--emit", "schedule", "--pass", "hold-x{choice=stored}").stdout
    assert stored != schedule_of(path)
    (tmp_path / "s.txt").write_text(stored)
    done = convgen("compile", path, "--schedule", tmp_path / "s.txt", "--emit", "module")
    assert "'hold_x': 'stored'" in done.stdout or '"hold_x": "stored"' in done.stdout
    assert convgen("check", path, "--schedule", tmp_path / "s.txt").exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "fact", "notes"),
    [
        ("conv_forward", "conv_froward", "schedule text, line 8: cannot read", ""),
        ("dim=F over=C   ", "dim=H over=C   ", "cannot read '%y_summed = reduce_scatter %y_partial dim=H", ""),
        ("over=H     ", "over=C     ", "ranks differ along H, it is over C", "check group is exact, with 4 samples"),
        ("H+(1,1), *]\n    %y_partial", "H+(1,0), *]\n    %y_partial", "+(1,1) rows are needed", "windows are needed"),
        ("conv_forward %x_halo", "conv_forward %x", "rank 0 needs rows [0, 4) on H, it has [0, 3)", "at hand"),
        ("%x_halo = ", "%halo = ", "%y_partial in forward reads %x_halo, which no step before it makes", ""),
        ("schedule small", "schedule large", "a schedule of large, and the layer is small", ""),
        ("C=2, H=2", "C=4, H=2", "the layer is on grid(C=2, H=2, N=1)", ""),
        ("w[*, C]", "w[*, *]", "w[*, *] is stored, and the layer file says w[*, C]", ""),
        ("*] bias[C]\n  roles", "*]\n  roles", "stored are x, w, y, and the layer has x, w, y, bias", ""),
        ("partial(C)", "partial(K)", "K is no axis of grid(C=2, H=2, N=1)", ""),
        ("partial(C)", "partial(N,C)", "N has one rank", ""),
        ("%dw_partial", "%import_", "no value can be called %import_", ""),
        (
            "%dy_gathered = all_gather %dy",
            "%dy_gathered = all_gather %w",
            "%w is a layout of w, and can't become y",
            "",
        ),
        ("%db = all_reduce %db_partial over=H", "%dbs = all_reduce %db_partial over=H", "no step makes %db", ""),
    ],
)
def test_a_wrong_schedule_is_refused(layer: Path, tmp_path: Path, old: str, new: str, fact: str, notes: str) -> None:
    text = schedule_of(layer)
    assert old in text, text
    (file := tmp_path / "s.txt").write_text(text.replace(old, new))
    done = convgen("compile", layer, "--schedule", file, "-o", tmp_path / "out")
    assert isinstance(done.exception, InputError), done
    said = str(done.exception)
    assert fact in said and notes in said and str(file) in said, said
    assert not (tmp_path / "out").exists()


def test_a_refusal_has_the_line(layer: Path, tmp_path: Path) -> None:
    text = schedule_of(layer).replace("conv_forward %x_halo", "conv_forward %x")
    (file := tmp_path / "s.txt").write_text("# edited\n\n" + text)
    number = next(n for n, line in enumerate(file.read_text().splitlines(), 1) if "conv_forward" in line)
    done = convgen("compile", layer, "--schedule", file)
    assert isinstance(done.exception, InputError) and done.exception.where == f"{file}:{number}"


def test_what_is_no_schedule_is_refused(layer: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("")
    lines = schedule_of(layer).splitlines(keepends=True)
    (tmp_path / "open").write_text(schedule_of(layer).removesuffix("}\n"))
    (tmp_path / "roles").write_text("".join(line for line in lines if "roles backward_data" not in line))
    (tmp_path / "twice").write_text("".join(line * (1 + ("roles forward" in line)) for line in lines))
    (tmp_path / "held").write_text("".join(line + "  hold_x: twice\n" * ("stored:" in line) for line in lines))
    for file, fact in (
        ("open", "it ends without the closing brace"),
        ("roles", "it ends without a line 'roles backward_data: ...'"),
        ("twice", "schedule text, line 4: cannot read 'roles forward"),
        ("held", "schedule text, line 3: cannot read 'hold_x: twice'"),
    ):
        done = convgen("compile", layer, "--schedule", tmp_path / file)
        assert isinstance(done.exception, InputError) and fact in done.exception.fact, done.exception
    for file, fact in (("nothing", "can't read"), ("bytes", "not UTF-8 text"), ("empty", "schedule text, line 0")):
        done = convgen("compile", layer, "--schedule", tmp_path / file)
        assert isinstance(done.exception, InputError) and fact in done.exception.fact
    done = convgen("compile", layer, layer, "--schedule", tmp_path / "empty")
    assert isinstance(done.exception, InputError) and "one layer, here are 2" in done.exception.fact


def test_parts_and_rims_are_of_targets_that_read_them(layer: Path, tmp_path: Path) -> None:
    text = convgen("compile", layer, "--target", "cuda", "--emit", "schedule",
                   "--pass", "fuse-layouts{least_part=1 most_boxes=8}").stdout  # fmt: skip
    assert "as=parts" in text and "as=rim" in text
    (file := tmp_path / "s.txt").write_text(text)
    assert convgen("compile", layer, "--target", "cuda", "--schedule", file, "--emit", "schedule").stdout == text
    done = convgen("compile", layer, "--schedule", file)
    assert isinstance(done.exception, InputError) and "local kernels of target cpu" in done.exception.fact


def detour(rng: Random, schedule: Schedule, space: Space) -> Schedule:
    """A conversion by way of another layout."""
    phase, types = rng.choice(PHASES), schedule.types()
    steps = list(schedule.section(phase))
    places = [i for i, step in enumerate(steps) if isinstance(step, Convert)]
    if not places:
        return schedule
    step = steps[i := rng.choice(places)]
    assert isinstance(step, Convert)
    before = types[step.source]
    between = Layout(before.tensor, random_axes(rng, space.grid, len(before.axes))).without(space.grid.single)
    way = [*redistribute(space, before, between), *redistribute(space, between, step.type)]
    word = before.tensor.replace("bias", "db")
    names = [f"{word}_by_{rng.randrange(10**6)}" for _ in way[1:]] + [step.result]
    sources = [step.source, *names[:-1]]
    made = [Convert(result=name, type=c.dst, kind=c.kind, source=source, over=c.over)
            for name, source, c in zip(names, sources, way, strict=True)]  # fmt: skip
    return replace(schedule, **{phase: (*steps[:i], *made, *steps[i + 1 :])}) if made else schedule


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_other_ways_are_refused_or_right(part: int) -> None:
    """Other roles, fewer passes, detours: what verifies is what a reference says, on every rank."""
    seen: Counter[str] = Counter()
    for seed in range(part, draws(27), 4):
        rng = Random(f"edited {seed}")
        case = draw(seed, most=6)
        roles = tuple((p, tuple((a, r) for r, axes in given.nests for a in axes)) for p, given in case.roles.items())
        compiled = compile_layer(replace(case.layer, roles=roles))
        space, context = compiled.space, Context(compiled.space)
        assert compiled.with_schedule(show(compiled.schedule), "s.txt") is compiled
        for _ in range(4):
            others = {p: random_roles(rng, case.layer.conv, space.grid, p) for p in PHASES}
            schedule = lower(case.layer.name, space, case.stored, others, bias=case.layer.conv.bias)
            fewer = [p for p in PIPELINE[1:] if rng.random() < 0.7]
            for one in (PIPELINE[0], *fewer):
                schedule = one.run(schedule, context)
            for _ in range(rng.randint(0, 2)):
                schedule = detour(rng, schedule, space)
            try:
                edited = compiled.with_schedule(show(schedule), "s.txt")
            except InputError as error:
                assert "s.txt" in str(error)
                seen["refused"] += 1
                continue
            report = check(edited)
            assert report.ok, (show(schedule), report)
            seen["right"] += 1
    assert seen["right"] > 3 * seen["refused"], seen


@pytest.mark.slow
def test_damaged_text_is_refused_or_right(layer: Path) -> None:
    """Lines dropped, doubled, swapped; words of one line in another. Never a traceback."""
    (one,) = read_layers(layer)
    compiled = compile_layer(one)
    text, rng = show(compiled.schedule), Random(5)
    for _ in range(draws(300)):
        lines = text.splitlines()
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                del lines[i]
            case 1:
                lines.insert(j, lines[i])
            case 2:
                lines[i], lines[j] = lines[j], lines[i]
            case _:
                words, others = (re.findall(r"[%\w]+|\W", lines[k]) for k in (i, j))
                words[rng.randrange(len(words))] = rng.choice(others)
                lines[i] = "".join(words)
        try:
            edited = compiled.with_schedule("\n".join(lines), "s.txt")
        except InputError as error:
            assert "s.txt" in str(error)
        else:
            assert edited is compiled or check(edited).ok
