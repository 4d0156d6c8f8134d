"""te_fuser: Transformer models from small fusable operations, run as few, large kernels."""

from te_fuser import fusions, ops
from te_fuser.config import config
from te_fuser.fuser.fuser import Fuser
from te_fuser.fusions import fusion
from te_fuser.ops import FusableOperation
from te_fuser.sequential import Residual, Sequential

__all__ = ["FusableOperation", "Fuser", "Residual", "Sequential", "config", "fusion", "fusions", "ops"]
__version__ = "0.1.0"
