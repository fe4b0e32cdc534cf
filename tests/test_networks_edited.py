"""A network's program as text: read back it is the same program; edited it is what the text says, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from free_networks import free_network, imported
from networks_on_ranks import with_passes
from operation_cases import a_grid
from sampling import cases_of
from test_networks_again import laid_out
from test_networks_free import Branches, a_network, compare
from test_networks_papers import norms
from test_wide import Normed

from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_network, compile_text
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.start_halos import StartHalos
from convgen.passes.widen_halos import WidenHalos
from convgen.plan.program.edited import read_text
from convgen.program.network_text import show
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph

FILE = "s.txt"


def read(graph: Graph, text: str) -> CompiledNetwork:
    return compile_text(graph, read_text(text, FILE))


def same(one: CompiledNetwork) -> None:
    text = show(one.program)
    again = read(one.graph, text)
    assert show(again.program) == text
    assert again.package().files == one.package().files


@pytest.mark.parametrize("seed", cases_of(2, "test_any_program_reads_back"))
def test_any_program_reads_back(seed: int) -> None:
    """With any roles and storage, gradients' rows, chunks, halos in pieces or behind others, and buckets."""
    draw = Random(f"text {seed}")
    module, x = a_network(draw)
    graph, _ = graph_of(module, (x,), name="net")
    for _ in range(3):
        same(free_network(draw, graph, a_grid(draw)))


def test_blocks_that_are_computed_again_and_statistics_of_parts_read_back() -> None:
    again, local = laid_out(("one", "three"), N=2), norms("N=2,H=2", "local")
    assert "  again: one, three\n" in show(again.program) and "  statistics: local\n" in show(local.program)
    same(again)
    same(local)


class Fixed(torch.nn.Module):
    """A convolution by a buffer, whose gradient nothing asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.ones(4, 2, 3, 3))
        self.conv = torch.nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.nn.functional.conv2d(x, self.get_buffer("kernel")))


def test_gradients_that_nothing_asks_for_read_back() -> None:
    graph, _ = graph_of(Fixed(), (torch.zeros(4, 2, 8, 8),), name="net")
    some = [free_network(draw, graph, a_grid(draw)) for draw in map(Random, range(4))]
    assert any("  never asked for:\n" in show(one.program) for one in some)
    for one in some:
        same(one)


def test_rows_that_are_one_and_a_halo_that_moments_hide_read_back() -> None:
    one = with_passes(normed({"H": 2}), WidenHalos(), StartHalos(), BucketGradients(0))
    assert one.program.joined and any(row.ahead for row in one.program.rows)
    same(one)


def test_blocks_that_are_computed_again_read_back_where_their_rows_are_one() -> None:
    """Blocks are the network's: of fewer rows both of these would be one block."""

    def block() -> torch.nn.Sequential:
        pairs = ((torch.nn.Conv2d(2, 2, 3, padding=1, bias=False), torch.nn.ReLU()) for _ in range(10))
        return torch.nn.Sequential(*(one for pair in pairs for one in pair))

    module = torch.nn.Sequential(torch.nn.Sequential(block(), block()), torch.nn.Conv2d(2, 2, 1))
    graph, _ = graph_of(module, (torch.zeros(2, 2, 40, 8),), name="net")
    one = compile_network(graph, Grid((("H", 2),)), again=("0.1",), passes=(WidenHalos(),))
    assert one.program.joined and [s.path for s in one.program.again] == ["0.1"]
    same(one)


# ---- edited


