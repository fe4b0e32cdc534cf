"""From measurements to a machine: lines through times, where ranks lie, the file, and what steps take by it."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from calibrations import LAUNCH_S, LINES, LOCAL, SHAPES, calibration, messages_of
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from convgen.calibrate.fit import fit_line
from convgen.calibrate.links import SIZES, levels_of, patterns
from convgen.calibrate.nodes import Nodes, nodes_of
from convgen.calibrate.processor import cores_left
from convgen.calibrate.report import report_text
from convgen.calibrate.result import machine_of
from convgen.calibrate.shapes import SHAPES as SHAPE_LIST
from convgen.calibrate.write import check_output, machine_text, write_machine
from convgen.commands.main import cli
from convgen.compiler import compile_layer
from convgen.cost.machine_measured import Misfit, Probe, efficiency_like, left_out
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.rows import Price
from convgen.cost.schedule import schedule_cost
from convgen.errors import InputError
from convgen.operations.convolution import Convolution
from convgen.spec.build import layer_from_dict

# Lines


@settings(max_examples=60)
@given(
    latency=st.floats(1e-7, 1e-3),
    transfer=st.floats(1, 1e4),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_a_line_is_found_under_noise(latency: float, transfer: float, noise: list[float]) -> None:
    """The largest message's transfer takes so many latencies: from a rate hardly seen to a latency hardly seen.

    The true line has a sum of squared relative errors of at most n e^2, so the best one has no more, and at each size
    it is within sqrt(n) e of what was measured.
    """
    rate = SIZES[-1] / (transfer * latency)
    true = [latency + size / rate for size in SIZES]
    measured = [t * (1 + e) for t, e in zip(true, noise, strict=True)]
    fit = fit_line(SIZES, measured, "messages")
    worst = max(1e-6, *(abs(e / (1 + e)) for e in noise))
    bound = len(SIZES) ** 0.5 * worst
    assert fit.worst_error <= bound * 1.001
    assert fit.median_error <= fit.worst_error
    for size, m in zip(SIZES, measured, strict=True):
        assert abs(fit.seconds(size) - m) <= bound * 1.001 * m
    if 100 <= transfer <= 1000:  # both are seen well
        assert fit.latency_s == pytest.approx(latency, rel=0.2)
        assert fit.bytes_per_s == pytest.approx(rate, rel=0.2)


def test_a_line_without_noise_is_found_exactly() -> None:
    fit = fit_line(SIZES, [3e-5 + size / 2e9 for size in SIZES], "messages")
    assert fit.latency_s == pytest.approx(3e-5, rel=1e-9)
    assert fit.bytes_per_s == pytest.approx(2e9, rel=1e-9)
    assert fit.worst_error < 1e-9


def test_small_messages_count_as_much_as_large_ones() -> None:
    """Where large messages are 10 % slow, plain least squares would miss the latency by many times itself."""
    fit = fit_line(SIZES, [(3e-5 + size / 2e9) * (1.1 if size >= 1 << 20 else 1) for size in SIZES], "messages")
    assert fit.latency_s == pytest.approx(3e-5, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ([64, 128], [1e-5, 2e-5], "2 sizes, a line needs 3"),
        ([64, 64, 64, 128], [1e-5] * 4, "2 sizes, a line needs 3"),
        ([64, 128, 256], [1e-5, -2e-5, 3e-5], "128 bytes took -2e-05 s"),
        ([64, 128, 256], [1e-5, 2e-5, float("nan")], "256 bytes took nan s"),
        ([64, 128, 256], [1e-5, 2e-5], "3 sizes and 2 times"),
        ([64, 1 << 10, 1 << 20], [3e-5, 2e-5, 1e-5], "times don't grow with the size"),
    ],
)
def test_times_on_no_line_are_refused(sizes: list[int], seconds: list[float], said: str) -> None:
    with pytest.raises(InputError) as caught:
        fit_line(sizes, seconds, "messages")
    assert said in caught.value.fact
    assert caught.value.hint


# Nodes


def test_ranks_lie_node_by_node() -> None:
    assert nodes_of(["a"] * 3 + ["b"] * 3) == Nodes(count=2, ranks=3)
    assert nodes_of(["a", "b"]) == Nodes(count=2, ranks=1)
    assert nodes_of(["a", "a"]).text == "2 ranks on 1 node"


@pytest.mark.parametrize(
    ("hosts", "said", "note"),
    [
        (["a", "a", "a", "b"], "nodes have 3, 1 ranks", "3 on a, 1 on b"),
        (["a", "b", "a", "b"], "ranks 0, 2 share a node", "1 on a, 1 on b, 1 on a, 1 on b"),
        (["b", "a", "a", "b"], "ranks 0, 3 share a node", "1 on b, 2 on a, 1 on b"),
    ],
)
def test_ranks_that_no_file_can_describe_are_refused(hosts: list[str], said: str, note: str) -> None:
    with pytest.raises(InputError) as caught:
        nodes_of(hosts)
    assert said in caught.value.fact
    assert [n.text for n in caught.value.notes] == [note]
    assert caught.value.hint


@pytest.mark.parametrize("nodes", [Nodes(1, 2), Nodes(1, 5), Nodes(2, 1), Nodes(2, 2), Nodes(3, 4)], ids=str)
def test_every_sender_is_sent_to_at_the_right_level(nodes: Nodes) -> None:
    found = patterns(nodes)
    for key, pattern in found.items():
        assert sorted(a for a, _ in pattern.to) == sorted(b for _, b in pattern.to)
        crosses = {a // nodes.ranks != b // nodes.ranks for a, b in pattern.to}
        assert crosses == {key in ("pair across", "across", "shared")}
    assert ("inside" in found) == (nodes.ranks > 1)
    assert ("across" in found) == (nodes.count > 1)
    assert ("shared" in found) == (nodes.count > 1 and nodes.ranks > 1)


def test_levels_are_the_lines_of_their_messages() -> None:
    two = Nodes(count=2, ranks=2)
    node, machine = levels_of(two, messages_of(two))
    assert (node.name, node.ranks, machine.ranks) == ("node", 2, None)
    assert (node.latency_s, node.bytes_per_s) == pytest.approx(LINES["inside"])
    assert (machine.latency_s, machine.bytes_per_s) == pytest.approx(LINES["across"])
    assert machine.shared_bytes_per_s == pytest.approx(2 * LINES["shared"][1])
    for nodes, key in ((Nodes(1, 2), "inside"), (Nodes(2, 1), "across")):
        (only,) = levels_of(nodes, messages_of(nodes))
        assert (only.latency_s, only.bytes_per_s) == pytest.approx(LINES[key])


# Files


@pytest.mark.parametrize("nodes", [Nodes(1, 2), Nodes(2, 1), Nodes(2, 2)], ids=str)
def test_what_is_written_reads_back(tmp_path: Path, nodes: Nodes) -> None:
    found, path = calibration(nodes, 'of "mine": \N{GREEK SMALL LETTER ALPHA}'), tmp_path / "m.yaml"
    write_machine(found, path)
    assert load_machine(str(path)) == found.machine
    assert [p.name for p in tmp_path.iterdir()] == ["m.yaml"]
    text = path.read_text(encoding="utf-8")
    assert "on 2030-01-02" in text and "torch 2.13.0" in text
    assert "Each by all others, off in the median and at most: forward " in text.replace("\n# ", " ")
    assert text.count("assumed: float32's") == 2  # bfloat16 and float16 of LOCAL
    assert max(map(len, text.splitlines())) <= 120
    assert nodes.text in report_text(found)
    assert found.machine.message_processor_s == pytest.approx(4e-5) and "message_processor_s: 4.000e-5" in text
    assert 1 / found.machine.processor_s_per_byte == pytest.approx(3e9, rel=1e-3)
    told = replace(found, machine=replace(found.machine, network_launch_s=2.5e-4), quantile=0.25)
    write_machine(told, path)
    assert load_machine(str(path)).network_launch_s == 2.5e-4 and "the quantile 0.25" in path.read_text("utf-8")


def test_a_core_that_is_left_carries_messages(tmp_path: Path) -> None:
    assert cores_left([range(4)] * 2, 1) and not cores_left([range(4)] * 2, 2) and not cores_left([[0], [1]], 1)
    found, path = calibration(Nodes(1, 2), ""), tmp_path / "m.yaml"
    write_machine(found, path)
    assert "processor" not in path.read_text(encoding="utf-8").replace("device: ", "")
    assert load_machine(str(path)).processor is None


def test_what_was_not_measured_is_said() -> None:
    text = machine_text(calibration(Nodes(1, 2))).replace("\n# ", " ")
    assert "Not measured: reduce_scatter, all_to_all, exchange, collectives that send more than 1 MiB a rank" in text
    assert f"{len(SHAPE_LIST) - 2} of {len(SHAPE_LIST)} shapes" in text


def test_a_collective_takes_what_was_measured_of_its_kind_group_and_size() -> None:
    machine = calibration(Nodes(1, 4)).machine
    over = machine.over_model
    assert over("all_gather", 2, 1 << 12) == pytest.approx(2) and over("all_gather", 2, 1 << 20) == pytest.approx(8)
    assert over("all_gather", 2, 1 << 16) == pytest.approx(4)  # between, as logarithms
    assert over("all_gather", 2, 16) == pytest.approx(2) and over("all_gather", 2, 1 << 30) == pytest.approx(8)
    assert over("all_gather", 8, 1 << 12) == pytest.approx(3)  # of the nearest group
    assert over("all_reduce", 2, 1 << 12) == pytest.approx(1)  # half and twice: the mean of their logarithms
    assert over("exchange", 2, 1 << 12) == 1.0  # not measured: by the links


@pytest.mark.parametrize("ranks", [2, 4])
def test_where_blocks_go_another_way_nothing_lies_between(ranks: int) -> None:
    """Up to 64 KiB to each other rank a collective is as fast as measured below, behind it as slow as above."""
    edge = float((ranks - 1) << 16)
    sizes = (edge / 16, 0.9 * edge, 1.1 * edge, 16 * edge)
    misfit = Misfit(kind="all_gather", ranks=ranks, bytes=sizes, over_model=(0.2, 0.1, 0.8, 1.0))
    assert misfit.short_bytes == edge
    assert [misfit.at(n) for n in (*sizes[:2], edge, edge + 1, *sizes[2:])] == pytest.approx(
        [0.2, 0.1, 0.1, 0.8, 0.8, 1.0]
    )
    assert 0.1 < misfit.at(0.3 * edge) < 0.2 and 0.8 < misfit.at(4 * edge) < 1.0
    one_way = replace(misfit, over_model=(0.2, 0.5, 0.8, 1.0))
    assert one_way.short_bytes == 0.0 and 0.5 < one_way.at(edge) < 0.8


@pytest.mark.parametrize("seed", range(8))
def test_more_bytes_than_were_measured_move_no_faster_than_links_do(seed: int) -> None:
    """A collective of the model's alpha and beta, measured at random sizes: its seconds rise beyond by the
    model's seconds at least, and by the same factor where it was slower than modelled."""
    draw = random.Random(f"beyond {seed}")
    sizes = sorted(draw.sample(range(1 << 10, 1 << 20), 3))
    over = tuple(2 ** draw.uniform(-4, 2) for _ in sizes)
    misfit = Misfit(kind="all_reduce", ranks=2, bytes=tuple(map(float, sizes)), over_model=over)
    beta = 1e-9 * draw.uniform(1, 9)
    least = sizes[-1] * beta
    seconds = [(n * beta, n * beta * misfit.at(n)) for n in (sizes[-1] * 2 ** draw.uniform(0, 9) for _ in range(9))]
    for modelled, taken in [(least, least * over[-1]), *sorted(seconds)]:
        assert taken - least * over[-1] == pytest.approx(max(over[-1], 1) * (modelled - least))


