"""What becomes of every option of generate(): the same as in Hugging Face's loop, or refused by name. Knows no loop.

Two tables hold all options that transformers has, so that a new one is noticed (a test compares) and none is ignored in
silence. docs/generate.md prints them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from medusa_spec.errors import UnsupportedError

logger = logging.get_logger(__name__)

INSTEAD = "call model.target.generate(...) for it"


@dataclass(frozen=True, kw_only=True)
class Option:
    """What becomes of an option.

    Attributes:
        words: What it does here or, where it is refused, why and what to do instead.
        refused: From the settings in force (see `Settings`) to whether they ask for what cannot be speculated; None
            for an option that is never refused.
        idle: Whether Hugging Face itself does not read it in greedy decoding and sampling of a decoder.
    """

    words: str
    refused: Callable[[Any], bool] | None = None
    idle: bool = False

    @property
    def treatment(self) -> str:
        """`same`, `refused` or `not read`, as the documentation has it."""
        return "refused" if self.refused else "not read" if self.idle else "same"


class Settings:
    """The options in force before generate() has worked them out: arguments, then the given config, then the model's.

    Args:
        kwargs: Arguments of generate() by name.
        model: The target.
    """

    def __init__(self, kwargs: Mapping[str, Any], model: PreTrainedModel) -> None:
        self._kwargs = kwargs
        self._configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))

    def __getattr__(self, name: str) -> Any:
        asked = self.asked(name)
        return getattr(self._configs[1], name, None) if asked is None and name not in self._kwargs else asked

    def asked(self, name: str) -> Any:
        """The same without what only the model's own config says."""
        return self._kwargs[name] if name in self._kwargs else getattr(self._configs[0], name, None)


def _set(name: str) -> Callable[[Any], bool]:
    return lambda settings: all(getattr(settings, name) is not nothing for nothing in (None, False))


def _same(*names: str, words: str) -> dict[str, Option]:
    return dict.fromkeys(names, Option(words=words))


def _idle(*names: str, words: str) -> dict[str, Option]:
    return dict.fromkeys(names, Option(words=words, idle=True))


def _contrastive(settings: Any) -> bool:
    alpha, top_k = settings.penalty_alpha or 0.0, 50 if settings.top_k is None else settings.top_k
    return settings.do_sample is not True and alpha > 0.0 and top_k > 1


FASTER = {"static", "sliding_window", "hybrid_chunked"}
"""Kinds of cache that models ask for by themselves for speed alone."""


def _other_cache(settings: Any) -> bool:
    # "hybrid" is unset by Hugging Face, wherever it comes from: its dynamic cache has windows by now.
    if settings.asked("cache_implementation") is None and settings.cache_implementation in FASTER:
        return False
    return settings.cache_implementation not in (None, "dynamic", "hybrid")


def _whole_texts(settings: Any) -> bool:
    asked = settings.return_dict_in_generate and (settings.output_hidden_states or settings.output_attentions)
    return settings.use_cache is False and bool(asked)


BEAMS = "of beam search, which is refused as num_beams"
ASSISTANTS = "of assisted generation, which is refused as assistant_model"
PROCESSED = "applied token by token on the accepted path, in order, as in plain decoding"

CONFIG_OPTIONS: dict[str, Option] = {
    **_same("max_length", "max_new_tokens", "min_length", "min_new_tokens", words="exact, inside an accepted path too"),
    **_same("max_time", words="asked at every token"),
    **_same("stop_strings", words="with `tokenizer`; cut inside an accepted path, strings over several tokens too"),
    **_same("do_sample", words="greedy decoding or sampling: with the same seed the same tokens, and the same state"),
    "num_beams": Option(
        words=f"beams are not a single path; {INSTEAD}", refused=lambda settings: (settings.num_beams or 1) > 1
    ),
    "use_mtp": Option(words='MTP layers draft as heads here: MedusaModel(model, heads="mtp")', refused=_set("use_mtp")),
    "use_cache": Option(
        words="false: the loop keeps its cache all the same and returns none. With output_hidden_states or "
        f"output_attentions, which would then be those of whole texts: leave it out, or {INSTEAD}",
        refused=_whole_texts,
    ),
    "cache_implementation": Option(
        words="anything but `dynamic`: trees need a cache of this library's own, which holds keys and values as they "
        "are and returns a DynamicCache (so a static one that only the model's own config asks for is left out, and "
        f"that is told); leave it out, or {INSTEAD}",
        refused=_other_cache,
    ),
    **_idle("cache_config", "max_cache_len", words="of static and quantized caches, refused as cache_implementation"),
    **_same("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", words=PROCESSED),
    **_same("epsilon_cutoff", "eta_cutoff", "renormalize_logits", "remove_invalid_values", words=PROCESSED),
    **_same("repetition_penalty", "encoder_repetition_penalty", words=PROCESSED),
    **_same("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", words=PROCESSED),
    **_same("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", words=PROCESSED),
    **_same("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", words=PROCESSED),
    **_same("watermarking_config", words="both kinds; their state moves once per token"),
    "token_healing": Option(
        words=f"a custom generate is not given the tokenizer that it needs; {INSTEAD}", refused=_set("token_healing")
    ),
    "guidance_scale": Option(
        words=f"classifier-free guidance runs a second prompt beside each token; {INSTEAD}",
        refused=lambda settings: settings.guidance_scale not in (None, 1),
    ),
    **_same("num_return_sequences", words="rows of a batch, whose prompt is read once"),
    **_same("output_scores", "output_logits", words="one tensor per token, processed or raw"),
    **_same(
        "output_hidden_states",
        words="of the prompt, then of each token, all layers or those named; zeros at padding; a batch is left to the "
        "target's own loop",
    ),
    **_same("output_attentions", words='with `attn_implementation="eager"`; other attentions give none, as there'),
    **_same("return_dict_in_generate", words="`MedusaGenerateOutput`: Hugging Face's output with `stats`"),
    **_same("pad_token_id", "bos_token_id", "eos_token_id", words="every id of several"),
    **_idle("decoder_start_token_id", words="of encoder-decoders"),
    **_idle("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", words=BEAMS),
    "is_assistant": Option(words="the target is no assistant; leave it out", refused=_set("is_assistant")),
    **_idle("num_assistant_tokens", "num_assistant_tokens_schedule", words=ASSISTANTS),
    **_idle("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", words=ASSISTANTS),
    **_idle("assistant_ensemble_weight", "speculation_type", words=ASSISTANTS),
    "prompt_lookup_num_tokens": Option(
        words='use MedusaModel(..., drafter="ngram") for prompt lookup', refused=_set("prompt_lookup_num_tokens")
    ),
    **_idle("max_matching_ngram_size", words="of prompt lookup, which is refused as prompt_lookup_num_tokens"),
    "assistant_early_exit": Option(
        words="this library needs no assistant; leave it out", refused=_set("assistant_early_exit")
    ),
    **_idle("compile_config", words="Hugging Face compiles with a static cache only and says so else; so it is here"),
    **_idle("disable_compile", words="nothing is compiled"),
    **_idle("continuous_batching_config", words="of `generate_batch`, which is not this call"),
    **_idle("low_memory", words="of contrastive search, which is refused as penalty_alpha"),
    "penalty_alpha": Option(words=f"contrastive search chooses tokens otherwise; {INSTEAD}", refused=_contrastive),
    "dola_layers": Option(words=f"DoLa chooses tokens otherwise; {INSTEAD}", refused=_set("dola_layers")),
    "constraints": Option(words=f"constrained beam search is no single path; {INSTEAD}", refused=_set("constraints")),
    "force_words_ids": Option(
        words=f"constrained beam search is no single path; {INSTEAD}", refused=_set("force_words_ids")
    ),
    **_same("prefill_chunk_size", words="the prompt is read in such pieces"),
    **_idle("transformers_version", words="says who wrote the file"),
}
"""By attribute of `GenerationConfig`."""

