"""What a run is made of before its first step: target, documents, drafter, order. The plan and the trainer start from it."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blockdraft.drafters.eagle3 import Eagle3, Eagle3Config
from blockdraft.drafters.network import DFlash
from blockdraft.errors import UsageError
from blockdraft.load import load_target, resolve_device, resolve_dtype
from blockdraft.targets.target import Target
from blockdraft.training.batches import Batches
from blockdraft.training.config import TrainConfig
from blockdraft.training.documents import Documents, frequent_words, read_documents
from blockdraft.training.initial import first_eagle3, first_network
from blockdraft.training.loss import LossRule, Words
from blockdraft.training.precision import fastest_dtype


@dataclass
class Run:
    """The parts of a run.

    Attributes:
        network: the drafter at step 0, float32, on the CPU.
        steps: of the whole run.
    """

    config: TrainConfig
    target: Target
    documents: Documents
    network: DFlash | Eagle3
    batches: Batches
    steps: int

    @property
    def rule(self) -> LossRule:
        c, d = self.config, self.network.config
        scale, cap = (1.0, None) if isinstance(d, Eagle3Config) else (d.output_multiplier, d.softcap)
        return LossRule(c.ce_weight, c.kl_weight, c.kl_top_k, c.slot_decay, c.dpace, scale, cap)

    @cached_property
    def words(self) -> Words:
        """The target's frozen head."""
        state = {name: parameter.detach() for name, parameter in self.target.head.named_parameters()}
        return Words(state["weight"], state.get("bias"))

    @cached_property
    def frequent(self) -> Tensor:
        """Tokens of the training answers by falling frequency, int64."""
        return frequent_words(self.documents.train).to(self.target.device)

    @cached_property
    def digest(self) -> str:
        """Of the training documents: a run that goes on must find the same ones."""
        return hashlib.sha256(json.dumps([d.ids for d in self.documents.train]).encode()).hexdigest()


def prepare(config: TrainConfig, device: str | None = None) -> Run:
    """Load and check everything; nothing is written.

    Raises:
        UsageError: anything in the config that does not fit target, corpus or machine.
    """
    place = resolve_device(config.device or device)
    target = load_target(config.target, config.dtype or fastest_dtype(place), str(place))
    target.model.requires_grad_(False)
    documents = read_documents(config.corpus, target, config.sequence_length, config.held_out, config.seed, config.thinking)
    longest = max(len(d.ids) - d.start for d in documents.train)
    if config.block_size > longest:
        raise UsageError(f"block_size is {config.block_size}, but the longest answer of the corpus has {longest} tokens")
    first = first_eagle3 if config.drafter == "eagle3" else first_network
    network = first(config, target, documents.train)
    if config.kl_weight or any(d.foreign for d in documents.train):
        refuse_undistillable(target)
    batches = Batches(documents.train, config.sequence_length, config.anchors, config.rows, config.seed)
    steps = config.max_steps or max(1, round(config.epochs * batches.steps_per_epoch))
    return Run(config, target, documents, network, batches, steps)


def refuse_undistillable(target: Target) -> None:
    """Raise UsageError if the target's logits are more than its head over its last hidden state."""
    ids = torch.arange(3, 15, device=target.device)[None] % target.embedding.num_embeddings
    with torch.inference_mode():
        logits = target.model(input_ids=ids, use_cache=False).logits.float()
        rebuilt = target.head(target.read(ids, ())[1]).float()
    if not torch.allclose(logits, rebuilt, atol=1e-3 if target.dtype == torch.float32 else 0.5):
        raise UsageError(
            f"kl_weight needs logits that are the head over the last hidden state, but {target.name} scales or caps them; "
            "set kl_weight=0"
        )


def precision_of(config: TrainConfig, device: torch.device) -> torch.dtype:
    """What the drafter multiplies in."""
    return fastest_dtype(device) if config.precision == "auto" else resolve_dtype(config.precision, device)
