#!/usr/bin/env bash
# What only a GPU can show: lossless decoding, FlexAttention's gradients, one training run, and how close rounds come to what memory
# allows at Qwen3-8B's shape, in a few minutes, without a network.
#   bash scripts/gpu_check.sh            (any Python with torch >= 2.11, transformers >= 5.17; extra packages via PYTHONPATH)
#   bash scripts/gpu_check.sh cpu        (without a GPU: that the last part runs, with tiny shapes)
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [ "${1:-cuda}" = cpu ]; then
  exec python3 benchmarks/engine.py --tiny --device cpu --tokens 48
fi
python3 -c "import torch; print(torch.__version__, torch.cuda.get_device_name(0))"
python3 -m pytest -x -q -p no:cacheprovider tests/gpu
python3 benchmarks/engine.py
