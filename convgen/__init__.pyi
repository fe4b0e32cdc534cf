from convgen.losses import criterion as criterion
from convgen.one_set import methods as methods
from convgen.parallel import from_torch as from_torch
from convgen.parallel import parallelize as parallelize
from convgen.serving import serve as serve
from convgen.streams import stream as stream

__version__: str
