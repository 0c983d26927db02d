"""Which models can be verified in parallel and rolled back."""

from transformers import PreTrainedConfig, PreTrainedModel

from blockdraft.errors import UsageError


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UsageError, with the reason, for models whose output cannot be verified in parallel and rolled back."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UsageError(f"{name} is an encoder-decoder model; blockdraft decodes decoder-only models")
    if "longrope" in rope_types(config):
        raise UsageError(
            f"{name} uses longrope, whose rotary frequencies depend on the longest row of a pass; it cannot be batched exactly"
        )
    kinds = set(getattr(config, "layer_types", None) or [])
    recurrent = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if getattr(model, "_is_stateful", False) or recurrent:
        which = f" ({', '.join(sorted(recurrent))} layers)" if recurrent else ""
        raise UsageError(f"{name} keeps a recurrent state{which} that cannot be rolled back after rejected tokens")
    if not getattr(model, "_supports_attention_backend", False):
        raise UsageError(f"{name} computes attention by itself; blockdraft needs transformers' attention interface")
    if len({p.device for p in model.parameters()}) > 1:
        raise UsageError(f"{name} is spread over several devices; blockdraft runs a target on one")


def rope_types(config: PreTrainedConfig) -> set[str]:
    """Kinds of rotary embedding in a config, flat or per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(entry["rope_type"]) for entry in nested if "rope_type" in entry}
