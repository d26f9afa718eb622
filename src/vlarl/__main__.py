"""`python -m vlarl` is `vlarl`."""

import sys

from vlarl.cli import main

if __name__ == "__main__":
    sys.exit(main())
