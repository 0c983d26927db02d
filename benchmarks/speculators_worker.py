"""Run in speculators' own environment: ``speculators_worker.py KIND FLAT SPECULATORS OUT TARGET``.

Loads the folder SPECULATORS with its own loader, and converts FLAT (z-lab's layout for KIND ``dflash``, SafeAILab's for ``eagle3``)
to OUT with its own converter. One line of JSON at the end.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.convert.dflash.converter import DFlashConverter
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.dflash import DFlashDraftModel
from speculators.models.eagle3 import Eagle3DraftModel

KINDS = {"dflash": (DFlashDraftModel, DFlashConverter), "eagle3": (Eagle3DraftModel, Eagle3Converter)}
# Copies of the target's tensors, which its converters and loaders add.
BORROWED = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}

model, converter = KINDS[sys.argv[1]]
flat, ours, out, target = (Path(argument) for argument in sys.argv[2:])
written = load_file(ours / "model.safetensors")
# The verifier is named by a short name in the file: give the loader a place on this disk.
config = model.config_class.from_pretrained(ours)
config.speculators_config.verifier.name_or_path = str(target)
state = model.from_pretrained(ours, config=config).state_dict()
loaded = all(torch.equal(state[name].cpu(), tensor.to(state[name].dtype)) for name, tensor in written.items())
converter().convert(flat, out, str(target), validate=False)
theirs = load_file(out / "model.safetensors")
names = written.keys() <= theirs.keys() and (theirs.keys() - written.keys()) <= BORROWED | {"lm_head.weight", "t2d", "d2t"}
same = names and all(torch.equal(theirs[name], tensor) for name, tensor in written.items())
detail = f"{len(written)} tensors to the bit; theirs besides: {', '.join(sorted(theirs.keys() - written.keys())) or 'none'}"
print(json.dumps({"loaded": loaded, "tensors": len(written), "same_tensors": bool(same), "tensors_detail": detail}))
