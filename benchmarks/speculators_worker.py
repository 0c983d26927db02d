"""Run in speculators' own environment: ``speculators_worker.py ZLAB SPECULATORS OUT TARGET``.

Loads the folder SPECULATORS with its own loader, and converts ZLAB to OUT with its own converter. One line of JSON at the end.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.convert.dflash.converter import DFlashConverter
from speculators.models.dflash import DFlashDraftModel

zlab, ours, out, target = (Path(argument) for argument in sys.argv[1:])
written = load_file(ours / "model.safetensors")
# The verifier is named by a short name in the file: give the loader a place on this disk.
config = DFlashDraftModel.config_class.from_pretrained(ours)
config.speculators_config.verifier.name_or_path = str(target)
model = DFlashDraftModel.from_pretrained(ours, config=config)
state = model.state_dict()
loaded = all(torch.equal(state[name].cpu(), tensor.to(state[name].dtype)) for name, tensor in written.items())
DFlashConverter().convert(zlab, out, str(target), validate=False)
theirs = load_file(out / "model.safetensors")
borrowed = {"embed_tokens.weight", "lm_head.weight", "t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight"}
names = (theirs.keys() - borrowed) == written.keys()
same = names and all(torch.equal(theirs[name], tensor) for name, tensor in written.items())
detail = f"{len(written)} tensors to the bit; theirs besides: {', '.join(sorted(theirs.keys() - written.keys())) or 'none'}"
print(json.dumps({"loaded": loaded, "tensors": len(written), "same_tensors": bool(same), "tensors_detail": detail}))
