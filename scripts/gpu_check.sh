#!/usr/bin/env bash
# What only a GPU can show: lossless decoding, FlexAttention's gradients, one training run, in two minutes, without a network.
#   bash scripts/gpu_check.sh            (any Python with torch >= 2.11, transformers >= 5.17; extra packages via PYTHONPATH)
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -c "import torch; print(torch.__version__, torch.cuda.get_device_name(0))"
python3 -m pytest -x -q -p no:cacheprovider tests/gpu
