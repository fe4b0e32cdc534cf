"""The timeline: links against time in small steps, steps against the program's price, and what is chosen by it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from free_networks import imported
from networks_on_ranks import with_passes
from pages import boxes_of, meet
from sampling import cases_of
from test_networks_free import a_network
from test_overlap import X, resnet
from torch import nn

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.cost.link import Link, Transfer
from convgen.cost.machine import Level, Machine
from convgen.cost.machines import load_machine
from convgen.cost.network import volume
from convgen.cost.rows import program_cost
from convgen.cost.timeline import MAIN, Span, Timeline, simulate
from convgen.errors import InputError
from convgen.explain.measured import measured_text, read_measured
from convgen.explain.timeline import trace
from convgen.explain.timeline_plot import draw_timeline
from convgen.network_compiler import compile_network, plan_graph
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.start_halos import StartHalos
from convgen.pictures.scaling import Point, Scaling, draw_scaling
from convgen.plan.program.by_timeline import overlapped_s
from convgen.plan.program.overlapped import WORTH, overlapped
from convgen.plan.setting import Setting
from convgen.program.early import boundary_pieces, interior_rows
from convgen.program.flow import Start, backward, forward
from convgen.spec.exported import graph_of
from convgen.spec.graph_file import write_graph
from convgen.verify.virtual import World


def a_machine(latency_s: float, bytes_per_s: float, launch_s: float = 1e-6) -> Machine:
    return Machine(
        name="drawn",
        ranks_per_node=64,
        levels=(Level(name="machine", latency_s=latency_s, bytes_per_s=bytes_per_s),),
        memory_bytes_per_s=1e10,
        peak_flops=(("float32", 1e11), ("float64", 1e11)),
        efficiency=0.5,
        launch_s=launch_s,
    )


def lettered(draw: Random) -> Grid:
    return Grid(draw.choice(((("N", 2),), (("H", 3),), (("N", 2), ("H", 2)), (("H", 2), ("W", 2)))))


# ---- A link ----


def small_steps(asked: list[tuple[str, float, float, float]], share: str, step: float) -> list[float]:
    """When transfers (lane, seconds, of them latencies, asked for at) are over, time cut into steps: each head of a
    lane gets its part, as soon as its latencies are over."""
    left, waits = [s - w for _, s, w, _ in asked], [w for _, _, w, _ in asked]
    ends, now = [-1.0] * len(asked), 0.0
    while min(ends) < 0:
        heads: dict[str, int] = {}
        for i, (lane, _, _, at) in enumerate(asked):
            if ends[i] < 0 and at <= now:
                heads.setdefault(lane, i)
        moving = [i for i in heads.values() if waits[i] <= 1e-9]
        for i in heads.values():
            waits[i] -= step
        for i in moving:
            left[i] -= step / (len(moving) if share == "shared" else 1)
        now += step
        for i in heads.values():
            ends[i] = now if left[i] <= 1e-12 and waits[i] <= 1e-9 else ends[i]
    return ends


@pytest.mark.parametrize("share", ["shared", "each"])
@pytest.mark.parametrize("seed", cases_of(5, "test_a_link_is_as_time_in_small_steps"))
def test_a_link_is_as_time_in_small_steps(seed: int, share: Any) -> None:
    draw = Random(f"link {seed}")
    at, asked = 0.0, list[tuple[str, float, float, float]]()
    for _ in range(7):
        at += draw.choice((0.0, draw.randint(1, 40)))
        seconds = float(draw.randint(1, 60))
        asked.append((draw.choice("abc"), seconds, draw.choice((0.0, 0.3 * seconds, seconds)), at))
    link = Link(share)
    added: list[Transfer] = [
        link.add(str(i), lane, seconds, when, latency) for i, (lane, seconds, latency, when) in enumerate(asked)
    ]
    for i in draw.sample(range(7), 7):
        link.finish(added[i])
    for transfer, expected in zip(added, small_steps(asked, share, 0.01), strict=True):
        assert transfer.end_s == pytest.approx(expected, abs=0.2)
        assert transfer.asked_s <= transfer.start_s < transfer.end_s


# ---- A step ----


def test_one_thing_after_the_other_is_the_programs_price() -> None:
    program = resnet({"N": 2, "H": 2}).plain
    for name in ("cpu", "lassen"):
        machine = load_machine(name)
        found = simulate(program, machine, "float32")
        assert found.end_s == pytest.approx(found.serial_s, rel=0.02)  # but for ranks that are slowest by turns
        assert found.serial_s == pytest.approx(program_cost(program, machine, "float32").seconds, rel=1e-6)
        assert found.exposed_s == pytest.approx(found.moving_s)
        assert found.hidden == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("links", ["shared", "each"])
@pytest.mark.parametrize("seed", cases_of(4, "test_what_holds_of_any_timeline"))
def test_what_holds_of_any_timeline(seed: int, links: Any) -> None:
    draw = Random(f"timeline {seed}")
    module, x = a_network(draw)
    graph, _ = graph_of(module, (x.float(),), name="net")
    program = compile_network(graph, lettered(draw)).plain
    for one in (StartHalos(), BucketGradients(draw.choice((0, 1)))):
        program = one.run(program)
    found = simulate(program, a_machine(10 ** -draw.uniform(4, 7), 10 ** draw.uniform(6, 10)), "float32", links=links)
    assert found.computing_s <= found.end_s * (1 + 1e-12)
    assert found.forward_s <= found.end_s and 0 <= found.hidden <= 1
    if links == "each":
        assert found.end_s <= found.serial_s * (1 + 1e-12)
    path = found.critical_path()
    assert path[0].start_s == pytest.approx(0.0) and path[-1].end_s == pytest.approx(found.end_s)
    for before, after in pairwise(path):
        assert after.start_s == pytest.approx(before.end_s, abs=1e-12)
    lanes: dict[tuple[int, str], float] = {}
    for span in sorted(found.spans, key=lambda s: s.start_s):  # a thread does one thing at a time
        assert span.start_s >= lanes.get((span.rank, span.lane), 0.0) - 1e-12
        lanes[span.rank, span.lane] = span.end_s


def test_a_bucket_hides_behind_what_is_left_of_backward() -> None:
    """By hand: backward's rows from the last; a bucket is started when its last row is over, on a link of its own."""
    program = BucketGradients(0).run(resnet({"N": 2}).plain)
    (last,) = (t for t in simulate(program, a_machine(0.0, 1e6), "float32").travelled if t.name == "bucket_1")
    assert last.exposed_s == pytest.approx(last.seconds)  # the only bucket ends with backward's last row
    several = BucketGradients(0, 0).run(program)
    assert several == program
    early = replace(program, buckets=(replace(program.buckets[0], steps=program.buckets[0].steps[:1]),))
    (first,) = (t for t in simulate(early, a_machine(0.0, 1e9, 1e-4), "float32").travelled if t.name == "bucket_1")
    assert first.exposed_s == 0.0  # rows are left that take longer


