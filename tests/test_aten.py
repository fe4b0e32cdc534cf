"""Operators of ATen, family by family, in modules that give several outputs: described, none of them whole; on ranks
what the module computes on one device, with gradients of inputs and parameters, buffers, and bytes as VOLUME says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks_on_ranks import check, draw_parameters, imported, random_input, truth_of
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from convgen.errors import InputError
from convgen.operations.dropout import Bernoulli, Dropout, Noise
from convgen.operations.row import At
from convgen.spec.aten.describe import describe
from convgen.verify.graph_reference import run_graph

pytestmark = pytest.mark.usefixtures("in_doubles")
Tensor = torch.Tensor
Outputs = tuple[Tensor, ...]
GRIDS = ({"N": 2}, {"H": 2, "W": 2}, {"C": 3})
SHAPE = (3, 8, 9, 7)


@pytest.fixture
def in_doubles() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_default_dtype(before)


class Family(nn.Module):
    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts)


def normalised(x: Tensor, *norms: nn.Module) -> Outputs:
    mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
    written = (x - mean) / (variance + 1e-6).sqrt()
    batch, group, instance, layer, rms, plain = norms
    return batch(x), group(x), instance(x), layer(x), rms(x), plain(x), written, F.local_response_norm(x, 3)


def interpolated(x: Tensor) -> Outputs:
    return (
        F.interpolate(x, scale_factor=1.5), F.interpolate(x, (5, 11), mode="nearest-exact"),
        F.interpolate(x, scale_factor=2, mode="bilinear"),
        F.interpolate(x, (13, 4), mode="bilinear", align_corners=True),
        F.interpolate(x, scale_factor=(0.7, 1.3), mode="bicubic"), F.interpolate(x, (4, 4), mode="area"),
        F.interpolate(x, (4, 5), mode="bilinear", antialias=True), F.interpolate(x[..., 0], 14, mode="linear"),
        F.interpolate(x[:, :, None], (2, 12, 7), mode="trilinear"),
    )  # fmt: skip


def padded(x: Tensor, circular: nn.Module, same: nn.Module) -> Outputs:
    sides = (1, 2, 0, 3)
    modes = ("constant", "reflect", "replicate", "circular")
    return (*(F.pad(x, sides, mode=mode) for mode in modes), F.pad(x, (-1, 1, 2, -2), value=3.0), circular(x), same(x))


def convolved(x: Tensor, *layers: nn.Module) -> Outputs:
    return tuple(layer(x) for layer in layers)


def put_together(x: Tensor) -> Outputs:
    a, b, c = x.split([3, 1, 4], 1)
    first, *_, last = x.chunk(3, 2)
    assigned = x.clone()
    assigned[:, :3] = 0.5
    assigned[:, 5] = x[:, 1]
    return (
        torch.cat([c, a, a], 1), torch.stack([x, -x], 2), first, last, x[:, -1], x[:, ::2, 1:-1, 3], x[:, [2, 0, 2]],
        torch.concatenate([a, c], 1), x + torch.concat([a.type_as(b), b, c], 1) * torch.zeros_like(x),
        sum(torch.meshgrid(x[0, 0, 0], x[0, 0, :, 1], indexing="xy")) + sum(torch.meshgrid(x[0, 0, :, 1], x[1, 0, 0])),
        torch.stack(x.unbind(1)[2:4], -1), x.flip(2, 3), torch.roll(x, (2, -1), (2, 3)), assigned,
        b.expand(-1, 4, -1, -1),
        x.repeat(1, 2, 1, 1), x.repeat_interleave(2, 1),
    )  # fmt: skip


def viewed(x: Tensor) -> Outputs:
    n, c, h, w = x.shape
    shuffled = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
    return (
        F.pixel_shuffle(x, 2), F.pixel_unshuffle(x[..., :8, :6], 2), F.channel_shuffle(x, 4), shuffled,
        x.flatten(2).permute(2, 0, 1), x[:, :1].squeeze(1).unsqueeze(-1), x.movedim(1, -1), x.mT.reshape(n, c, -1),
    )  # fmt: skip


def multiplied(x: Tensor, head: nn.Module, bilinear: nn.Module) -> Outputs:
    rows, square = x[:, 0], x[:, :, :7]
    return (
        head(x), x @ rows[0].T, x.mT @ x[:1], x @ x[0, 0, 0],
        torch.addmm(rows[0, :1], rows[0].T, rows[1], beta=3, alpha=2),
        torch.baddbmm(square[:, 0], rows.mT, x[:, 2], alpha=0.5), torch.einsum("nchw,ncij->nhwij", x[:, :2], x[:, :2]),
        torch.einsum("...hw,cw->...c", x, rows[0]), torch.einsum("nchw->hc", x), torch.outer(x[0, 0, 0], x[0, 0, :, 0]),
        torch.einsum("nchw,nchw->", x, x), weighted(x, bilinear), F.linear(x, rows[0], rows[0, 0, :1]),
    )  # fmt: skip


def weighted(x: Tensor, convolution: nn.Module) -> Tensor:
    """With standardised weights, which are values like any other."""
    w: Any = convolution.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    return F.conv2d(x, w, padding=1)


def attended(x: Tensor, module: nn.Module) -> Outputs:
    attend, rows = F.scaled_dot_product_attention, x[:, 0]
    seen, added = x[:1, :1, :, 0, None] + x[:1, :1, None, :, 1] > -1, x[:, :1] @ x[:, 1:2].mT
    return (
        attend(x, x, 2 * x), attend(rows, rows, rows), attend(x, x, x, is_causal=True), attend(x, x, x, attn_mask=seen),
        attend(x, x, x, attn_mask=added, scale=0.3), attend(x[:, None], x[:, None], x[:, None]),
        module(rows, rows, rows)[0],
    )  # fmt: skip


def reduced(x: Tensor) -> Outputs:
    return (
        x.mean((2, 3)), x.sum(1, keepdim=True), x.amax(1), x.amax((2, 3), keepdim=True), x.max(1)[0], x.std(1),
        x.var((2, 3)),
        x.norm(dim=1), F.normalize(x, dim=1), x.logsumexp(1), x.softmax(1), F.log_softmax(x, -1), x.cumsum(1),
        x.topk(2, 1)[0],
        torch.var_mean(x, (0, 2, 3), correction=0)[0], x.mean(), x.max(), x * x.argmax(1, keepdim=True),
    )  # fmt: skip


def activated(x: Tensor, one: nn.Module, several: nn.Module) -> Outputs:
    functions = (F.rrelu, F.hardswish, F.gelu, F.silu, F.logsigmoid, F.celu, F.softplus, F.mish, F.elu, F.hardtanh)
    return (*(f(x) for f in functions), F.glu(x, 1), one(x), several(x), x.clamp(min=0.1).sqrt(), x.detach() * x)


def lost(x: Tensor) -> Outputs:
    target, shares = (x[:, 0] > 0).long(), x.softmax(1)
    cross = F.cross_entropy
    return (
        cross(x, target), cross(x, target, label_smoothing=0.1, reduction="sum"), cross(x, target, ignore_index=0),
        cross(x, target, x[0, :, 0, 0].abs().detach(), reduction="none"),
        cross(x, shares.detach(), label_smoothing=0.1),
        F.nll_loss(x.log_softmax(1), target), F.mse_loss(x, 2 * x), F.l1_loss(x, 2 * x), F.smooth_l1_loss(x, 2 * x),
        F.binary_cross_entropy_with_logits(x, shares), F.kl_div(x, shares.detach(), reduction="batchmean"),
    )  # fmt: skip


def made(x: Tensor, table: nn.Module) -> Outputs:
    rows = torch.arange(x.shape[3], dtype=x.dtype)
    wide = torch.cat([x, torch.zeros_like(x), x.new_ones(x.shape[0], 2, *x.shape[2:])], 1)
    return x + rows, wide, x * torch.full((8, 1, 1), 2.0), table((x[:, 0, 0] > 0).long()), x.tril()


def sampled(x: Tensor) -> Outputs:
    points = x[:, :2].permute(0, 2, 3, 1).tanh()
    return F.grid_sample(x, points, align_corners=False), F.grid_sample(
        x, points, padding_mode="border", align_corners=True
    )


def pooled(x: Tensor) -> Outputs:
    n = x.shape[0]
    return (
        F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.adaptive_avg_pool2d(x, (4, 3)),
        F.adaptive_max_pool2d(x, 2), F.lp_pool2d(x.abs() + 0.1, 2, 2), F.max_pool2d(x, 2, return_indices=True)[0],
        F.fractional_max_pool2d(x, (3, 2), (5, 4), _random_samples=torch.linspace(0, 0.9, n * 16).view(n, 8, 2)),
    )  # fmt: skip


def patches(x: Tensor) -> Tensor:
    options = {"kernel_size": (2, 1), "dilation": (2, 1), "padding": (1, 0), "stride": (2, 1)}
    return F.fold(F.unfold(x, **options), (9, 7), **options)


def places(x: Tensor) -> Outputs:
    y, at = F.max_pool2d(x, 2, 2, return_indices=True)
    even = x[..., :8, :].clone()
    even[..., 1::2, :] = x[..., ::2, :][..., :4, :]
    return F.max_unpool2d(2 * y, at, 2, 2, output_size=(9, 7)), even


def by_number(x: Tensor) -> Outputs:
    n, _, h, w = x.shape
    best, mask, several = x.argmax(1, keepdim=True), x > 0, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    put, added = x.clone(), torch.zeros(n, 4, h, w)
    put[mask] = 0.5
    put[:, [0, 3]] = x[:, [1, 2]]
    return (
        x.gather(1, best), torch.take_along_dim(x, best, 1), torch.zeros_like(x).scatter(1, best, 1.0) * x,
        torch.zeros(n, 4, h, w).scatter_add(1, several.view(1, -1, 1, 1).expand_as(x), x),
        added.index_add(1, several, x), x.index_fill(1, several[:2], 0.5), put, x[:, :, several[:3, None], several[:2]],
        x[torch.tensor([0, 2]), :, several[1:3]], F.one_hot(best[:, 0], 8) * x.permute(0, 2, 3, 1),
        torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0])) * x,
        x.index_put((several[:2], several[1:3]), torch.ones(h, w)),
        torch.zeros(n, 4, h, w).index_put((torch.arange(n)[:, None], several), x, accumulate=True),
    )  # fmt: skip


def since_2_13(x: Tensor) -> Outputs:
    """Torch 2.11 can't export a quantile of any number of samples, and has no derivative of the other."""
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13):
        return ()
    return torch.quantile(x, 0.3, dim=1), torch.stack(torch.aminmax(x, dim=2))


