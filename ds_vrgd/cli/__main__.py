"""``python -m ds_vrgd.cli``: the command ``ds-vrgd`` for launchers that start a module."""

import sys

from ds_vrgd_cli import main

if __name__ == "__main__":
    sys.exit(main())
