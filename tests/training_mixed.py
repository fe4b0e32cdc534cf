"""Training in mixed precision as people write it, with torch alone: autocast, GradScaler, float32 copies of bfloat16
parameters. See training_steps.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_steps import Make, Scripts, Trained

script = Scripts()
LOW = 0.02  # of the relative error: some units in the last place of bfloat16
OVERFLOWS = 2  # the step in which something does
of_bfloat16: Any = partial(script, limit=LOW, unit=2.0**-8)


def everything(y: Tensor) -> Tensor:
    return y.float().sum() * 1e38


def one_class(y: Tensor) -> Tensor:
    return y[:, -1].float().sum() * 1e38


def nothing(y: Tensor) -> Tensor:
    return y.float().sum() * 0.0


def scaled(
    make: Make, others: Callable[[Tensor], Tensor] = nothing, of_filter: bool = False, of_sample: bool = False
) -> Trained:
    """A loop under autocast to float16 and GradScaler, which says in which steps the optimizer went.

    Args:
        others: is added to the loss of a step; of_filter: one filter's gradient overflows in it, of_sample: one sample
            does, which a single rank may have; there is no norm then, which would spread it.
    """
    model = make("discriminator float32" if of_sample else "net float32")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales, steps, at = list[float](), list[float](), [0]
    optimizer.register_step_post_hook(lambda *_: steps.append(at[0] + 1.0))

    def overflow(g: Any) -> Any:
        return g / (weight.detach() < 1.4).to(g.dtype) if at[0] == OVERFLOWS else g

    if of_filter:
        weight = model.get_parameter("bn2.weight")  # of which the last filter has the largest
        weight.register_hook(overflow)
    for at[0], (x, labels) in enumerate(make.batches()):
        if of_sample and at[0] == OVERFLOWS:
            x[-1] = torch.inf
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x.float())
            loss = F.softplus(-y.float()).mean() if of_sample else F.cross_entropy(y.float(), labels)
        loss = loss + others(y) if at[0] == OVERFLOWS else loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"model": model, "scales": scales, "steps": steps}


OVERFLOWING: dict[str, Any] = {
    "": {},
    ", everything overflows in a step": {"others": everything},
    ", one class overflows in a step": {"others": one_class},
    ", one filter's gradient overflows in a step": {"of_filter": True},
    ", one sample overflows in a step": {"of_sample": True},
}
for name, what in OVERFLOWING.items():
    script(f"autocast to float16, GradScaler{name}", limit=LOW, unit=2.0**-11)(partial(scaled, **what))


def autocast(make: Make, **how: Any) -> Trained:
    """Float32 parameters, which AdamW renews, computed in bfloat16."""
    model, losses = make("net float32"), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=0.1, **how)
    for x, labels in make.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x.float()), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return {"model": model, "losses": losses, "bytes": of_state(model)}


of_bfloat16("autocast to bfloat16, AdamW")(partial(autocast, foreach=False))
of_bfloat16("autocast to bfloat16, AdamW, foreach=True")(partial(autocast, foreach=True))
of_bfloat16("autocast to bfloat16, AdamW, fused=True")(partial(autocast, fused=True))


def of_state(model: Any) -> list[float]:
    """Bytes of an element of each parameter, buffer and gradient."""
    found = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    return [float(t.element_size()) for t in found]


def masters(make: Make, renew: Callable[[Any, Any], None], **how: Any) -> Trained:
    """bfloat16 parameters, each with a copy in float32, which the optimizer has and whose values come back."""
    model, losses = make("net bfloat16"), list[float]()
    parameters = [*model.parameters()]
    copies = [p.detach().clone().float().requires_grad_() for p in parameters]
    optimizer = torch.optim.SGD(copies, 0.05, 0.9, **how)
    for x, labels in make.batches():
        loss = F.cross_entropy(model(x.bfloat16()).float(), labels)
        loss.backward()
        for mine, p in zip(copies, parameters, strict=True):
            mine.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            renew(parameters, copies)
        model.zero_grad()
        losses.append(loss.item())
    kinds = [float(t.element_size()) for t in (*parameters, *copies, *(c.grad for c in copies))]
    return {"model": model, "losses": losses, "bytes": kinds}


def one_by_one(parameters: Any, copies: Any) -> None:
    for p, mine in zip(parameters, copies, strict=True):
        p.copy_(mine)


of_bfloat16("bfloat16 with float32 copies")(partial(masters, renew=one_by_one, foreach=False))
of_bfloat16("bfloat16 with float32 copies, foreach")(partial(masters, renew=torch._foreach_copy_, foreach=True))


def both(make: Make, **how: Any) -> Trained:
    """A network of bfloat16 and one of float32 in an optimizer, and a checkpoint between."""
    models, losses = [make("net bfloat16"), make("net float32")], list[float]()
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], 0.05, 0.9, **how)
    for i, (x, labels) in enumerate(make.batches()):
        optimizer.zero_grad()
        ys = [m(x.to(kind)).float() for m, kind in zip(models, (torch.bfloat16, torch.float32), strict=True)]
        loss = F.cross_entropy(sum(ys), labels)  # type: ignore[arg-type]
        loss.backward()
        losses.append(nn.utils.clip_grad_norm_([p for m in models for p in m.parameters()], 1.0).item())
        optimizer.step()
        losses.append(loss.item())
        if i == OVERFLOWS:
            file = io.BytesIO()
            torch.save({"models": [m.state_dict() for m in models], "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            state, models = torch.load(file), [make("net bfloat16"), make("net float32")]
            for m, saved in zip(models, state["models"], strict=True):
                m.load_state_dict(saved)
            optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], 0.05, 0.9, **how)
            optimizer.load_state_dict(state["optimizer"])
    kinds = [size for m in models for size in of_state(m)]
    moments = [float(s["momentum_buffer"].element_size()) for s in optimizer.state.values()]
    return {"low": models[0], "model": models[1], "losses": losses, "bytes": kinds + moments}


of_bfloat16("networks of bfloat16 and of float32 in an optimizer, a checkpoint")(partial(both, foreach=False))
of_bfloat16("networks of bfloat16 and of float32 in an optimizer, foreach")(partial(both, foreach=True))
