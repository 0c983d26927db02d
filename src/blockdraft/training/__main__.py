"""``accelerate launch -m blockdraft.training CONFIG.yaml key=value ...``: ``blockdraft train`` on many processes."""

import sys

from blockdraft.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
