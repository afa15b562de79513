"""`python -m kvalign` is the `kvalign` command."""

import sys

from kvalign.cli import main

sys.exit(main())
