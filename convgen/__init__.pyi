from convgen.losses import criterion as criterion
from convgen.parallel import from_torch as from_torch
from convgen.parallel import parallelize as parallelize
from convgen.serving import serve as serve

__version__: str
