"""``python -m ds_vrgd.cli``: the command where no script is installed."""

import sys

from ds_vrgd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