@pytest.mark.parametrize("seed", cases_of(3, "test_what_is_chosen_is_not_slower"))
def test_what_is_chosen_is_not_slower(seed: int) -> None:
    draw = Random(f"chosen {seed}")
    module, x = a_network(draw)
    graph, _ = graph_of(module, (x.float(),), name="net")
    program = compile_network(graph, lettered(draw)).plain
    for latency_s, bytes_per_s, launch_s in ((1e-4, 1e7, 1e-6), (1e-6, 1e10, 1e-5), (0.0, 1e15, 1e-3)):
        machine = a_machine(latency_s, bytes_per_s, launch_s)
        chosen = overlapped(program, machine, "float32")
        tried = [program, *(p.run(program) for p in (StartHalos(), BucketGradients(0), BucketGradients(25)))]
        least = min(simulate(p, machine, "float32").end_s for p in tried if p.buckets or p is program)
        taken = simulate(chosen, machine, "float32").end_s
        assert taken <= simulate(program, machine, "float32").end_s
        assert WORTH * taken <= least


@pytest.mark.parametrize("seed", cases_of(3, "test_what_travels_meanwhile_takes_of_the_processor"))
def test_what_travels_meanwhile_takes_of_the_processor(seed: int) -> None:
    """Of a link that takes no time the step is longer by that alone: a message's, and its bytes'."""
    draw = Random(f"processor {seed}")
    message, byte = 10 ** -draw.uniform(4, 6), 10 ** -draw.uniform(9, 11)
    module, x = a_network(draw)
    graph, _ = graph_of(module, (x.float(),), name="net")
    plain = compile_network(graph, Grid((("N", 2),))).plain
    packed = BucketGradients(draw.choice((0, 1))).run(plain)
    free = replace(a_machine(0.0, 1e18), memory_bytes_per_s=1e18)
    busy = replace(free, message_processor_s=message, processor_s_per_byte=byte)
    assert simulate(plain, busy, "float32").end_s == simulate(plain, free, "float32").end_s  # waited for: it is within
    without, found = (simulate(packed, machine, "float32") for machine in (free, busy))
    buckets = [s for s in volume(packed, of_inputs=False)["backward"] if "of" in s]
    sent = sum(s["bytes_sent_per_rank"][0] for s in buckets)
    taken = 2 * len(buckets) * message + sent * byte  # a ring of two: two rounds
    assert buckets and found.end_s - without.end_s == pytest.approx(taken, rel=1e-6)
    assert found.exposed_s - without.exposed_s == pytest.approx(taken, rel=1e-3)


