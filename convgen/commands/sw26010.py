"""`convgen sw26010 ...`: the mesh emulator and its reports."""

from __future__ import annotations

import click

from convgen.commands.sw26010_kernels import (
    conv_command,
    gemm_command,
    operations_command,
    pool_command,
    transform_command,
)
from convgen.commands.sw26010_paper import dma_command, latency_command, table2_command
from convgen.commands.sw26010_scale import (
    allreduce_command,
    io_command,
    network_command,
    packing_command,
    profile_command,
    table3_command,
)


@click.group("sw26010")
def sw26010() -> None:
    """The SW26010 core group of swCaffe: GEMM, convolution and all-reduce, emulated and modelled."""


for command in (
    gemm_command, conv_command, transform_command, pool_command, operations_command, dma_command, table2_command,
    latency_command, allreduce_command, io_command, packing_command, network_command, profile_command, table3_command,
):  # fmt: skip
    sw26010.add_command(command)
