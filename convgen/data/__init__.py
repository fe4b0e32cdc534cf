"""Reading and writing by region: a rank reads and writes its part of a file and nothing else.

    blocks = convgen.data.Blocks({"image": images, "target": masks}, net, mesh)
    for batch in blocks.loader(8, shuffle=True, seed=0, workers=2):
        model(batch["image"], batch["target"])

Arrays are whatever has a shape and slices: numpy's, mapped files, h5py's, zarr's, one of all samples or one a sample.

Source: docs/networks.md, The package; [SP] III-B, where a layer's input arrives distributed.
"""

from convgen.data.augment import Crop, Flip, Intensity, Noise, Rotate
from convgen.data.batches import Batches
from convgen.data.blocks import Batch, Blocks, Loader
from convgen.data.created import create
from convgen.data.opened import FileArray, open
from convgen.data.written import write

__all__ = [
    "Batch", "Batches", "Blocks", "Crop", "FileArray", "Flip", "Intensity", "Loader", "Noise", "Rotate", "create",
    "open", "write",
]  # fmt: skip