def test_what_takes_more_of_the_processor_than_it_hides_is_not_taken() -> None:
    module = torch.nn.Sequential(*(torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))
    graph, _ = graph_of(module, (torch.zeros(2, 16, 64, 512),), name="net")
    program = compile_network(graph, Grid((("H", 2),))).plain
    slow = a_machine(1e-4, 1e8, 1e-7)
    busy = replace(slow, message_processor_s=1e-2)
    some, none = (overlapped(program, machine, "float32") for machine in (slow, busy))
    assert any(isinstance(s, Start) for s in forward(some))
    assert not any(isinstance(s, Start) for s in (*forward(none), *backward(none)))


def test_halos_are_started_where_the_link_is_slow_and_launches_are_cheap() -> None:
    module = torch.nn.Sequential(*(torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))
    graph, _ = graph_of(module, (torch.zeros(2, 16, 64, 512),), name="net")
    program = compile_network(graph, Grid((("H", 2),))).plain
    slow, costly = a_machine(1e-4, 5e7, 1e-7), a_machine(1e-8, 1e12, 1e-2)
    assert all(row.early == 0 for row in overlapped(program, slow, "float32").rows if row.fetch[0])
    assert all(row.early is None for row in overlapped(program, costly, "float32").rows)
    found, plain = (simulate(p, slow, "float32") for p in (overlapped(program, slow, "float32"), program))
    assert found.end_s < plain.end_s and {t.kind for t in found.travelled if t.hidden > 0.9} >= {"exchange"}


def test_a_plan_by_its_timeline_is_not_longer() -> None:
    convs = [nn.Conv2d(c, 32, 3, padding=1, stride=s) for c, s in ((8, 1), (32, 2), (32, 1))]
    graph = graph_of(nn.Sequential(*convs), (torch.zeros(4, 8, 32, 32),), name="net")[0]
    machine = a_machine(1e-6, 2e9)
    compiled, plan = plan_graph(graph, 4, Setting(machine=machine, by_step=True))
    assert plan.step is not None
    assert simulate(compiled.program, machine, "float32").end_s == pytest.approx(plan.step.overlapped)
    _, plain = plan_graph(graph, 4, Setting(machine=machine))
    assert plain.step is None
    assert plan.step.overlapped <= overlapped_s(plain.program, machine, "float32") == pytest.approx(plan.step.by_sums)
    assert plan.seconds == pytest.approx(program_cost(plan.program, machine, "float32").seconds)


# ---- The command ----


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulated") / "resnet.yaml"
    path.write_text(write_graph(resnet({"N": 2}).graph))
    return path


def convgen(*words: object) -> Any:
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_the_command_says_what_the_timeline_has(file: Path, tmp_path: Path) -> None:
    words = ("simulate", file, "--machine", "lassen", "--grid", "N=2,H=2")
    done = convgen(*words, "--trace", tmp_path / "t.json", "--plot", tmp_path / "p.svg")
    assert done.exit_code == 0, done.output
    assert "on grid(N=2, H=2), lassen, float32: a step of training" in done.stdout
    assert "critical path" in done.stdout and "all_reduce" in done.stdout
    assert b"the longest" in (tmp_path / "p.svg").read_bytes()
    numbers = json.loads(convgen(*words, "--json").stdout)
    assert f"{numbers['step_s'] * 1e3:.3f} ms" in done.stdout
    assert sum(s["seconds"] for s in numbers["steps"]) == pytest.approx(numbers["moving_s"])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1, 2, 3}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(numbers["step_s"] * 1e6, abs=0.01)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"compute", MAIN}


