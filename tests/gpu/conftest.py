"""Collected only where there is a GPU; ``scripts/gpu_check.sh`` runs exactly these."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
