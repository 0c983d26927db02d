"""Target: any Hugging Face causal language model, as the decoding loop sees it.

Four verbs: ``prefill`` a row, ``step`` one token per row, ``verify`` a proposal, ``commit`` the path that stands. The model's
own modules compute; the cache, the mask and the attention are blockdraft's (``engine/cache.py``, ``engine/attention.py``).
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockdraft.engine.attention import FEW, additive, attending_over, causal, visibility
from blockdraft.engine.cache import KVCache, Span
from blockdraft.engine.kernels import library
from blockdraft.engine.packing import PackedLinear, pack_linears, unpack_linears
from blockdraft.engine.plain import PlainLayers
from blockdraft.engine.recorded import Recorder
from blockdraft.errors import UsageError
from blockdraft.rules.proposal import Proposal
from blockdraft.targets.anatomy import Anatomy, dissect, first_tensor
from blockdraft.targets.proof import branching_logits, layers_agree, plain_layers
from blockdraft.targets.support import refuse_unsupported

PREFILL_CHUNK = 512  # prompt tokens per forward: bounds the mask and the activations of long prompts


class Target:
    """A causal language model that can be stepped, verified against and rolled back.

    Args:
        model: a transformers causal LM in evaluation mode, on one device.
        tokenizer: its tokenizer, or None if only ids are used.
        name: what to call it in results.
        digest: of the weights it was loaded from, if known: with the name, its identity.
        exact: verify to the bit what plain steps say, whatever it costs.

    Attributes:
        model, tokenizer: the plain transformers objects.
        embedding, head, layers, final_norm: its parts, found by structure.
        tappable: whether its layers put out one hidden state of the model's width per token, as drafters need.
        hidden_size, vocab_size: width, and rows of the head.
        context: most positions the model was made for.
        dtype, device: of the weights.
        forwards: model passes so far; tests count them.

    Raises:
        UsageError: the model is of a kind that cannot be verified in parallel or rolled back; says which.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        digest: str | None = None,
        exact: bool = False,
    ):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.digest, self.exact = digest, exact
        refuse_unsupported(model)
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.hidden_size: int = self.config.hidden_size
        self.context = int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)
        signature = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in signature else "past_key_values"
        self._keeps_logits = "logits_to_keep" in signature
        self.forwards = 0
        self.recorder = Recorder(self.name, torch.device("cpu"))  # while it is examined, nothing is recorded
        self._idle: KVCache | None = None
        self._plain: PlainLayers | None = None
        self._rotary: nn.Module | None = None
        if getattr(self.config, "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
            # Older transformers pick an attention that drops the cap without a word: let the model's own passes keep it too.
            model.config._attn_implementation = "eager"
        if self._examine():  # windows and chunks have masks that differ by layer
            self.recorder = Recorder(self.name, self.device)

    def _examine(self) -> bool:
        """Find the parts, pack the weights, and prove on a few tokens that cached passes equal plain ones.

        Returns:
            Whether every layer's mask is the plain causal one.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.config.vocab_size, (1, 12), generator=generator).to(self.device)
        parts, plain = dissect(self.model, ids)
        self.embedding, self.head, self.layers = parts.embedding, parts.head, parts.layers
        self.final_norm, self.tappable = parts.final_norm, parts.tappable
        self.vocab_size = plain.shape[-1]
        if not plain.isfinite().all():
            raise UsageError(
                f"{self.name}: its logits are not finite numbers; the weights are damaged, or too large for {self.dtype}"
            )
        self.packed_bytes = pack_linears(parts.linears, self.dtype, self.device, self.exact)
        cache = self.new_cache(1, 32)
        try:
            cached = branching_logits(self, cache, ids)
        except (RuntimeError, NotImplementedError, IndexError) as cause:  # a module that cannot read a slice of a joint product
            unpack_linears(parts.linears)
            self.packed_bytes = 0
            warnings.warn(f"{self.name}: linear layers run unpacked, slower ({cause})")
            cache = self.new_cache(1, 32)
            try:
                cached = branching_logits(self, cache, ids)
            except (RuntimeError, NotImplementedError, IndexError) as again:
                raise UsageError(f"{self.name}: its layers cannot run over a branching cache ({again})") from again

        def error_of(logits: Tensor) -> float:
            return float((logits.float() - plain.float()).abs().mean() / plain.float().std().clamp_min(1e-6))

        error = error_of(cached)
        if not error < (1e-3 if self.dtype == torch.float32 else 0.2):
            raise UsageError(
                f"{self.name}: its logits over a branching cache differ from a plain forward pass by {error:.2g} standard "
                "deviations; this architecture cannot be verified in parallel here, decode it with transformers instead"
            )

        if cache.causal_only:
            self._plain = self._proved_plain_layers(parts, ids, error_of)
        if self.exact and self._plain is None:
            raise UsageError(
                f"{self.name} cannot be verified to the bit here: that needs a CPU, a C compiler, and layers like Llama's; "
                "elsewhere kernels sum in an order that depends on the number of rows. Leave --exact out"
            )
        return cache.causal_only

    @property
    def kernels(self) -> str:
        """What of a pass over few tokens runs in blockdraft's own kernels: "layers", all as one call (``plain.py``); "operations",
        attention and products one by one; "graphs", the model's own, recorded (``engine/recorded.py``); or "none"."""
        if self._plain is not None:
            return "layers"
        if self.recorder.on:
            return "graphs"
        return "operations" if self.device.type == "cpu" and library() is not None else "none"

    def _proved_plain_layers(self, parts: Anatomy, ids: Tensor, error_of: Callable[[Tensor], float]) -> PlainLayers | None:
        """The layers as one call, if they look like a Llama's and compute what the model's own do; else None.

        The logits of a tree of twelve tokens must be the model's; and single layers, at the first and the last positions that the
        model was made for, must agree in float32, whatever the model's dtype: rounding would hide another kind of layer.
        """
        try:
            layers, self._rotary = plain_layers(parts, self.config), parts.rotary
            if layers is None:
                return None
            middle = (self.context - 12) // 2
            for start in {0, max(0, middle), max(0, self.context - 12)}:
                if not layers_agree(self, layers, ids, start):
                    return None
            self._plain = layers
            agrees = error_of(branching_logits(self, self.new_cache(1, 32), ids)) < (1e-4 if self.dtype == torch.float32 else 0.2)
            return layers if agrees else None
        except Exception:  # anything that a layer of another kind can do when it is asked for what it has not
            return None
        finally:
            self._plain = None

    # ---- the four verbs

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Buffers for ``rows`` sequences of ``capacity`` slots; those of a cache that was given back, if they fit."""
        idle, self._idle = self._idle, None
        if idle is not None and idle.rows == rows and idle.capacity >= capacity:
            idle.reuse()
            return idle
        return KVCache(rows, capacity, self.dtype, self.device)

    def give_back(self, cache: KVCache) -> None:
        """Say that a cache is not used any longer. Passes that were recorded over it are worth keeping for the next one."""
        if cache.recordings:
            self._idle = cache

    def prefill(
        self, cache: KVCache, row: int, ids: Sequence[int], taps: Sequence[int] = ()
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Run prompt tokens behind the row's length, chunk by chunk, and commit them.

        Yields:
            The logits ``[vocabulary]`` after the chunk's last token, and the chunk's features ``[1, tokens, taps * hidden]``.
        """
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = torch.tensor([list(ids[start : start + PREFILL_CHUNK])], device=self.device)
            span = cache.open(row, cache.positions_behind(row, *chunk.shape))
            logits, features = self.run(cache, chunk, span.positions, taps, keep=1)
            cache.commit([range(chunk.shape[1])])
            yield logits[0, -1], features

    def prefill_rows(
        self, cache: KVCache, first: int, prompts: Sequence[Sequence[int]], taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run whole prompts in the empty rows ``first, first + 1, ...`` in one pass, and commit them.

        Returns:
            The logits ``[rows, vocabulary]`` after each prompt, and features ``[rows, longest, taps * hidden]``.
        """
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts], device=self.device)
        span = cache.open(first, cache.positions_behind(first, *tokens.shape))
        lasts = torch.tensor(sorted({length - 1 for length in lengths}), device=self.device)
        logits, features = self.run(cache, tokens, span.positions, taps, keep=lasts)
        cache.commit([range(length) for length in lengths])
        wanted = torch.tensor([length - 1 for length in lengths], device=self.device)
        column = torch.searchsorted(lasts, wanted) if logits.shape[1] == len(lasts) else wanted
        return logits[torch.arange(len(prompts), device=self.device), column], features

    def step(self, cache: KVCache, tokens: Tensor) -> Tensor:
        """Run one token per row, ``[rows]`` int64, and commit it. Returns logits ``[rows, vocabulary]``."""
        rows = tokens.shape[0]
        logits, _ = self._few(cache, tokens[:, None], cache.positions_behind(0, rows, 1))
        cache.commit([(0,)] * rows)
        return logits[:, -1]

    def verify(self, cache: KVCache, anchors: Tensor, proposal: Proposal, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Run the anchors ``[rows]`` and their candidates in one pass; nothing is committed.

        Returns:
            Logits ``[rows, 1 + candidates, vocabulary]`` after each node, and features ``[rows, 1 + candidates, taps * hidden]``.
        """
        rows = anchors.shape[0]
        tokens = torch.cat([anchors[:, None], proposal.tokens], dim=1)
        depths = F.pad(proposal.depths(), (1, 0))
        # Padding may point beyond the last position that the model has an embedding for.
        positions = (cache.positions_behind(0, rows, 1) + depths).clamp(max=self.context - 1)
        return self._few(cache, tokens, positions, proposal.visible(), taps)

    def commit(self, cache: KVCache, paths: Sequence[Sequence[int]]) -> None:
        """Keep the nodes of each row's path (node 0, the anchor, first) and forget the other candidates."""
        cache.commit(paths, self.recorder)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids at which ``transformers.generate`` stops, else the tokenizer's end token."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        if ends is None and self.tokenizer is not None:
            ends = self.tokenizer.eos_token_id
        if ends is None:
            return ()
        return tuple(ends) if isinstance(ends, (list, tuple)) else (int(ends),)

    # ---- what a drafter borrows

    def embed(self, ids: Tensor) -> Tensor:
        """Raw rows of the embedding ``[..., hidden]``: no scale or norm of the model's embedding module is applied."""
        return F.embedding(ids, self.embedding.weight)

    def read(self, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One plain pass over whole texts, without a cache and without the head; texts are padded on the right.

        Args:
            ids: ``[rows, tokens]`` int64.
            taps: layers to keep the outputs of.

        Returns:
            Features ``[rows, tokens, taps * hidden]``, and the hidden states ``[rows, tokens, hidden]`` behind the last layer's
            norm, which the head reads.
        """
        self.forwards += 1
        with torch.inference_mode(), self._tapped(taps) as outputs:
            last = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            features = torch.cat([outputs[i] for i in taps], dim=-1) if taps else last[..., :0]
        return features, last

    # ---- one forward pass

    def _few(
        self, cache: KVCache, tokens: Tensor, positions: Tensor, visible: Tensor | None = None, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """A pass over a few tokens of the first rows: recorded where that can be."""
        padded = cache.open_padded(positions, visible) if self.recorder.on else None
        if padded is not None:
            found = self._play(cache, padded, tokens, taps)
            if found is not None:
                return found
        cache.open(0, positions, visible)
        return self.run(cache, tokens, positions, taps, few=True)

    def _play(self, cache: KVCache, padded: Span, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor | None] | None:
        """The recorded pass at a padded span; None where there is none. When it is new it must say what an ordinary pass says."""
        rows, count = tokens.shape
        assert padded.slots is not None
        widened = F.pad(tokens, (0, padded.count - count, 0, len(padded.starts) - rows))
        mask = additive(visibility(padded, causal, self.device), cache.dtype)
        key = (*padded.slots.shape, padded.extent, tuple(taps))
        proved = key in cache.recordings

        def run(tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            # Starts are numbers in Python, which a recording would keep: what depends on them shows in the comparison below.
            with cache.aimed(Span(0, [0] * len(tokens), tokens.shape[1], positions, None, slots, padded.extent, mask)):
                logits, features = self.run(cache, tokens, positions, taps, few=True)
            return (logits,) if features is None else (logits, features)

        found = self.recorder.play(cache, key, (widened, padded.positions, padded.slots, mask), run)
        if found is None:
            return None
        self.forwards += 1
        logits, features = found[0][:rows, :count], found[1][:rows, :count] if taps else None
        if not proved:
            plain, _ = self.run(cache, tokens, padded.positions[:rows, :count], taps, few=True)
            error = float((logits.float() - plain.float()).abs().mean() / plain.float().std().clamp_min(1e-6))
            if not error < (1e-3 if self.dtype == torch.float32 else 0.2):
                self.recorder.give_up(f"they differ by {error:.2g} standard deviations from ordinary ones")
                return None
        return logits, features

    def run(
        self,
        cache: KVCache,
        tokens: Tensor,
        positions: Tensor,
        taps: Sequence[int] = (),
        keep: int | Tensor = 0,
        few: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and features. A pass that must equal plain steps to the bit counts as one over ``few`` tokens, however many."""
        self.forwards += 1
        if self._plain is not None and (few or tokens.shape[1] <= FEW):
            return self._plain_forward(self._plain, cache, tokens, positions, taps, keep)
        arguments: dict[str, object] = {self._cache_argument: cache, "use_cache": True}
        if self._keeps_logits and not (isinstance(keep, int) and keep == 0):
            arguments["logits_to_keep"] = keep
        with torch.inference_mode(), attending_over(cache, self.model.config), self._tapped(taps) as outputs:
            logits = self.model(input_ids=tokens, position_ids=positions, **arguments).logits
            features = torch.cat([outputs[i] for i in taps], dim=-1) if taps else None
        return logits, features

    def _plain_forward(
        self, layers: PlainLayers, cache: KVCache, tokens: Tensor, positions: Tensor, taps: Sequence[int], keep: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        span = cache.span
        assert span is not None and self._rotary is not None and self.final_norm is not None
        with torch.inference_mode():
            x = self.embedding(tokens).float()  # the rotary angles come in the dtype of what they are asked with
            mask = None
            if span.count > 1 or span.visible is not None:
                mask = additive(visibility(span, causal, self.device), cache.dtype)
            hidden, features = layers.run(x, self._rotary(x, positions), cache, span, mask, taps)
            if isinstance(keep, Tensor):
                hidden = hidden[:, keep]
            elif keep:
                hidden = hidden[:, -keep:]
            return self._plain_head(hidden), features

    def _plain_head(self, hidden: Tensor) -> Tensor:
        """Final norm and head in float32: logits rounded to bfloat16 would tie."""
        assert self.final_norm is not None and self._plain is not None
        if not isinstance(self.head, PackedLinear) or hidden.dtype == self.dtype:
            return self.head(self.final_norm(hidden))
        weight = self.final_norm.get_parameter("weight").float()
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self._plain.epsilon) * weight
        assert self.head.packed.rows is not None
        return self.head.packed.rows(normed)

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Keep the outputs of the tapped layers, and of no other."""
        outputs: dict[int, Tensor] = {}

        def keep(layer: int):  # type: ignore[no-untyped-def]
            def hook(module: nn.Module, inputs: object, output: object) -> None:
                outputs[layer] = first_tensor(output)

            return hook

        handles = [self.layers[i].register_forward_hook(keep(i)) for i in taps]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()