def in_other_words(x: Tensor) -> Outputs:
    """What is described as other operators, or as those that it is made of."""
    rows, pixels = x[:, 0], x.permute(0, 2, 3, 1)
    square = torch.eye(8) + torch.einsum("nchw,ndhw->ncd", x, x) / 100
    codes = torch.arange(40.0).view(5, 8).sin()
    return (
        x.unfold(2, 4, 2).unfold(3, 3, 3), torch.cdist(pixels.reshape(-1, 8), codes), torch.rot90(x, 1, (2, 3)),
        x.roll(5), *since_2_13(x), x.gather(1, x.argsort(1)),
        torch.linalg.vector_norm(x, float("inf"), dim=(2, 3)), torch.linalg.matrix_norm(x), torch.hstack([x, 2 * x]),
        torch.dstack([x, x]), torch.vstack([x, x]), F.cosine_similarity(x, x.flip(1)), F.pairwise_distance(x, 2 * x),
        torch.tensordot(x, codes, dims=([1], [1])), torch.diff(x, dim=2), torch.gradient(x, dim=(2, 3))[0],
        torch.linalg.inv(square), torch.linalg.det(square), torch.kron(rows[0, :2, :3], rows[0, :2, :2]),
        F.bilinear(pixels, pixels, torch.ones(4, 8, 8) / 64), x * ((x > 0) & (x < 1)), torch.special.expit(x),
        torch.linalg.cross(x[:, :3], x[:, 3:6], dim=1), torch.trapezoid(x, dim=3),
        F.triplet_margin_loss(x.mean((2, 3)), x.amax((2, 3)), x.amin((2, 3))),
        *(torch.renorm(x, p, d, norm) for p, d, norm in ((2, 1, 12.0), (1, 0, 400.0), (3, -1, 5.0))),
    )  # fmt: skip


