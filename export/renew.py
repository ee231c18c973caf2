"""`python -m export renew`: give a drafter of version 0.2 or earlier its target's present identity."""

from __future__ import annotations

import json
import os
from pathlib import Path

from outrider_core.models.drafter_arrays import CONFIG_FILE
from outrider_core.models.identity import former_identity, model_identity
from outrider_core.models.moa_config import DrafterError
from outrider_core.models.target import DEFAULT_TARGET, resolve_target


def renew_drafter(folder: Path, target: str | None = None) -> bool:
    """Write the identity of `target` (default: the one the drafter's notes name) into the drafter's config.

    Returns False where it stands there already. Only the ends of the weights can be compared, because no more was
    noted when the drafter was trained. Raises DrafterError where the drafter is of another target, and TargetError.
    """
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_text())
        known = values["target_hash"]
        target = target or values.get("notes", {}).get("target") or DEFAULT_TARGET
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DrafterError(f"{folder}: no drafter's {CONFIG_FILE} there, so this is not a drafter folder") from None
    found = resolve_target(target)
    identity = model_identity(found)
    if known == identity:
        return False
    if known != former_identity(found):
        raise DrafterError(
            f"{folder} was trained on target {known}, which {target} has never been; give the one it was trained on "
            "with --target"
        )
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps({**values, "target_hash": identity}, indent=2) + "\n")
    os.replace(aside, path)
    return True
