"""Networks as papers and their public code write them, small, in torch alone."""

from zoo.written.attention import ATTENTION
from zoo.written.detection import DETECTION
from zoo.written.idioms import IDIOMS
from zoo.written.layers import LAYERS
from zoo.written.papers import PAPERS
from zoo.written.waves import WAVES

WRITTEN = {**PAPERS, **DETECTION, **ATTENTION, **WAVES, **LAYERS, **IDIOMS}
