"""TrainConfig: every knob of a training run, documented where it is declared, read from YAML and ``key=value``."""

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from blockdraft.errors import UsageError

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # decay lengths by block size (arXiv 2602.06036)
EAGLE3_GAMMA = -1 / math.log(0.8)  # 0.8 a step (arXiv 2503.01840)
# Keys that mean something to one kind of drafter only.
ONLY = {
    "dflash": ("layers", "mask_token_id", "shortlist", "window", "attention", "compile", "vocabulary", "revealed"),
    "eagle3": ("words",),
}


def option(default: Any, meaning: str, choices: Sequence[str] = (), least: float | None = None, most: float | None = None) -> Any:
    """A field with its meaning and its range."""
    metadata = {"meaning": meaning, "choices": tuple(choices), "least": least, "most": most}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """A recipe. ``options_help`` prints the meanings below; ``read_config`` checks types, names and ranges."""

    # ---- what is trained, on what
    target: str = option("smollm2-135m", "target: model folder, .gguf file, Hugging Face id, or smollm2-135m")
    corpus: list[str] = option([], "corpus folders made by `blockdraft data` for this target")
    thinking: bool | None = option(None, "the thinking mode that the corpora must be of; null: whichever, but the same")
    out: str = option("", "run folder: checkpoints, metrics.jsonl, the drafter; started again, the run goes on")
    device: str | None = option(None, "cpu, cuda or cuda:N; null: the best there is (under accelerate: its own)")
    dtype: str | None = option(None, "of the target; null: as precision's auto")
    precision: str = option(
        "auto",
        "of the drafter's products; weights stay float32. auto: what this processor multiplies fastest, measured; bfloat16 on GPUs",
        ("auto", "float32", "bfloat16"),
    )
    seed: int = option(0, "decides initial weights, order, anchors, noise")

    # ---- the drafter
    drafter: str = option("dflash", "what is trained", ("dflash", "eagle3"))
    init: str = option("target", "first weights: scratch, target (its last layers), or a drafter folder of the same sizes")
    layers: int = option(4, "drafter layers", least=1)
    block_size: int = option(
        8, "slots of a block, the anchor included; EAGLE-3: one more than the steps it is unrolled for", least=2
    )
    taps: list[int] = option(
        [], "tapped target layers, 0-based outputs; empty: as many as layers, evenly spread (EAGLE-3: its usual three)"
    )
    mask_token_id: int | None = option(None, "id whose embedding fills the empty slots; null: an unused special token")
    heads: int | None = option(None, "attention heads; null: the target's", least=1)
    kv_heads: int | None = option(None, "key/value heads; null: the target's", least=1)
    head_dim: int | None = option(None, "size of a head; null: the target's", least=2)
    intermediate_size: int | None = option(None, "MLP width; null: the target's", least=1)
    shortlist: int = option(
        8192, "words it picks from when it is done: the most frequent of the answers; 0, or a corpus of fewer: all", least=0
    )
    window: int | None = option(None, "sliding window of all layers in tokens; null: full attention", least=1)
    words: int = option(8192, "EAGLE-3: its own vocabulary, the most frequent words of the answers", least=1)

    # ---- batches
    sequence_length: int = option(512, "tokens of a packed row; longer conversations are cut", least=8)
    anchors: int = option(64, "blocks of a row, drawn anew every epoch; every conversation in it gets one at least", least=1)
    rows: int = option(2, "packed rows of a step, over all processes", least=1)
    micro_rows: int | None = option(None, "rows of one forward pass; null: all of a process's rows", least=1)
    features: str = option(
        "online", "of the target: computed in every step, or once, in memory or on disk", ("online", "memory", "disk")
    )
    attention: str = option("auto", "of the drafter; auto: flex on CUDA, blocked elsewhere", ("auto", "blocked", "sdpa", "flex"))
    compile: bool = option(False, "torch.compile the drafter's forward")

    # ---- loss
    ce_weight: float = option(1.0, "weight of cross entropy on the target's tokens", least=0)
    kl_weight: float = option(0.0, "weight of forward KL to the target's probabilities", least=0)
    kl_top_k: int = option(0, "KL over the k most probable tokens and one rest; 0: all tokens", least=0)
    gamma: float | None = option(
        None, "slot k weighs exp(-(k-1)/gamma); null: 7, 5, 4 for blocks of 16, 10, 8; EAGLE-3: 0.8^(k-1)", least=0.1
    )
    dpace: float | None = option(None, "smoothing of D-PACE weights, which replace gamma's; null: off", least=0.01, most=1)
    vocabulary: int = option(
        0, "words in the training loss: the most frequent, the step's labels and a sample of the rest; 0: all", least=0
    )

    # ---- optimiser
    optimizer: str = option("adamw", "muon: matrices by Muon, the rest by AdamW", ("adamw", "muon"))
    learning_rate: float = option(6e-4, "peak", least=0)
    muon_learning_rate: float = option(0.02, "peak, of the matrices", least=0)
    weight_decay: float = option(0.0, "decoupled; matrices only", least=0)
    betas: list[float] = option([0.9, 0.95], "of AdamW")
    schedule: str = option(
        "cosine", "cosine: down to the last step; wsd: constant, then a short decay (arXiv 2405.18392)", ("cosine", "wsd")
    )
    warmup: float = option(0.04, "share of the steps; from 1 on: so many steps", least=0)
    decay: float = option(0.0, "wsd: share of the steps, the last ones, in which the rate falls; 0: it stays", least=0, most=1)
    floor: float = option(0.0, "last learning rate as a share of the peak", least=0, most=1)
    branch: str | None = option(
        None, "run folder of the same recipe and corpus: begin at its newest checkpoint, optimiser and step included"
    )
    clip: float = option(1.0, "largest gradient norm", least=1e-6)
    epochs: float = option(6, "passes over the corpus", least=0)
    max_steps: int | None = option(None, "end after so many steps; null: after the epochs", least=1)

    # ---- against memorising
    feature_noise: float = option(0.0, "uniform noise on features, as a share of their standard deviation", least=0)
    revealed: float = option(
        0.0,
        "share of blocks that show some of their tokens, as chance will have it: for several denoising steps",
        least=0,
        most=1,
    )
    dropout: float = option(0.0, "of the fused features", least=0, most=0.9)
    patience: int | None = option(None, "end after so many evaluations without a better tau; null: never", least=1)

    # ---- watching and keeping
    held_out: int = option(64, "conversations kept out of training, for the estimate and the real tau", least=1)
    evaluate_every: int = option(500, "steps between evaluations; one more at the end", least=1)
    evaluate_prompts: int = option(16, "held-out prompts decoded for the real tau", least=1)
    evaluate_tokens: int = option(64, "tokens of each", least=2)
    checkpoint_every: int = option(250, "steps between checkpoints", least=1)
    keep: int = option(2, "newest checkpoints kept, besides the best", least=1)
    log_every: int = option(10, "steps between lines of metrics.jsonl", least=1)
    trackers: list[str] = option([], "also report to these of accelerate's trackers: tensorboard, trackio, wandb")

    def __post_init__(self) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for key in ONLY["eagle3" if self.drafter == "dflash" else "dflash"]:
            if getattr(self, key) != defaults[key]:
                raise UsageError(f"{key} has no effect with drafter {self.drafter}; leave it out")
        if self.ce_weight == 0 and self.kl_weight == 0:
            raise UsageError("ce_weight and kl_weight are both 0: there is no loss; raise one of them")
        if self.kl_top_k and self.kl_weight == 0:
            raise UsageError("kl_top_k has no effect while kl_weight is 0; raise kl_weight or leave kl_top_k out")
        if self.gamma is not None and self.dpace is not None:
            raise UsageError("gamma and dpace are two rules for the same weights; leave one of them out")
        if self.schedule == "cosine" and self.decay:
            raise UsageError("decay has no effect with schedule cosine; use schedule=wsd or leave it out")
        if self.schedule == "wsd" and not self.decay and self.floor:
            raise UsageError("floor has no effect with schedule wsd and no decay; give decay, or leave floor out")
        if self.optimizer != "muon" and self.muon_learning_rate != 0.02:
            raise UsageError("muon_learning_rate has no effect with optimizer adamw; use optimizer=muon or leave it out")
        if self.head_dim is not None and self.head_dim % 2:
            raise UsageError(f"head_dim is {self.head_dim}; it must be even, since positions turn pairs of numbers")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas is {self.betas}; it must be two numbers from 0 to below 1")

    @property
    def slot_decay(self) -> float:
        """Gamma of the position weights: given, the papers', or interpolated to B/2 for other block sizes."""
        usual = EAGLE3_GAMMA if self.drafter == "eagle3" else GAMMA.get(self.block_size, self.block_size / 2)
        return self.gamma or usual


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A YAML file, then ``key=value`` texts, over the defaults.

    Raises:
        UsageError: an unreadable file, an unknown key (names the nearest known one), or a value of a wrong type or range.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text("utf-8")) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the config {path}: {getattr(error, 'strerror', None) or error}") from error
        except yaml.YAMLError as error:
            raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise UsageError(f"{path} does not hold `key: value` lines")
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is no key=value")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"the value of {key} is not valid YAML: {value!r}") from error
    types, fields = get_type_hints(TrainConfig), {f.name: f for f in dataclasses.fields(TrainConfig)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "`blockdraft train --help` lists the keys"
            raise UsageError(f"unknown config key {key!r}; {hint}")
    return TrainConfig(**{key: checked(fields[key], types[key], value) for key, value in values.items()})


def checked(field: "dataclasses.Field[Any]", kind: Any, value: Any) -> Any:
    """``value`` as the field's type.

    Raises:
        UsageError: it is of another type, or out of range; names key, value and what is wanted.
    """
    kinds = get_args(kind) if get_origin(kind) is not list and get_args(kind) else (kind,)
    if value is None and type(None) in kinds:
        return None
    wanted = next(k for k in kinds if k is not type(None))
    if get_origin(wanted) is list:
        inner = get_args(wanted)[0]
        items = value if isinstance(value, list) else [value]
        return [_scalar(field, inner, item) for item in items]
    return _scalar(field, wanted, value)


def _scalar(field: "dataclasses.Field[Any]", wanted: type, value: Any) -> Any:
    if wanted is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 6e-4 as a text
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise UsageError(f"{field.name} is {value!r}; it must be {_article(wanted)}")
    rules = field.metadata
    if rules["choices"] and value not in rules["choices"]:
        raise UsageError(f"{field.name} is {value!r}; use {', '.join(rules['choices'])}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low = -math.inf if rules["least"] is None else rules["least"]
        high = math.inf if rules["most"] is None else rules["most"]
        if not (low <= value <= high and math.isfinite(value)):
            bounds = " and ".join(
                text for text, there in ((f"at least {low:g}", low > -math.inf), (f"at most {high:g}", high < math.inf)) if there
            )
            raise UsageError(f"{field.name} is {value}; it must be {bounds or 'finite'}")
    return value


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]


def options_help() -> str:
    """One line per key: name, default, meaning."""
    lines, defaults = [], TrainConfig()
    for f in dataclasses.fields(TrainConfig):
        default = getattr(defaults, f.name)
        choices = f" ({', '.join(f.metadata['choices'])})" if f.metadata["choices"] else ""
        shown = yaml.safe_dump(default, default_flow_style=True).strip().removesuffix("...").strip()
        lines.append(f"  {f.name}: {shown}\n      {f.metadata['meaning']}{choices}")
    return "\n".join(lines)
