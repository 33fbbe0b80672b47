"""Root-mean-square layer norm (Zhang and Sennrich, 2019)."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each last-dimension vector to unit root mean square, then by ``weight``."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