NO_ASSISTANT = "this library needs no assistant; leave it out"

ARGUMENTS: dict[str, Option] = {
    **_same("inputs", "input_ids", words="without any, the text begins with bos_token_id"),
    **_same(
        "attention_mask", words="padding is left out of the passes, not masked; inferred from pad_token_id as there"
    ),
    **_same("generation_config", words="left as it was"),
    **_same("logits_processor", words="one call per emitted token with the path's own ids; state needs no branching"),
    **_same("stopping_criteria", words="asked at every token, inside an accepted path too"),
    **_same("prefix_allowed_tokens_fn", words=PROCESSED),
    **_same(
        "synced_gpus", words="ranks that share the target are left to its own loop; found out as Hugging Face does"
    ),
    **_same("streamer", words="every token once, as it is emitted; ended, if it has begun, when something raises"),
    **_same("tokenizer", words="for stop_strings"),
    **_same("cache", "past_key_values", words="a DynamicCache is read and brought up to date; others are refused"),
    "assistant_model": Option(words=NO_ASSISTANT, refused=_set("assistant_model")),
    "assistant_tokenizer": Option(words=NO_ASSISTANT, refused=_set("assistant_tokenizer")),
    "negative_prompt_ids": Option(
        words=f"classifier-free guidance runs a second prompt; {INSTEAD}", refused=_set("negative_prompt_ids")
    ),
    "negative_prompt_attention_mask": Option(
        words=f"classifier-free guidance runs a second prompt; {INSTEAD}",
        refused=_set("negative_prompt_attention_mask"),
    ),
    "custom_generate": Option(
        words=f"tree decoding is a custom generate of its own; {INSTEAD}", refused=_set("custom_generate")
    ),
    **_idle("trust_remote_code", words="of custom_generate"),
    "position_ids": Option(words="positions follow from attention_mask; leave them out", refused=_set("position_ids")),
    "inputs_embeds": Option(
        words=f"drafts need token ids; pass input_ids, or {INSTEAD}", refused=_set("inputs_embeds")
    ),
}
"""By argument of `generate()`. What else it is given is for the model's forward, and refused there."""


def refuse_options(kwargs: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Refuses by name what generate() is asked for and cannot be speculated.

    Args:
        kwargs: Arguments of generate() by name.
        model: The target; its `generation_config` counts where nothing else is given.

    Raises:
        UnsupportedError: Names the option and what to do instead.
    """
    settings = Settings(kwargs, model)
    for name, option in (*ARGUMENTS.items(), *CONFIG_OPTIONS.items()):
        if option.refused is not None and option.refused(settings):
            value = getattr(settings, name)
            shown = f"={value!r}" if isinstance(value, (bool, int, float, str)) else ""
            raise UnsupportedError(f"{name}{shown} cannot be speculated: {option.words}")
    if settings.compile_config is not None:
        logger.warning_once("compile_config is not used: compilation needs a static cache, trees one of their own.")


def with_own_cache(kwargs: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """The arguments, without the static cache that a model's own config asks for: it would be made for nothing."""
    kind = Settings(kwargs, model).cache_implementation
    if kind not in FASTER:
        return dict(kwargs)
    logger.warning_once(f"cache_implementation={kind!r} of the model's config is left out: trees need a cache of ours.")
    return {**kwargs, "cache_implementation": None}


def unknown_options(config: GenerationConfig) -> set[str]:
    """Attributes of a config that the table lacks; private ones are transformers' own affair."""
    return {name for name in vars(config) if not name.startswith("_")} - set(CONFIG_OPTIONS)