def a_step(spans: list[Span], ranks: int) -> Timeline:
    """Four milliseconds, forward the first of them."""
    return Timeline(ranks, tuple(spans), (), 4e-3, 1e-3, 3e-3, 4e-3)


def computing(rank: int, start: float, end: float, name: str = "conv") -> Span:
    return Span(name, "compute", rank, start * 1e-3, end * 1e-3)


def test_ranks_that_are_alike_are_one_band() -> None:
    """Rank 2 computes longer; ranks 0, 1 and 3 differ by less than is seen."""
    spans = [computing(r, 0.0, {0: 1.0, 1: 1.01, 2: 2.0, 3: 1.0}[r]) for r in range(4)]
    spans.append(Span("sum of it", "gradients", -1, 2e-3, 4e-3))
    words = [text for text, _ in boxes_of(draw_timeline("a step", a_step(spans, 4)))[0]]
    assert "ranks 0-1, 3" in words and "rank 2" in words and "rank 0" not in words
    for missing in ([computing(0, 0.0, 1.0)], [computing(0, 0.0, 1.0), computing(1, 0.0, 1.0, "pool")]):
        words = [text for text, _ in boxes_of(draw_timeline("a step", a_step(missing, 2)))[0]]
        assert "rank 0" in words and "rank 1" in words  # other steps are never alike


def test_a_timeline_has_ticks_a_legend_and_names() -> None:
    one = resnet({"N": 2, "H": 2})
    found = simulate(one.program, load_machine("lassen"), "float32")
    page = draw_timeline("a step", found)
    words, filled = boxes_of(page)
    texts = [text for text, _ in words]
    assert "0 ms" in texts and "on the critical path" in texts and "what ranks compute" in texts
    lanes = {span.lane for span in found.spans}
    assert all(any(text.startswith(f"{lane}: ") for text in texts) for lane in lanes - {"compute"})
    longest = max((s for s in found.spans if s.rank <= 0), key=lambda s: s.seconds)
    row = next(i for i, text in enumerate(texts) if text == longest.name)
    assert texts[row - 1] == "1" and texts[row + 2].startswith(f"{longest.seconds * 1e3:.3f} ms, ")
    number = next(box for text, box in words if text == "1")  # in its bar
    assert any(box.x0 <= number.x0 and number.x1 <= box.x1 and box.y0 < number.y0 < box.y1 for _, box in filled)
    assert not [(a[0], b[0]) for i, a in enumerate(words) for b in words[:i] if meet(a[1], b[1])]


def test_both_panels_of_scaling_have_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("convgen.pictures.scaling.save_figure", lambda figure, file, dpi: drawn.append(figure))
    of = Scaling(
        "net", "lassen", 8, lambda ranks, batch: Point(batch / ranks), lambda ranks, batch: Point(1e-3 * ranks)
    )
    told: list[str] = []
    draw_scaling(of, 8, tmp_path / "s.png", told.append)
    ((left, right),) = [figure.axes for figure in drawn]
    assert left.get_ylim() == right.get_ylim() and left.get_yscale() == right.get_yscale() == "log"
    low, high = left.get_ylim()
    for panel in (left, right):
        assert all(low < y < high for line in panel.lines for y in line.get_ydata())
    assert "planning 8 ranks and 8 samples" in told


def test_of_many_ranks_a_trace_has_the_critical_ones() -> None:
    found = simulate(resnet({"N": 2, "H": 2}).program, load_machine("lassen"), "float32")
    many = replace(found, ranks=100)
    events = json.loads(trace("net", many))["traceEvents"]
    assert len({e["pid"] for e in events}) == 64
    assert {s.rank for s in found.critical_path() if s.rank >= 0} <= {e["pid"] for e in events}


def test_what_cant_be_simulated_is_refused(file: Path, tmp_path: Path) -> None:
    layer = tmp_path / "layer.yaml"
    layer.write_text(LAYER + "options: {sums: native}\n")
    for words, what in (
        ((layer, "--machine", "lassen"), "native sums"),
        ((file, "--machine", "nowhere", "--grid", "N=2"), "nowhere"),
        ((file, "--machine", "lassen"), "--grid"),
    ):
        done = convgen("simulate", *words)
        assert isinstance(done.exception, InputError) and what in str(done.exception)
    assert convgen("simulate", file, "--grid", "N=2").exit_code == 2


LAYER = """name: a
layer: conv2d
input: [4, 8, 32, 32]
out_channels: 8
kernel_size: 3
padding: 1
grid: {C: 2}
algorithm: stationary-x
"""


