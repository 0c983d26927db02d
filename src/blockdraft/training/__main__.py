"""``accelerate launch -m blockdraft.training CONFIG.yaml key=value ...``: ``blockdraft train`` on many processes."""

import os
import sys

from blockdraft.cli.main import main

if __name__ == "__main__":
    status = main(["train", *sys.argv[1:]])
    # At the interpreter's end Gloo's threads may still hold tensors, and letting go of them then aborts a process whose work
    # is done (pytorch/pytorch, pull request 179291). Trackers and the process group were ended by the trainer.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
