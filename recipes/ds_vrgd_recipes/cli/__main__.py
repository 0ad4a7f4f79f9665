"""``python -m ds_vrgd_recipes.cli``: the command for launchers that start a module."""

import sys

from ds_vrgd_recipes.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
