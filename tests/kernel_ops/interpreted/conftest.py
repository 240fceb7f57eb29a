"""Where there is no GPU, Triton's kernels are interpreted: numpy executes them, program after program."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so before any module of kernels.gpu is imported.
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_for_numpy_2_4(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes loop bounds by ``int(array)`` of one element, which numpy refuses since 2.4."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_for_numpy_2_4