@pytest.fixture(scope="module")
def network() -> tuple[Branches, torch.Tensor, Graph, str]:
    """One with a bucket and a halo in pieces, and its text."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    module, x = Branches(Random("planted"), 3), torch.randn(4, 3, 12, 12)
    torch.set_default_dtype(torch.float32)
    graph, _ = graph_of(module, (x,), name="net")
    program = compile_network(graph, Grid((("N", 2), ("H", 2)))).program
    return module, x, graph, show(BucketGradients(0).run(StartHalos(only="stem").run(program)))


def followed(graph: Graph, text: str) -> tuple[CompiledNetwork, int]:
    """What compiles when the lines of errors are taken out and put in, and how often that was wanted."""
    for times in range(4):
        try:
            return read(graph, text), times
        except InputError as error:
            assert error.notes, error
            said = [(*note.label.split(), note.text) for note in error.notes]
            kept: list[str] = []
            for number, line in enumerate(text.splitlines(), 1):
                kept += [new for at, sign, new in said if (at, sign) == (str(number), "+")]
                kept += [line] * all((at, sign) != (str(number), "-") for at, sign, _ in said)
            text = "\n".join(kept)
    raise AssertionError(text)


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for before, after in pairs:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


EDITS: dict[str, Callable[[str], str]] = {
    "a value's storage": lambda text: changed(text, (": pool[N, *, H, *]", ": pool[N, H, *, *]")),
    "a row's roles": lambda text: changed(text, ("%norm {d0=N d2=H}", "%norm {d0=N d1=H}")),
    "a gradient's roles": lambda text: changed(text, ("gradient {d0=N}\n", "gradient {d1=(N,H)}\n")),
    "a parameter's storage": lambda text: changed(
        text, ("parameter deep.weight[*, *, *, *]", "parameter deep.weight[(N,H), *, *, *]")
    ),
    "no bucket": lambda text: re.sub(r"    .*%bucket_1.*\n", "", text),
    "a halo waited for at once": lambda text: changed(
        re.sub(r"    %stem = .* interior .*\n    wait %stem.x\n", "", text),
        ("%stem.x = start", "%stem.x ="),
        ("weight boundary", "weight"),
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_program_is_as_right(
    edit: str, network: tuple[Branches, torch.Tensor, Graph, str], tmp_path: Path
) -> None:
    module, x, graph, text = network
    one, _ = followed(graph, EDITS[edit](text))
    assert show(one.program) != text
    net = imported(one.package().files, tmp_path)
    torch.set_default_dtype(torch.float64)
    compare(module, x, net, one.program.grid, one.program)
    torch.set_default_dtype(torch.float32)


def normed(grid: dict[str, int]) -> CompiledNetwork:
    graph, _ = graph_of(Normed(), (torch.zeros(2, 3, 16, 16),), name="net")
    one = compile_network(graph, Grid(tuple(grid.items())))
    return replace(one, program=one.plain, other=one.plain)


def test_rows_that_a_person_makes_one() -> None:
    """With one halo, as the pass makes it; but not rows between which another reads."""
    one = normed({"H": 2})
    line = "    %b_sum = centred_relu_conv_forward %a, %norm_coefficients, %b.weight {d2=H} : b_sum[*, *, H, *]\n"
    text = re.sub(r"    %(norm|relu) = (centred|relu) .*\n", "", show(one.program))
    text = re.sub(r"    %b_sum = conv_forward .*\n", line.replace("d2=H", "H=H"), text)
    made, _ = followed(one.graph, text)
    wide = WidenHalos().run(one.plain)
    assert made.program.joined == wide.joined and made.program.values == wide.values
    assert [(r.roles, r.fetch, r.store, r.back) for r in made.program.rows] == [
        (r.roles, r.fetch, r.store, r.back) for r in wide.rows
    ]
    wrong = show(made.program).replace("%a, %norm_coefficients, %b.weight", "%a, %norm_coefficients, %a.weight")
    with pytest.raises(InputError, match="no row of net"):
        read(one.graph, wrong)
    moments = r"    %norm_moments = moments %a .*\n"
    apart = re.sub(r"    %norm = centred .*\n", "", re.sub(moments, "", show(one.program)))
    apart = apart.replace("%relu = relu %norm", "%relu = centred_relu %a, %norm_coefficients")
    with pytest.raises(InputError, match="no row of net"):
        read(one.graph, apart)


def at(text: str, line: str) -> int:
    """The number of the line that holds so much."""
    (number,) = (n for n, one in enumerate(text.splitlines(), 1) if line in one)
    return number


# What is edited, the line that the refusal names, and a word of it.
WRONG: dict[str, tuple[str, str, str, str]] = {
    "a removed collective": ("    %mean = all_reduce %mean over=H : y[N, *]\n", "", "%gate_sum = ", "is missing here"),
    "a collective over other axes": (
        "%mul.dx1 = all_reduce %unsqueeze_2 over=H",
        "%mul.dx1 = all_reduce %unsqueeze_2 over=N",
        "%mul.dx1",
        "does not follow",
    ),
    "an unknown row": ("relu = relu %norm", "relu = gelu %norm", "relu = gelu", "its next row is '%relu = relu %norm'"),
    "a row too few": (
        "    %relu = relu %norm {d0=N d2=H} : relu[N, *, H, *]\n",
        "",
        "%pool = ",
        "'%relu = relu %norm'",
    ),
    "a wrong operand": ("%pool = average_pool %relu", "%pool = average_pool %norm", "%pool = average", "no row of net"),
    "swapped waits": (
        "    wait %bucket_1\n    wait %bucket_2\n",
        "    wait %bucket_2\n    wait %bucket_1\n",
        "wait %bucket_2",
        "is missing here",
    ),
    "a wait too early": (
        "interior {N=N H=H} : stem[N, *, H, *]\n    wait %stem.x\n",
        "interior {N=N H=H} : stem[N, *, H, *]\n",
        "boundary {N=N H=H} : stem",
        "is missing here",
    ),
    "no gradient's row": (
        "conv_backward_data gradient interior",
        "conv_backward_filter gradient interior",
        "filter gradient",
        "no gradient of a row",
    ),
    "an axis that is not there": ("input x[N, *, H, *]", "input x[N, *, W, *]", "input x", "axes are N, H"),
    "an axis twice": ("input x[N, *, H, *]", "input x[N, *, N, *]", "input x", "each axis once"),
    "dimensions too few": ("input x[N, *, H, *]", "input x[N, *, H]", "input x", "4 dimensions, its layout 3"),
    "a value that is not there": ("input x[N, *, H, *]", "input x[N, *, H, *]\n  input z[N]", "input z", "no value z"),
    "an index that is not there": ("%deep.weight {N=N}", "%deep.weight {M=N}", "%deep_sum = ", "no index M"),
    "a role twice": ("%deep.weight {N=N}", "%deep.weight {N=N H=N}", "%deep_sum = ", "an axis has one role"),
    "a role of the one group": ("%up.weight {N=N}", "%up.weight {N=N G=H}", "%up_sum = ", "can't run with these"),
    "a way that is not there": ("%deep.weight {N=N}", "%deep.weight way=7 {N=N}", "%deep_sum = ", "has ways 0 to"),
    "a halo of no exchange": (
        "%deep_sum.x = all_gather",
        "%deep_sum.x = start all_gather",
        "%deep_sum.x",
        "can't be started early",
    ),
    "chunks that are too many": (
        "%deep.weight {N=N}",
        "%deep.weight chunk 1/9 of N {N=N}",
        "%deep_sum = ",
        "9 chunks of N",
    ),
    "a sum in no bucket": ("%gate.dx1, ", "", "%gate_sum.dx,dw = ", "is missing here"),
    "a step in a bucket that is none": (
        "%head.dx1, ",
        "%head.dx7, ",
        "%bucket_1 = start",
        "%head.dx7 is no all_reduce",
    ),
    "another network": ("network net on", "network other on", "network other", "the network is net"),
    "words behind": ("return output = %head", "return output = %head now", "return output", "does not follow"),
    "no text of a network": ("network net on", "schedule net on", "schedule net", "cannot read"),
    "unknown statistics": (
        " {\n  input x",
        " {\n  statistics: globe\n  input x",
        "statistics: globe",
        "no statistics globe",
    ),
    "a block that is not there": (" {\n  input x", " {\n  again: stem\n  input x", "again: stem", "no block 'stem'"),
    "rows that can't be one": (
        "%norm = affine %norm_normal, %norm.weight, %norm.bias {d0=N d2=H} : norm[N, *, H, *]\n"
        "    %relu = relu %norm {d0=N d2=H} : relu[N, *, H, *]",
        "%relu = affine_relu %norm_normal, %norm.weight, %norm.bias {d0=N d2=H} : relu[N, *, H, *]",
        "%relu = affine_relu",
        "rows can't be one",
    ),
    "a text cut short": ("  return output = %head\n}\n", "", "update %deeper.num_batches", "a closing brace"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_with_its_line(what: str, network: tuple[Branches, torch.Tensor, Graph, str]) -> None:
    before, after, line, word = WRONG[what]
    _, _, graph, text = network
    edited = changed(text, (before, after))
    with pytest.raises(InputError) as refused:
        read(graph, edited)
    assert refused.value.where == f"{FILE}:{at(edited, line)}", refused.value
    assert word in str(refused.value)


def test_what_random_draws_begin_with_is_not_split() -> None:
    """Ranks take both of its numbers apart: a rank that has one of them can't draw."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    graph, _ = graph_of(module, (torch.zeros(4, 8),), name="net")
    text = changed(show(compile_network(graph, Grid((("N", 2),))).program), ("convgen.seed[*]", "convgen.seed[N]"))
    with pytest.raises(InputError, match="every rank has all of it") as refused:
        read(graph, text)
    assert refused.value.where == f"{FILE}:{at(text, 'buffer convgen.seed')}"


def test_the_text_of_another_graph_is_refused(network: tuple[Branches, torch.Tensor, Graph, str]) -> None:
    other, _ = graph_of(torch.nn.Conv2d(3, 4, 3), (torch.zeros(4, 3, 12, 12),), name="net")
    with pytest.raises(InputError, match="no row of net") as refused:
        read(other, network[3])
    assert refused.value.where == f"{FILE}:{at(network[3], '%stem = conv_forward %x, %stem.weight interior')}"
