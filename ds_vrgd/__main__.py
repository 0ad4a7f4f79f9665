"""Run a program with ds_vrgd imported before it: ``deepspeed --module ds_vrgd train.py --deepspeed_config X.json``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

USAGE = """\
usage: python -m ds_vrgd PROGRAM.py [ARGUMENT ...]
       python -m ds_vrgd -m MODULE [ARGUMENT ...]

Run a program in which a DeepSpeed JSON may name the optimizers of ds_vrgd, without a change to the program. A launcher
starts it the same way: deepspeed --module ds_vrgd PROGRAM.py --deepspeed_config X.json. The command line of ds_vrgd
itself is ds-vrgd."""


def main() -> int:
    """Run the program that the command line names; return the exit status where it names none."""
    arguments = sys.argv[1:]
    # DeepSpeed's launcher puts --local_rank first; the program expects it, too.
    launcher = [arguments.pop(0)] if arguments and arguments[0].startswith("--local_rank") else []
    is_module = arguments[:1] == ["-m"]
    program, *rest = (arguments[1:] if is_module else arguments) or [""]
    if not program or program.startswith("-"):
        asked = program in ("-h", "--help")
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    sys.argv = [program, *launcher, *rest]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