def test_a_step_takes_what_was_measured() -> None:
    """A layer's gather and its convolutions, with the machine as the links say and as it was measured."""
    machine = calibration(Nodes(1, 2)).machine
    plain = replace(machine, misfits=(), probes=())
    layer = {"name": "a", "layer": "conv2d", "input": [2, 64, 28, 28], "out_channels": 64, "kernel_size": 3,
             "padding": 1, "grid": {"C": 2}, "algorithm": "stationary-x"}  # fmt: skip
    one = compile_layer(layer_from_dict(layer))
    steps, links = (
        {s.result: s.cost for s in schedule_cost(one.schedule, Model(one.space, m, "float32")).steps}
        for m in (machine, plain)
    )
    sent = steps["dy_gathered"].sent_bytes
    assert steps["dy_gathered"].seconds == pytest.approx(
        machine.over_model("all_gather", 2, sent) * links["dy_gathered"].seconds, rel=1e-6
    )
    for result, phase in (("y_partial", "forward"), ("dx", "backward_data"), ("dw", "backward_filter")):
        reached = steps[result].flops / (steps[result].seconds - machine.launch_s)
        assert reached == pytest.approx(machine.convolution_flops_per_s("float32", phase, (32, 64, 9, 1568, 1, 1)))


def test_a_convolution_reaches_what_those_like_it_do() -> None:
    """As measured where it was; in between better than the mean does; never beyond all that was measured."""

    def true(shape: tuple[float, ...]) -> float:
        work = math.log2(math.prod(shape))
        return 0.8 / (1 + 2.0 ** (0.5 * (22 - work)) + 2.0 / shape[0] + 1.0 / shape[1])

    rng = random.Random(1)
    plain = [s for s in SHAPE_LIST if s.groups == 1]
    sizes = [(s.channels, s.filters, s.kernel**2, s.pixels) for s in plain]
    probes = tuple(
        Probe(channels=c, filters=f, taps=t, pixels=n, efficiency=(true((c, f, t, n)),) * 3) for c, f, t, n in sizes
    )
    off: list[float] = []
    mean = statistics.mean(math.log(p.efficiency[0]) for p in probes)
    for p in probes:
        assert efficiency_like(probes, "forward", p.shape) == pytest.approx(p.efficiency[0], rel=0.1)
    for _ in range(100):
        a, b = rng.sample(sizes, 2)
        between = tuple(math.sqrt(m * n) for m, n in zip(a, b, strict=True))
        wanted = math.log(true(between))
        off.append(
            abs(math.log(efficiency_like(probes, "forward", (*between, 1, 1))) - wanted) / max(abs(mean - wanted), 0.1)
        )
    assert statistics.median(off) < 0.5
    held = left_out(probes, "forward")
    assert len(held) == len(probes)
    rest = probes[:3] + probes[4:]
    assert held[3] == efficiency_like(rest, "forward", probes[3].shape) / probes[3].efficiency[0]
    shuffled = [
        replace(p, efficiency=q.efficiency) for p, q in zip(probes, rng.sample(probes, len(probes)), strict=True)
    ]
    ways = [statistics.median(abs(math.log(r)) for r in of) for of in (held, left_out(tuple(shuffled), "forward"))]
    assert ways[0] < 0.5 * ways[1]  # where like shapes are no more alike than others nothing can be said of one
    least, most = (pick(p.efficiency[0] for p in probes) for pick in (min, max))
    for far in ((1, 1, 1, 1, 1, 1), (1 << 14, 1 << 14, 121, 1 << 20, 1, 1), (1, 1, 1, 1 << 20, 4096, 64)):
        assert least <= efficiency_like(probes, "forward", far) <= most


