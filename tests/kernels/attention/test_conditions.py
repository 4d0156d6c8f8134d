"""What each provider says it cannot do."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention.cases import BY_NAME, problem


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("cpu_flash", {}, "runs on cpu, the input is on cuda"),
        ("cpu_flash", {"device_type": "cpu", "dropout": 0.25}, r"no dropout, and 0\.25 of"),
        ("cuda_flash", {"device_type": "cpu"}, "runs on cuda, the input is on cpu"),
        ("cuda_flash", {"mask": "given"}, "takes no mask tensor"),
        ("cuda_flash", {"head_dim": 264}, "head_dim must be a multiple of 8 up to 256, it is 264"),
        ("cuda_flash", {"head_dim": 256, "capability": (8, 9)}, "head_dim 256 passes this GPU's shared memory"),
        ("cuda_flash", {"capability": (7, 5)}, r"compute capability 8\.0, this GPU has 7\.5"),
        ("cuda_flash", {"dtype": torch.float32}, r"takes bfloat16, float16, the input is torch\.float32"),
        ("cuda_flash", {"dropout": 1.0}, "cannot drop all"),
        ("cuda_flash", {"switched_off": frozenset({"cuda_flash"})}, "switched off in torch.backends.cuda"),
        ("cuda_flash", {"heads": 4096, "samples": 32}, r"passes 65535: 32 \* 4096"),
        ("cuda_cudnn", {"cudnn": 8900}, "needs cuDNN 9.0, found 8900"),
        ("cuda_cudnn", {"cudnn": 91200, "dropout": 0.125}, "cuDNN 91200 has no dropout"),
        ("cuda_cudnn", {"positions": 1}, "no sequence of length 1"),
        ("cuda_cudnn", {"deterministic": True}, "does not repeat bit for bit"),
        ("cuda_cudnn", {"head_dim": 136}, "up to 128, it is 136"),
        ("cuda_efficient", {"head_dim": 6, "dtype": torch.float32}, "multiple of 4, it is 6"),
        ("cuda_efficient", {"capability": (7, 0)}, r"bfloat16 needs compute capability 8\.0"),
    ],
)
def test_reasons(name, changes, words):
    reason = BY_NAME[name].reason_not(problem(**changes))
    assert reason is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)
