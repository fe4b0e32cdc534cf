"""The algorithms of the papers fall out of distributions and roles, step for step.

Numbers in the goldens' comments are those of [CF] section 3's listings.
"""

from __future__ import annotations

import re

import pytest
from generate import algorithm_problem
from passing import passed

from convgen.algebra.algorithms import ALGORITHMS, letters_of, stored_layouts
from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.redistribute import redistribute
from convgen.algebra.roles import nest
from convgen.algebra.space import Space
from convgen.passes.fuse_bias import FuseBias
from convgen.passes.share import Share
from convgen.program.build import lower
from convgen.program.nodes import Convert, Schedule
from convgen.program.text import show
from convgen.program.verify import verify


def layer(kernel: int = 3, stride: int = 1, pad: int = 1, rows: int = 16, groups: int = 1, bias: bool = False) -> Conv:
    spatial = tuple(Spatial(name, rows, kernel, stride, pad, pad) for name in "HW")
    return Conv(8, 64, 96, spatial, groups, bias)


def schedule_of(name: str, grid: dict[str, int], conv: Conv | None = None) -> Schedule:
    conv = conv or layer()
    problem = algorithm_problem(name, conv, Grid(tuple(grid.items())))
    space = Space(conv, problem.grid)
    naive = lower("s", space, problem.stored, problem.roles, bias=conv.bias)
    schedule = passed(naive, space, FuseBias(), Share())
    verify(schedule, space)
    return schedule


def steps(schedule: Schedule) -> list[str]:
    """The steps' text, one space between words."""
    return [re.sub(r" +", " ", line.strip()) for line in show(schedule).splitlines() if line.startswith("    ")]


def golden(text: str) -> list[str]:
    lines = (re.sub(r" +", " ", line.split("#")[0].strip()) for line in text.splitlines())
    return [line for line in lines if line]


def collectives(schedule: Schedule) -> list[tuple[str, Axes]]:
    return [(s.kind, s.over) for _, s in schedule.steps() if isinstance(s, Convert) and s.kind != "slice"]


def test_sample() -> None:
    """[CF] 3.1."""
    assert steps(schedule_of("sample", {"N": 4})) == golden("""
        %y = conv_forward %x, %w                   : y[N, *, *, *]         # (1)
        %dx = conv_backward_data %dy, %w           : x[N, *, *, *]         # (2)
        %dw_partial = conv_backward_filter %dy, %x : w[*, *] partial(N)    # (3)
        %dw = all_reduce %dw_partial over=N        : w[*, *]               # (4)
    """)


def test_stationary_x() -> None:
    """[CF] 3.2 on a grid (N, H, W, C); the halos that it leaves unsaid are exchanges."""
    assert steps(schedule_of("stationary-x", {"N": 2, "H": 2, "W": 2, "C": 2})) == golden("""
        %x_halo = exchange %x dim=H,W over=H,W                   : x[N, C, H+(1,1), W+(1,1)]
        %y_partial = conv_forward %x_halo, %w                    : y[N, *, H, W] partial(C)           # (1)
        %y = reduce_scatter %y_partial dim=F over=C              : y[N, C, H, W]                      # (2)
        %dy_gathered = all_gather %dy dim=F over=C               : y[N, *, H, W]                      # (3)
        %dy_halo = exchange %dy_gathered dim=H,W over=H,W        : y[N, *, H+(1,1), W+(1,1)]
        %dx = conv_backward_data %dy_halo, %w                    : x[N, C, H, W]                      # (4)
        %dw_partial = conv_backward_filter %dy_gathered, %x_halo : w[*, C] partial(N,H,W)             # (5)
        %dw = all_reduce %dw_partial over=N,H,W                  : w[*, C]                            # (6)
    """)


def test_stationary_y() -> None:
    """[CF] 3.3."""
    assert steps(schedule_of("stationary-y", {"N": 2, "H": 2, "W": 2, "F": 2})) == golden("""
        %x_gathered = all_gather %x dim=C over=F          : x[N, *, H, W]                             # (1)
        %x_halo = exchange %x_gathered dim=H,W over=H,W   : x[N, *, H+(1,1), W+(1,1)]
        %y = conv_forward %x_halo, %w                     : y[N, F, H, W]                             # (2)
        %dy_halo = exchange %dy dim=H,W over=H,W          : y[N, F, H+(1,1), W+(1,1)]
        %dx_partial = conv_backward_data %dy_halo, %w     : x[N, *, H, W] partial(F)                  # (3)
        %dx = reduce_scatter %dx_partial dim=C over=F     : x[N, F, H, W]                             # (4)
        %dw_partial = conv_backward_filter %dy, %x_halo   : w[F, *] partial(N,H,W)                    # (5)
        %dw = all_reduce %dw_partial over=N,H,W           : w[F, *]                                   # (6)
    """)