class Recurrent(nn.Module):
    """Along rows and along columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.LSTM(8, 3, 2, bidirectional=True, batch_first=True), nn.GRU(8, 4, bias=False)

    def forward(self, x: Tensor) -> Outputs:
        n, c, h, w = x.shape
        columns = x.permute(2, 0, 3, 1).reshape(h, n * w, c)
        return self.rows(x.permute(0, 2, 3, 1).reshape(n * h, w, c))[0].view(n, h, w, -1), self.columns(columns)[1]


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "norms": lambda: Family(
        normalised, nn.BatchNorm2d(8), nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True), nn.LayerNorm([9, 7]),
        nn.RMSNorm(7), nn.BatchNorm2d(8, affine=False, track_running_stats=False),
    ),
    "interpolation": lambda: Family(interpolated),
    "pads": lambda: Family(
        padded, nn.Conv2d(8, 6, 3, padding=1, padding_mode="circular"), nn.Conv2d(8, 4, (4, 3), padding="same")
    ),
    "convolutions": lambda: Family(
        convolved, nn.Conv2d(8, 12, 3, 2, 2, dilation=2, groups=4), weight_norm(nn.Conv2d(8, 4, 3)),
        nn.ConvTranspose2d(8, 6, 4, 3, 1, output_padding=2, groups=2, dilation=2),
    ),
    "cat, split, slice": lambda: Family(put_together),
    "views": lambda: Family(viewed),
    "products": lambda: Family(multiplied, nn.Linear(7, 5), nn.Conv2d(8, 6, 3)),
    "attention": lambda: Family(attended, nn.MultiheadAttention(7, 1, batch_first=True)),
    "reductions": lambda: Family(reduced),
    "activations": lambda: Family(activated, nn.PReLU(), nn.PReLU(8)),
    "losses": lambda: Family(lost),
    "constants, embeddings": lambda: Family(made, nn.Embedding(3, 4)),
    "samples": lambda: Family(sampled),
    "pooling": lambda: Family(pooled),
    "patches": lambda: Family(patches),
    "places": lambda: Family(places),
    "by number": lambda: Family(by_number),
    "in other words": lambda: Family(in_other_words),
    "recurrent": Recurrent,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_described_and_right_on_ranks(name: str) -> None:
    module = FAMILIES[name]()
    draw_parameters(module)
    given = imported(module, random_input(SHAPE), train=name == "norms")
    found = describe(given.graph.at(given.graph.batch))
    assert [given.graph.calls[n].op for n in found.whole] == []
    truth = truth_of(given)
    for grid in GRIDS:
        errors = check(given, grid, truth=truth)
        assert errors.right, f"{grid}: {errors}"


def test_what_no_row_describes_runs_whole() -> None:
    given = imported(Family(lambda x: (2 * x.roll(1, 0)).masked_scatter(x > 0, x)), random_input(SHAPE))
    found = describe(given.graph.at(3))
    assert [given.graph.calls[n].op for n in found.whole] == ["masked_scatter"]
    assert all(check(given, grid).right for grid in GRIDS)


def large(x: Tensor) -> Outputs:
    """Means and norms that float16 has, of numbers whose sums, and whose sums of squares, it has not."""
    y, small = 900 + 100 * x.half(), 1e-4 * x.half()
    wide = y.repeat(1, 1, 3, 3)
    return (
        wide.mean((0, 2, 3)), wide.mean(), wide.mean(1, keepdim=True), F.l1_loss(wide, 0 * wide),
        F.mse_loss(y / 9, 0 * y), F.smooth_l1_loss(wide, 0 * wide), y.norm(dim=(2, 3)), F.normalize(y, dim=1),
        F.cosine_similarity(y, y.flip(1)), torch.renorm(y, 2, 1, 500.0),
        torch._weight_norm(small, small[:, :1, :1, :1], 0), F.normalize(small, dim=1, eps=1e-6),
    )  # fmt: skip


def test_means_and_norms_that_float16_has_are_numbers() -> None:
    given = imported(Family(large), random_input(SHAPE))
    truth = truth_of(given)
    assert all(y.isfinite().all() for y in truth.ys)
    for grid in ({"N": 1}, *GRIDS, {"N": 4}):
        errors = check(given, grid, truth=truth)
        assert errors.outputs <= 4e-3 and not errors.volume, f"{grid}: {errors}"


@pytest.mark.parametrize(
    ("function", "whole"),
    [
        (lambda x: F.avg_pool2d(x, 3, 2, 1), ["avg_pool2d"]),
        (lambda x: F.max_pool2d(x, (3, 2), (2, 1), 1), []),
        (lambda x: F.max_pool2d(x.int(), (4, 2), 1, (2, 1)), []),
        (lambda x: F.interpolate(x.abs().to(torch.uint8), scale_factor=2, mode="bilinear"), ["upsample_bilinear2d"]),
    ],
)
def test_integers_are_pooled_and_interpolated_as_torch_does(function: Any, whole: list[str]) -> None:
    """Some are cut off or rounded between, which no row says; padding is none of the numbers."""
    given = imported(Family(function), (9 * random_input(SHAPE)).long() - 20)
    truth, found = truth_of(given), describe(given.graph.at(3))
    assert [given.graph.calls[n].op.partition(".")[0] for n in found.whole] == whole
    for grid in (*GRIDS, {"N": 4}):
        errors = check(given, grid, truth=truth)
        assert errors.outputs == 0 and not errors.volume, f"{grid}: {errors}"


def test_a_value_without_dimensions_has_what_torch_lets_it_have() -> None:
    def function(x: Tensor) -> Outputs:
        one = x.sum()
        spread, mean = torch.var_mean(one, correction=0)
        picked = one.index_select(0, torch.tensor([0]))
        return one.flip(0).sin(), spread, mean, one.std(correction=0), picked, one.squeeze(-1).cos()

    given = imported(Family(function), random_input(SHAPE))
    assert all(check(given, grid).right for grid in GRIDS)


def test_numbers_of_no_row_are_refused() -> None:
    x = random_input(SHAPE)
    x[0, 0, 0, :3] = torch.tensor([0.0, -8.0, 7.0])
    given = imported(Family(lambda x: x[:, x[0, 0, 0, :3].long()]), x)
    truth = truth_of(given)
    assert check(given, {"H": 2}, truth=truth).right
    for wrong in (8, -9):
        truth.xs[0].data[0, 0, 0, 1] = wrong
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            check(given, {"H": 2}, truth=truth)


def test_of_nothing_a_mean_is_no_number_and_a_product_is_one() -> None:
    def function(x: Tensor) -> Outputs:
        none = x[:, 3:3]
        shares = F.cross_entropy(x[:0], x[:0].softmax(1).detach())
        means = none.mean(1), none.var(1), F.mse_loss(none, 2 * none), shares
        return (*(x[:, 0] + y.nan_to_num(2.0) for y in means), none.prod(1) * x[:, 0], (none > 0).all(1) * x[:, 0])

    given = imported(Family(function), random_input(SHAPE))
    assert all(check(given, grid).right for grid in GRIDS)


# ---------------------------------------------------------------- what is drawn
SEED = torch.tensor([5, 0])


def ones(shape: tuple[int, ...], p: float, call: int) -> Tensor:
    return Bernoulli(shape, p, call).reference(SEED)[0]


def stochastic(x: Tensor) -> Outputs:
    kept = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.6).div_(0.6)
    dropped = F.dropout(x, 0.4, True)
    return F.dropout2d(x, 0.3, True), x + kept * x, dropped, F.dropout1d(x[0], 0.5, True), F.alpha_dropout(x, 0.3, True)


def stochastic_by_rule(x: Tensor) -> Outputs:
    n, c = x.shape[:2]
    numbers = {0: ones((n, c, 1, 1), 0.7, 2), 1: ones((n, 1, 1, 1), 0.6, 0), 3: ones((c, 9, 1), 0.5, 3)}
    (dropped,) = Dropout(tuple(x.shape), 0.4, 1).reference(x, SEED)
    alpha = ones(tuple(x.shape), 0.7, 4)
    slope = 1.7580993408473766
    a = 1 / ((slope * slope * 0.3 + 1) * 0.7) ** 0.5
    by_alpha = x * (alpha * a) + ((alpha - 1) * slope * a + slope * a * 0.3)
    return x * numbers[0] / 0.7, x + numbers[1] / 0.6 * x, dropped, x[0] * numbers[3] / 0.5, by_alpha


def test_masks_are_drawn_by_the_numbers_of_the_whole() -> None:
    """Of channels, of samples, of elements; whatever the grid."""
    x = random_input(SHAPE)
    given = imported(Family(stochastic), x)
    by_graph = run_graph(given.graph, {"x": x}, seed=(5, 0)).outputs.values()
    assert all(torch.allclose(a, b) for a, b in zip(by_graph, stochastic_by_rule(x), strict=True))
    for grid in GRIDS:
        errors = check(given, grid, reference=stochastic_by_rule, seed=5)
        assert errors.right, f"{grid}: {errors}"


class DropPath(nn.Module):
    """Stochastic depth as it was written before `bernoulli_`, and still is."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x.sin()
        kept = 0.75 + torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device)
        return x.sin().div(0.75) * kept.floor_()


