r"""Training as people write it with libraries beside torch: timm, Accelerate, Lightning. See training_steps.py.

    pip install --target build/training --no-deps accelerate lightning lightning-utilities pytorch-lightning \
        torchmetrics timm torchvision huggingface_hub safetensors pyyaml tqdm psutil packaging
    PYTHONPATH=build/training python bench/training_scripts.py
"""

from __future__ import annotations

import importlib
import logging
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from training_steps import STEPS, Make, Scripts, Trained, loop

from convgen.spec.torchvision_ops import declare_operators

script = Scripts()
of_bfloat16: Any = partial(script, limit=0.02, unit=2.0**-8)


def library(name: str) -> Any:
    """A module of a library that imports torchvision, which may be built for another torch."""
    declare_operators()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    return importlib.import_module(name)


def averaged(make: Make, kind: str, **how: Any) -> Trained:
    model = make()
    average = getattr(library("timm.utils"), kind)(model, decay=0.9, **how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = loop(model, optimizer, make.batches(), lambda: average.update(model)) | {"ema": average.module}
    if kind == "ModelEmaV3" and not how:
        x, labels = next(make.batches(1))
        with torch.no_grad():
            found["validation"] = [F.cross_entropy(average(x), labels).item()]
    return found


def with_optimizer(make: Make, name: str, lr: float, batches: int = STEPS, **how: Any) -> Trained:
    """timm's factory, with its groups without decay."""
    model = make()
    optimizer = library("timm.optim").create_optimizer_v2(model, name, lr, 0.05, **how)
    return loop(model, optimizer, make.batches(batches))


def of_timm(name: str, run: Any, *given: Any, limit: float = 1e-9, **how: Any) -> None:
    script(f"timm: {name}", needs="timm", limit=limit)(lambda make: run(make, *given, **how))


LARS: dict[str, Any] = {"momentum": 0.9, "trust_coeff": 0.01}
of_timm("ModelEmaV3", averaged, "ModelEmaV3")
of_timm(
    "ModelEmaV3, foreach=False, without buffers", averaged, "ModelEmaV3", use_warmup=True, foreach=False,
    exclude_buffers=True,
)  # fmt: skip
of_timm("ModelEmaV2", averaged, "ModelEmaV2")
of_timm("LAMB", with_optimizer, "lamb", 0.02)
of_timm("LAMB, foreach=True", with_optimizer, "lamb", 0.02, foreach=True)
of_timm("LARS", with_optimizer, "lars", 5.0, **LARS)
of_timm("LARS, foreach=True", with_optimizer, "lars", 5.0, **LARS, foreach=True)
of_timm("Muon, of convolutions too (bfloat16)", with_optimizer, "muon", 0.02, 2, limit=0.1)
of_timm("Adafactor", with_optimizer, "adafactor", 0.02)
of_timm("Lion", with_optimizer, "lion", 0.01)
of_timm("Adan", with_optimizer, "adan", 0.01)
of_timm("Lookahead of RAdam", with_optimizer, "lookahead_radam", 0.02)


@script("timm: adaptive clipping", needs="timm")
def adaptive(make: Make) -> Trained:
    model, clip = make(), library("timm.utils").adaptive_clip_grad
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for x, labels in make.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        clip(model.parameters(), 0.01)
        optimizer.step()
    return {"model": model}


@script("timm: NativeScaler with clipping", needs="timm")
def native_scaler(make: Make) -> Trained:
    model, scaler = make(), library("timm.utils").NativeScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, labels in make.batches():
        optimizer.zero_grad()
        scaler(F.cross_entropy(model(x), labels), optimizer, clip_grad=0.1, parameters=model.parameters())
    return {"model": model}


def adamw(model: nn.Module, low: bool) -> torch.optim.Optimizer:
    """Of gradients in bfloat16 one whose steps follow small ones, too, and not their signs."""
    return torch.optim.AdamW(model.parameters(), 0.01, eps=0.1 if low else 1e-8)


def accelerated(make: Make, every: bool, low: bool = False) -> Trained:
    """
    Args:
        every: the network is prepared, too; else it is on all ranks already.
        low: computed in bfloat16, with float32 parameters.
    """
    accelerate = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the process that forked this one
    model, norms = make("net float32" if low else "net"), list[float]()
    optimizer = adamw(model, low)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16" if low else "no", gradient_accumulation_steps=2,
        step_scheduler_with_optimizer=False,
    )  # fmt: skip
    if every:
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    else:
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
    for x, labels in make.batches():
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = F.cross_entropy(model(x.float() if low else x), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return {"model": accelerator.unwrap_model(model), "norms": norms}


script("Accelerate: all but the network prepared", needs="accelerate")(lambda make: accelerated(make, False))
script("Accelerate: the network prepared, too (DDP)", needs="accelerate")(lambda make: accelerated(make, True))
of_bfloat16("Accelerate, bf16: all but the network prepared", needs="accelerate")(
    lambda make: accelerated(make, False, True)
)
of_bfloat16("Accelerate, bf16: the network prepared, too (DDP)", needs="accelerate")(
    lambda make: accelerated(make, True, True)
)


def lightning(make: Make, low: bool) -> Trained:
    home: Any = library("lightning.pytorch")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: list[float] = []

    class Task(home.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            x, labels = batch
            x = x.float() if low else x
            loss = F.cross_entropy(self.model(x), labels)
            self.log("loss", loss)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self, low)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    model = make("net float32" if low else "net")
    plugin = library("lightning.fabric.plugins.environments").LightningEnvironment()
    trainer = home.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False, gradient_clip_val=0.1,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, plugins=[plugin],
        default_root_dir=make.folder, precision="bf16-mixed" if low else None,
    )  # fmt: skip
    trainer.fit(Task(model), torch.utils.data.DataLoader(list(make.batches(4)), batch_size=None))  # type: ignore[arg-type]
    return {"model": model, "losses": losses}


script("Lightning: Trainer, clipping, accumulation", needs="lightning")(lambda make: lightning(make, False))
of_bfloat16("Lightning: Trainer, bf16-mixed", needs="lightning")(lambda make: lightning(make, True))


def fabric(make: Make, low: bool) -> Trained:
    home: Any = library("lightning.fabric")
    fabric = home.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if low else None)
    network, norms = make("net float32" if low else "net"), list[float]()
    optimizer = adamw(network, low)
    model, optimizer = fabric.setup(network, optimizer)
    for x, labels in make.batches():
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x.float() if low else x), labels))
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
    return {"model": network, "norms": norms}


script("Lightning: Fabric", needs="lightning")(lambda make: fabric(make, False))
of_bfloat16("Lightning: Fabric, bf16-mixed", needs="lightning")(lambda make: fabric(make, True))
