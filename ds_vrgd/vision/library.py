"""torchvision, imported where it is needed: small images do without."""

from __future__ import annotations

from typing import Any

from ds_vrgd.training.errors import InputError


def torchvision() -> Any:
    """The module.

    Raises:
        InputError: it is not there, or does not fit this torch.
    """
    try:
        import torchvision as module
        import torchvision.datasets
        import torchvision.transforms.v2
    except (ImportError, RuntimeError, OSError) as error:  # a release for another torch fails in all of these ways
        raise InputError(
            f"ImageNet needs torchvision, which cannot be imported ({error}); install the release that belongs to this "
            "torch: pip install 'ds_vrgd[vision]'"
        ) from error
    return module
