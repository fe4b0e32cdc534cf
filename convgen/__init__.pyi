from convgen.losses import criterion as criterion
from convgen.parallel import from_torch as from_torch
from convgen.parallel import parallelize as parallelize

__version__: str
