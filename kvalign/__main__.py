"""`python -m kvalign` is the `kvalign` command."""

import sys

from kvalign.app.cli.main import main

sys.exit(main())