def test_stationary_w() -> None:
    """[CF] 3.4: x and y over both axes, each with the one inside that its phase gathers or scatters."""
    assert steps(schedule_of("stationary-w", {"N": 2, "C": 4, "F": 2})) == golden("""
        %x_gathered = all_gather %x dim=C over=F                     : x[N, C, *, *]                  # (1)
        %y_partial = conv_forward %x_gathered, %w                    : y[N, F, *, *] partial(C)       # (2)
        %y = reduce_scatter %y_partial dim=F over=C                  : y[N, (F,C), *, *]              # (3)
        %dy_gathered = all_gather %dy dim=F over=C                   : y[N, F, *, *]                  # (4)
        %dx_partial = conv_backward_data %dy_gathered, %w            : x[N, C, *, *] partial(F)       # (5)
        %dx = reduce_scatter %dx_partial dim=C over=F                : x[N, (C,F), *, *]              # (6)
        %dw_partial = conv_backward_filter %dy_gathered, %x_gathered : w[F, C] partial(N)             # (7)
        %dw = all_reduce %dw_partial over=N                          : w[F, C]                        # (8)
    """)


def test_stationary_w_hybrid() -> None:
    """[CF] 3.4 with all five axes: 32 ranks, seven collectives besides the two halos' one each."""
    schedule = schedule_of("stationary-w", {"N": 2, "H": 2, "W": 2, "C": 2, "F": 2})
    assert collectives(schedule) == [
        ("all_gather", ("F",)),
        ("exchange", ("H", "W")),
        ("reduce_scatter", ("C",)),
        ("all_gather", ("C",)),
        ("exchange", ("H", "W")),
        ("reduce_scatter", ("F",)),
        ("all_reduce", ("N", "H", "W")),
    ]


@pytest.mark.parametrize(("one", "letter", "name"), [("F", "C", "stationary-x"), ("C", "F", "stationary-y")])
def test_stationary_w_with_an_axis_of_one_rank(one: str, letter: str, name: str) -> None:
    """[CF] 3.4: "we can recover them by making the F or C processor grid dimension be size 1"."""
    grid = {"N": 2, "H": 2, letter: 4}
    assert steps(schedule_of("stationary-w", {**grid, one: 1})) == steps(schedule_of(name, grid))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_nothing_travels_on_one_rank(name: str) -> None:
    letters = {a: 1 for a in ALGORITHMS[name].letters if a != "D"}
    assert steps(schedule_of(name, letters)) == golden("""
        %y = conv_forward %x, %w           : y[*, *, *, *]
        %dx = conv_backward_data %dy, %w   : x[*, *, *, *]
        %dw = conv_backward_filter %dy, %x : w[*, *]
    """)


@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_spatial_takes_halos_and_one_all_reduce(kernel: int) -> None:
    """[SP] III-A: a halo of floor(K/2) rows of x in forward and of dy in backward, and an all-reduce of dw."""
    o = kernel // 2
    conv = layer(kernel, 1, o, rows=32)
    assert steps(schedule_of("spatial", {"N": 2, "H": 2, "W": 2}, conv)) == golden(f"""
        %x_halo = exchange %x dim=H,W over=H,W          : x[N, *, H+({o},{o}), W+({o},{o})]
        %y = conv_forward %x_halo, %w                   : y[N, *, H, W]
        %dy_halo = exchange %dy dim=H,W over=H,W        : y[N, *, H+({o},{o}), W+({o},{o})]
        %dx = conv_backward_data %dy_halo, %w           : x[N, *, H, W]
        %dw_partial = conv_backward_filter %dy, %x_halo : w[*, *] partial(N,H,W)
        %dw = all_reduce %dw_partial over=N,H,W         : w[*, *]
    """)


def test_integrated() -> None:
    """[INT] Eq. 5: y gathered and dx summed over the model axis, dw summed over the batch axis."""
    assert steps(schedule_of("integrated", {"N": 2, "F": 2})) == golden("""
        %y_local = conv_forward %x, %w                   : y[N, F, *, *]
        %y = all_gather %y_local dim=F over=F            : y[N, *, *, *]
        %dy_slice = slice %dy dim=F                      : y[N, F, *, *]
        %dx_partial = conv_backward_data %dy_slice, %w   : x[N, *, *, *] partial(F)
        %dx = all_reduce %dx_partial over=F              : x[N, *, *, *]
        %dw_partial = conv_backward_filter %dy_slice, %x : w[F, *] partial(N)
        %dw = all_reduce %dw_partial over=N              : w[F, *]
    """)


def test_integrated_with_domains() -> None:
    """[INT] Eq. 6: halos besides, and dw summed over the domains too."""
    assert collectives(schedule_of("integrated", {"N": 2, "H": 2, "F": 2})) == [
        ("exchange", ("H",)),
        ("all_gather", ("F",)),
        ("exchange", ("H",)),
        ("all_reduce", ("F",)),
        ("all_reduce", ("N", "H")),
    ]


def test_stationary_w_hands_its_transposed_output_to_the_next_layer() -> None:
    """[CF] 3.4: "no additional data movement is required": the next layer gives the two axes the opposite roles."""
    grid = Grid((("c", 2), ("f", 2)))
    conv = Conv(8, 64, 64, layer().spatial)
    space = Space(conv, grid)
    here = stored_layouts("stationary-w", conv, {"C": ("c",), "F": ("f",)})
    after = stored_layouts("stationary-w", conv, {"C": ("f",), "F": ("c",)})
    assert after["x"].axes == here["y"].axes
    assert redistribute(space, Layout("x", here["y"].axes), after["x"]) == ()
    assert after["y"].axes == here["x"].axes


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("groups", [2, 4, 32])
def test_a_split_by_groups_sends_nothing(name: str, groups: int) -> None:
    assert collectives(schedule_of(name, {"G": 2}, layer(groups=groups))) == []


