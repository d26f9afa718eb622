"""`python -m vlarl.cli`."""

import sys

from vlarl.cli import main

sys.exit(main())
