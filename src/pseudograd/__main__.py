"""``python -m pseudograd`` is the command ``pseudograd``."""

import sys

from pseudograd.cli import main

sys.exit(main())
