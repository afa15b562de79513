"""`python -m kvalign` is the `kvalign` command."""

import sys

from kvalign.app.cli import main

sys.exit(main())