def test_groups_and_samples_sum_dw_over_samples_only() -> None:
    schedule = schedule_of("sample", {"N": 2, "G": 4}, layer(groups=32, bias=True))
    assert collectives(schedule) == [("all_reduce", ("N",)), ("all_reduce", ("N",))]


@pytest.mark.parametrize("name", ["spatial", "integrated"])
def test_one_by_one_with_stride_2_has_no_halo(name: str) -> None:
    """Rows at odd places are read by nobody: forward and backward-data exchange nothing."""
    schedule = schedule_of(name, {"N": 1, "H": 2, "W": 2}, layer(1, 2, 0))
    assert collectives(schedule) == [("all_reduce", ("H", "W"))]


def test_a_strided_halo_is_narrower_than_half_the_kernel_on_one_side() -> None:
    """ResNet's first layer, 7x7 with stride 2: 3 and 2 rows of x, 1 and 2 of dy, where K//2 is 3."""
    schedule = schedule_of("spatial", {"H": 4}, layer(7, 2, 3, rows=224))
    types = schedule.types()
    assert types["x_halo"].windows[2] == Window(3, 2)
    assert types["dy_halo"].windows[2] == Window(1, 2)
    space = Space(layer(7, 2, 3, rows=224), schedule.grid)
    row = 8 * 64 * 224  # N * C * W
    moves = space.moves(types["x"], types["x_halo"]) // row
    assert moves.tolist() == [[0, 3, 0, 0], [2, 0, 3, 0], [0, 2, 0, 3], [0, 0, 2, 0]]


def test_bias_is_added_after_the_sum_and_its_gradient_summed_over_samples_and_rows() -> None:
    schedule = schedule_of("stationary-x", {"N": 2, "H": 2, "C": 2}, layer(bias=True))
    text = steps(schedule)
    assert golden("%y = add_bias %y_summed, %bias : y[N, C, H, *]")[0] in text
    assert text[-2:] == golden("""
        %db_partial = sum_bias %dy               : bias[C] partial(N,H)
        %db = all_reduce %db_partial over=N,H    : bias[C]
    """)


def test_weights_sharded_over_samples_are_gathered_and_scattered() -> None:
    """What none of the papers has: w's shards live on the sample axis."""
    conv, grid = layer(), Grid((("data", 4),))
    stored = {
        "x": Layout("x", (("data",), (), (), ())),
        "w": Layout("w", (("data",), ())),
        "y": Layout("y", (("data",), (), (), ())),
    }
    space = Space(conv, grid)
    schedule = passed(lower("s", space, stored, dict.fromkeys(PHASES, nest([("data", "N")]))), space, Share())
    verify(schedule, space)
    assert [kind for kind, _ in collectives(schedule)] == ["all_gather", "all_gather", "reduce_scatter"]


def test_stored_by_channel_convolved_by_sample() -> None:
    """Storage and role differ: two all-to-alls and a gathered w instead of a reduce-scatter of partial sums."""
    conv, grid = layer(), Grid((("a", 4),))
    stored = {
        "x": Layout("x", ((), ("a",), (), ())),
        "w": Layout("w", (("a",), ())),
        "y": Layout("y", ((), ("a",), (), ())),
    }
    space = Space(conv, grid)
    schedule = passed(lower("s", space, stored, dict.fromkeys(PHASES, nest([("a", "N")]))), space, Share())
    verify(schedule, space)
    assert steps(schedule)[:4] == golden("""
        %x_moved = all_to_all %x dim=N,C over=a      : x[a, *, *, *]
        %w_gathered = all_gather %w dim=F over=a     : w[*, *]
        %y_local = conv_forward %x_moved, %w_gathered : y[a, *, *, *]
        %y = all_to_all %y_local dim=N,F over=a      : y[*, a, *, *]
    """)


def test_rows_of_the_input_reuse_the_halo_of_dy() -> None:
    """dw split by input rows: x in blocks, dy with the halo that backward-data has fetched."""
    conv, grid = layer(), Grid((("a", 4),))
    stored = stored_layouts("spatial", conv, {"H": ("a",)})
    space = Space(conv, grid)
    roles = dict.fromkeys(PHASES, nest([("a", "H")])) | {"backward_filter": nest([("a", "H")], "input")}
    schedule = passed(lower("s", space, stored, roles), space, Share())
    verify(schedule, space)
    assert golden("%dw_partial = conv_backward_filter %dy_halo, %x rows=input : w[*, *] partial(a)")[0] in steps(
        schedule
    )
    assert schedule.held() == ()


def test_letters_of_a_grid_are_its_axes() -> None:
    assert letters_of(Grid((("N", 2), ("H", 4)))) == {"N": ("N",), "H": ("H",)}
