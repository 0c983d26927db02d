"""The result of a run: a drafter folder in its kind's layout, with a card that says what it learnt from and what it is worth."""

import json
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from blockdraft.drafters.eagle3 import Eagle3, Eagle3Config
from blockdraft.drafters.network import DFlashConfig
from blockdraft.drafters.shortlist import write_shortlist
from blockdraft.files import write_whole
from blockdraft.formats import eagle3, zlab
from blockdraft.load import digest_of, load_drafter
from blockdraft.training.config import TrainConfig
from blockdraft.training.evaluate import Real, by_source, decode_held_out, fresh
from blockdraft.training.run import Run

Measured = dict[str, tuple[Real, Real]]


def write_drafter(
    run: Run, folder: Path, weights: dict[str, Tensor], step: int, judged: bool, measured: Measured | None = None
) -> Path:
    """Write the weights of ``step`` in bfloat16, ``target.json`` (the target they were learnt from) and ``README.md``.

    Args:
        judged: whether ``step`` is the best by real acceptance length; else it is the newest.
        measured: by source of held-out prompts, plain decoding and the same prompts with the drafter; None: not yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network = fresh(run.network, weights)
    if isinstance(network, Eagle3):
        eagle3.write(network, folder, len(run.target.layers))
    else:
        zlab.write(network, folder)
        words = run.frequent[: run.config.shortlist].tolist()
        # A corpus of fewer words than that says too little about the rest of the vocabulary.
        write_shortlist(words if len(words) == run.config.shortlist < run.target.vocab_size else [], folder)
    who = {
        "name": run.target.name,
        "hidden_size": run.target.hidden_size,
        "layers": len(run.target.layers),
        "weights_sha256": digest_of(run.target),
        "thinking": run.documents.made_with["thinking"][0] if "thinking" in run.documents.made_with else None,
    }
    write_whole(folder / "target.json", lambda path: path.write_text(json.dumps(who, indent=1) + "\n"))
    card = model_card(run, step, judged, measured or {})
    write_whole(folder / "README.md", lambda path: path.write_text(card))
    return folder


def measure(run: Run, folder: Path) -> Measured:
    """The drafter as it was written, one prompt at a time: plain decoding, then the same prompts with the drafter."""
    drafter = load_drafter(folder, run.target)
    tokens = run.config.evaluate_tokens
    found = {}
    for source, documents in by_source([d for d in run.documents.held_out if not d.foreign], 4).items():
        decode_held_out(run.target, None, documents[:1], tokens, 1)  # first calls of a shape are slow
        plain, drafted = (decode_held_out(run.target, d, documents, tokens, 1) for d in (None, drafter))
        found[source] = (plain, drafted)
    return found


def model_card(run: Run, step: int, judged: bool, measured: Measured) -> str:
    """The card as Markdown."""
    c, parameters = run.network.config, sum(p.numel() for p in run.network.parameters())
    documents, tokens = run.documents, run.documents.tokens
    changed = {key: value for key, value in vars(run.config).items() if value != getattr(TrainConfig(), key, None)}
    shown = yaml.safe_dump(
        {key: value for key, value in changed.items() if key not in ("out", "corpus", "device")}, sort_keys=False
    )
    rows = "\n".join(
        f"| {source} | {_number(real.tau)} | {_number(real.first_slot)} | {plain.seconds / real.seconds:.2f}x |"
        for source, (plain, real) in sorted(measured.items())
    )
    licences = {source: ", ".join(sorted(documents.licences.get(source, {"unknown"}))) for source in tokens}
    data = "\n".join(f"| {source} | {count:,} | {licences[source]} |" for source, count in sorted(tokens.items()))
    made = ", ".join(f"{key} {' and '.join(map(str, values))}" for key, values in sorted(documents.made_with.items()))
    kind = "EAGLE-3" if isinstance(c, Eagle3Config) else "DFlash"
    count = f"{c.backbone.num_hidden_layers} layer{'s' * (c.backbone.num_hidden_layers > 1)}"
    sizes = f"{count} of width {c.backbone.hidden_size}, {parameters:,} parameters in bfloat16"
    slots = f"{_slots(c)}, tapped layers {list(c.taps)}"
    chosen = "the best by acceptance length on held-out prompts" if judged else "the newest"
    how = f"{run.config.evaluate_tokens} tokens, {str(run.target.dtype).removeprefix('torch.')} on {run.target.device}"
    return f"""---
license: other
tags: [{kind.lower().replace("-", "")}, speculative-decoding]
---
# {"An" if kind == "EAGLE-3" else "A"} {kind} drafter for {run.target.name}

{sizes};
{slots}. It makes the target faster and never changes what it says.

```sh
blockdraft generate "Hello" --target {run.target.name} --drafter THIS_FOLDER
```

## Measured

Real greedy decoding of up to 4 held-out prompts of each source, one at a time, {how};
plain decoding of the same prompts by the same engine is the baseline. Few prompts: a first impression, not a benchmark.

| prompts | acceptance length | first slot | speed-up |
|---|---|---|---|
{rows}

## Data

The target's own answers ({made}): {sum(tokens.values()):,} tokens in
{len(documents.train):,} conversations; {len(documents.held_out)} more were held out.

| source | answer tokens | licence of the prompts |
|---|---|---|
{data}

## Recipe

Step {step} of {run.steps}, {chosen}. `blockdraft train` with

```yaml
{shown.strip()}
```

The weights were learnt from this target's output and serve it alone; its licence applies to that output as well.
"""


def _slots(config: DFlashConfig | Eagle3Config) -> str:
    if isinstance(config, Eagle3Config):
        return f"{config.words:,} words"
    return f"block {config.block_size}, mask token {config.mask_token_id}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"