def test_a_network_and_a_layer_price_a_convolution_alike() -> None:
    """Channels, filters and groups of a rank by its block, or by its roles."""
    machine = calibration(Nodes(1, 2)).machine
    for groups, letter, algorithm in ((1, "C", "stationary-x"), (1, "F", "stationary-y"), (8, "G", "stationary-x")):
        layer = {"name": "a", "layer": "conv2d", "input": [2, 64, 12, 12], "out_channels": 96, "kernel_size": 3,
                 "padding": 1, "groups": groups, "grid": {letter: 2}, "algorithm": algorithm}  # fmt: skip
        one = compile_layer(layer_from_dict(layer))
        costs = schedule_cost(one.schedule, Model(one.space, machine, "float32")).steps
        price = Price(one.layer.grid, machine, "float32")
        for s in costs:
            if s.kind.startswith("conv_"):
                operation = Convolution(s.phase, one.layer.conv)
                roles = {letter: (letter,)}
                assert price.local(operation, 0, roles) == pytest.approx(s.cost.time_ps, rel=1e-6)


def test_other_commands_take_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    write_machine(calibration(Nodes(2, 2)), path)
    layer = "name: a\nlayer: conv1d\ninput: [4, 4, 64]\nout_channels: 4\nkernel_size: 3\ngrid: {a: 4}\n"
    (tmp_path / "a.yaml").write_text(layer)
    network = "name: n\ninput: [4, 4, 16, 16]\nnodes:\n  - {kind: conv, out_channels: 8, kernel_size: 3, padding: 1}\n"
    (tmp_path / "n.yaml").write_text(network)
    for command in (
        ["compile", tmp_path / "a.yaml", "--emit", "cost", "--machine", path],
        ["plan", tmp_path / "n.yaml", "--machine", path, "--ranks", "4", "--json"],
    ):
        done = CliRunner().invoke(cli, [str(word) for word in command])
        assert done.exit_code == 0, done.output


