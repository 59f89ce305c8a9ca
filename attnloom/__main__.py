"""`python -m attnloom` is the command `attnloom`."""

import sys

from attnloom.cli.main import main

sys.exit(main())