def test_a_layer_is_simulated_as_it_is_compiled(tmp_path: Path) -> None:
    layer, machine = tmp_path / "layer.yaml", tmp_path / "slow.yaml"
    layer.write_text(LAYER)
    machine.write_text(
        "name: slow\nranks_per_node: 2\nlatency_s: 1e-5\nlink_bytes_per_s: 1e8\nmemory_bytes_per_s: 1e10\n"
        "peak_flops_per_s: {float64: 1e11, float32: 1e11, tfloat32: 1e11, bfloat16: 1e11, float16: 1e11}\n"
        "efficiency: 0.5\nlaunch_s: 1e-7\n"
    )
    numbers = json.loads(convgen("simulate", layer, "--machine", machine, "--json").stdout)
    assert numbers["step_s"] < numbers["plain_s"]
    done = convgen("compile", layer, "--overlap", "--machine", machine, "-o", tmp_path)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "a" / "schedule.txt").read_text()
    waits = [line.split("%")[1] for line in text.splitlines() if line.strip().startswith("wait")]
    assert waits and set(waits) == {s["step"] for s in numbers["steps"]}
    again = convgen("compile", layer, "--overlap", "--schedule", tmp_path / "a" / "schedule.txt", "--emit", "schedule")
    assert again.stdout == text
    words = ("simulate", layer, "--machine", machine, "--schedule", tmp_path / "a" / "schedule.txt", "--json")
    assert json.loads(convgen(*words).stdout) == numbers


def test_a_recorded_step_beside_the_simulated_one(file: Path, tmp_path: Path) -> None:
    compiled = with_passes(resnet({"H": 2}), StartHalos(), BucketGradients(0))
    net = imported(compiled.package().files, tmp_path)

    def program(end: Any) -> None:
        mesh = net.init_mesh("cpu", transport=end)
        model, x = net.Network(mesh), net.scatter("x", X, mesh)
        with torch.profiler.profile() if end.rank == 0 else nullcontext() as profile:
            model(x).square().sum().backward()
        if profile is not None:
            profile.export_chrome_trace(str(tmp_path / "measured.json"))

    World(2).run(program)
    measured = read_measured(tmp_path / "measured.json")
    found = simulate(compiled.program, load_machine("cpu"), "float32")
    lanes = {s.name: s.lane for s in found.spans if s.rank < 0}
    for one in found.travelled:  # all of the program's steps, by their names
        assert measured["move" if lanes[one.name] == MAIN else "wait", one.name] >= 0
    assert {name for what, name in measured if what == "local"} >= {"conv1", "layer1_conv2"}
    text = measured_text(found, measured)
    assert "in all" in text and "not in the trace" not in text
    done = convgen("simulate", file, "--machine", "cpu", "--grid", "H=2", "--measured", tmp_path / "measured.json")
    assert done.exit_code == 0 and "measured ms" in done.stdout
    for content, what in (("{", "not JSON"), ("{}", "no traceEvents"), ('{"traceEvents": []}', "nothing of a package")):
        (tmp_path / "other.json").write_text(content)
        done = convgen("simulate", file, "--machine", "cpu", "--grid", "H=2", "--measured", tmp_path / "other.json")
        assert isinstance(done.exception, InputError) and what in str(done.exception)


@pytest.mark.parametrize(
    ("grid", "pieces"),
    [({"H": 2}, [1, 1]), ({"H": 3}, [1, 2, 1]), ({"H": 2, "W": 2}, [2] * 4), ({"H": 3, "W": 2}, [2, 2, 3, 3, 2, 2])],
    ids=str,
)
def test_a_boundary_is_in_as_many_pieces_as_a_rank_has_neighbours(grid: dict[str, int], pieces: list[int]) -> None:
    graph, _ = graph_of(nn.Conv2d(2, 3, 3, padding=1), (torch.zeros(2, 2, 12, 12),), name="net")
    (row,) = (
        r for r in StartHalos().run(compile_network(graph, Grid(tuple(grid.items()))).plain).rows if r.early is not None
    )
    assert row.early is not None
    ranks = Grid(tuple(grid.items()))
    assert boundary_pieces(row, row.early, ranks).tolist() == pieces
    rows = [12 // n for n in grid.values()]
    shares = interior_rows(row, row.early, ranks) * prod(rows)
    assert all(0 < share < prod(rows) and share == pytest.approx(round(share)) for share in shares.tolist())
