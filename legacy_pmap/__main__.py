"""`python -m legacy_pmap --traindir ... --datadir ...`."""

import sys

from .train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
