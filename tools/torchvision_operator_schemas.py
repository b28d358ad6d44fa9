# SPDX-License-Identifier: Apache-2.0
"""Declares torchvision's operators before it is first imported.

For a CPU build of torch beside a CUDA build of torchvision; `fit_environment.py` puts
this file where it is needed, and has Python import it at every start.
"""

import sys
from typing import Any


class DeclareBeforeImport:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(DeclareBeforeImport)  # type: ignore[arg-type]
            from torch.library import Library

            library = Library("torchvision", "FRAGMENT")
            boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(f"nms{boxes}")
            library.define(f"qnms{boxes}")
            # A collected Library takes its operators along.
            sys.modules[__name__].__dict__["library"] = library


sys.meta_path.insert(0, DeclareBeforeImport)  # type: ignore[arg-type]
