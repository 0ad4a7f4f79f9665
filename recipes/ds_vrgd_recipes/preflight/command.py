"""``ds-vrgd doctor --cluster``: can these nodes train together?"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from functools import partial
from pathlib import Path

from ds_vrgd.doctor.ranks import run_as_rank
from ds_vrgd.doctor.report import render, to_json
from ds_vrgd.engines.deepspeed.launchers import adopt_launcher
from ds_vrgd_recipes.preflight.cluster import check_cluster, join


def run(options: argparse.Namespace) -> int:
    """Compare the nodes of all ranks that a launcher has started, or check this node alone.

    Args:
        options: ``output``, the folder that the run will write to (None for the current one); ``free``, the GB that
            must be free there (None for 1); ``json``.

    Returns:
        The exit status: 0 if the nodes are ready, else 1.
    """
    try:
        launched = adopt_launcher()
    except ValueError as error:
        print(f"error: {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        return 1
    output, least_free = options.output or Path(), 1e9 * (1.0 if options.free is None else options.free)
    if launched:
        outcome = run_as_rank(partial(check_cluster, alone=False), output, least_free, join=join)
    else:
        outcome = check_cluster(output, least_free, alone=True)
    if os.environ.get("RANK", "0") == "0":
        if options.json:
            options.result = to_json(outcome)
        else:
            print(render(outcome.rows), flush=True)
    return outcome.status