def test_a_file_that_reads_back_otherwise_is_not_written(tmp_path: Path) -> None:
    found = calibration(Nodes(1, 2))
    other = replace(found, machine=replace(found.machine, launch_s=1.23456e-5))  # more digits than the file has
    with pytest.raises(Exception, match="reads back as another machine"):
        write_machine(other, tmp_path / "m.yaml")
    assert not list(tmp_path.iterdir())


def test_noise_and_a_convolution_above_the_peak_are_said() -> None:
    nodes = Nodes(1, 2)
    fast = replace(LOCAL, convolution_flops_per_s=2e11)
    machine = machine_of("m", nodes, messages_of(nodes), fast, SHAPES, LAUNCH_S)
    assert (dict(machine.peak_flops)["float32"], machine.efficiency) == (2e11, 1.0)
    found = replace(calibration(nodes), local=fast, machine=machine)
    assert "the convolution's below" in machine_text(found)
    assert "Unsteady" not in machine_text(found)
    noisy = {
        key: replace(m, timings=tuple(replace(t, spread=0.8) for t in m.timings)) for key, m in found.messages.items()
    }
    assert "Unsteady: repeats of a message differ by 80%" in machine_text(replace(found, messages=noisy))


@pytest.mark.parametrize(
    ("output", "said"),
    [("no/such/m.yaml", "cannot write"), ("m.json", "no name for a machine file"), (".", "is a folder")],
)
def test_outputs_that_cannot_be_are_refused(tmp_path: Path, output: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        check_output(tmp_path / output)
    assert said in caught.value.fact
    assert caught.value.hint