def test_stochastic_depth_of_uniform_numbers_is_drawn_by_the_numbers_of_the_whole() -> None:
    module, x = DropPath(), random_input((9, 8, 9, 7))
    given = imported(module, x)
    assert given.graph.modes == ("train", "eval")

    def by_rule(x: Tensor) -> Tensor:
        return x.sin() / 0.75 * ones((9, 1, 1, 1), 0.75, 0)

    assert 0 < by_rule(x).count_nonzero() < x.numel()
    assert torch.allclose(run_graph(given.graph, {"x": x}, seed=(5, 0)).outputs["output"], by_rule(x))
    assert torch.equal(run_graph(given.graph, {"x": x}, training=False).outputs["output"], x.sin())
    for grid in GRIDS:
        errors = check(given, grid, reference=by_rule, seed=5)
        assert errors.right, f"{grid}: {errors}"
    module.eval()
    assert all(check(given, grid).right for grid in GRIDS)


def noisy(x: Tensor) -> Outputs:
    """What a variational autoencoder samples, a generator adds to its pixels, and an augmentation to its samples."""
    mean, spread = x.chunk(2, 1)
    sampled = mean + torch.exp(0.5 * spread) * torch.randn_like(spread)
    pixels = x + 0.1 * torch.randn(x.shape[0], 1, *x.shape[2:], dtype=x.dtype)
    return sampled, pixels, x * torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype), x - torch.rand_like(x)


