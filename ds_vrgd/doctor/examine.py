"""One check, from settings to rows and an exit status."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass

import torch

from ds_vrgd.doctor.settings import Settings
from ds_vrgd.doctor.table import Row, rows_of
from ds_vrgd.doctor.trial import Refused, Trial

EXACT, NOT_EXACT, REFUSED = 0, 1, 2


@dataclass
class Outcome:
    """Rows of the table, and the command's exit status."""

    rows: list[Row]
    status: int


def examine(settings: Settings, named: str | None, steps: int) -> Outcome:
    """Train and compare; a collective of all ranks, whose status is the same on each, and whose rows are rank 0's.

    Args:
        settings: for these ranks.
        named: the user's model as ``module:function``, or None.
        steps: optimizer steps.
    """
    try:
        trial = Trial(settings, named)
    except ValueError as error:
        return Outcome([("refused", str(error))], REFUSED)
    except Refused as refused:
        if not isinstance(refused.__cause__, ValueError):
            traceback.print_exception(refused.__cause__, file=sys.stderr)
        return Outcome([("refused", reason) for reason in refused.reasons], REFUSED)
    found = trial.run(steps)
    status = [NOT_EXACT if found.faults else EXACT]
    torch.distributed.broadcast_object_list(status, src=0)  # the other ranks have no reference
    return Outcome(rows_of(found), status[0])
