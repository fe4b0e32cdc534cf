"""Models at small configurations, a table a library: by name what makes each, and the shape of its input."""

from collections.abc import Mapping

from zoo.diffusers import DIFFUSERS
from zoo.makers import Make
from zoo.monai import MONAI
from zoo.segmentation import SMP
from zoo.spandrel import RESTORATION
from zoo.timm import TIMM
from zoo.torchvision import VISION
from zoo.transformers import HF
from zoo.written import WRITTEN

LIBRARIES: Mapping[str, Mapping[str, Make]] = {
    "torchvision": VISION,
    "timm": TIMM,
    "monai": MONAI,
    "segmentation": SMP,
    "diffusers": DIFFUSERS,
    "transformers": HF,
    "spandrel": RESTORATION,
    "written": WRITTEN,
}
MODELS: Mapping[str, Make] = {name: make for table in LIBRARIES.values() for name, make in table.items()}