def noisy_by_rule(x: Tensor) -> Outputs:
    (n, c, *rows), (mean, spread) = x.shape, x.chunk(2, 1)
    shapes = ((n, c // 2, *rows), (n, 1, *rows), (n, 1, 1, 1), (n, c, *rows))
    kinds = ("normal", "normal", "uniform", "uniform")
    a, b, u, v = (Noise(s, k, i).reference(SEED)[0] for i, (s, k) in enumerate(zip(shapes, kinds, strict=True)))  # type: ignore[arg-type]
    return mean + torch.exp(0.5 * spread) * a, x + 0.1 * b, x * u, x - v


def test_noise_is_drawn_by_the_numbers_of_the_whole() -> None:
    x = random_input(SHAPE)
    given = imported(Family(noisy), x)
    assert given.graph.modes == ("train", "eval")
    by_graph = run_graph(given.graph, {"x": x}, seed=(5, 0)).outputs.values()
    assert all(torch.allclose(a, b) for a, b in zip(by_graph, noisy_by_rule(x), strict=True))
    for grid in GRIDS:
        errors = check(given, grid, reference=noisy_by_rule, seed=5)
        assert errors.right, f"{grid}: {errors}"


def test_noise_is_spread_as_it_should_be() -> None:
    uniform, normal = (Noise((200, 50), k).local(0, whole_at((200, 50)), SEED)[0] for k in ("uniform", "normal"))
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.002
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(normal.mean()) < 0.03 and abs(normal.var() - 1) < 0.05 and abs((normal**4).mean() - 3) < 0.3


def whole_at(shape: tuple[int, ...]) -> At:
    return At({f"d{d}": (0, n) for d, n in enumerate(shape)}, (((0, 2),),), (((0, 2),),))


def test_attention_that_drops_is_written_out() -> None:
    given = imported(
        Family(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True)), random_input(SHAPE)
    )

    def by_rule(x: Tensor) -> Tensor:
        later = torch.full((9, 9), float("-inf")).triu(1)
        weights = (x @ x.mT / 7**0.5 + later).softmax(-1)
        return Dropout((3, 8, 9, 9), 0.2, 0).reference(weights, SEED)[0] @ x

    x = given.inputs[0]
    assert torch.allclose(run_graph(given.graph, {"x": x}, seed=(5, 0)).outputs["output"], by_rule(x))
    for grid in GRIDS:
        errors = check(given, grid, reference=by_rule, seed=5)
        assert errors.right, f"{grid}: {errors}"


@pytest.mark.parametrize("function", [lambda x: torch.poisson(x.abs()), lambda x: F.rrelu(x, training=True)])
def test_what_draws_and_is_not_described_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(InputError, match="draws random numbers"):
        describe(imported(Family(lambda x: x * function(x)), random_input(SHAPE)).graph.at(3))


class Regularised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.attend = nn.Dropout2d(0.3), nn.MultiheadAttention(7, 1, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        if self.training:
            x = x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.6).div_(0.6)
        rows = x[:, 0]
        return self.attend(rows, rows, rows, need_weights=False)[0]


def test_evaluation_of_what_was_compiled_for_training_draws_nothing() -> None:
    module = Regularised()
    draw_parameters(module)
    given = imported(module, random_input(SHAPE))
    assert given.graph.modes == ("train", "eval")
    module.eval()
    assert all(check(given, grid).right for grid in GRIDS)
