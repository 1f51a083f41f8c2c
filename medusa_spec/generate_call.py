"""What Hugging Face's generate() runs in place of its own loop: from prepared inputs to rows, and back to an output."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.utils import logging

from medusa_spec.acceptance import EXACT_SAMPLING, GREEDY, Rule
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.controller import Controller
from medusa_spec.decoding import decode
from medusa_spec.drafters import Drafter
from medusa_spec.errors import ConfigError, UnsupportedError
from medusa_spec.extras import Extras
from medusa_spec.generate_options import INSTEAD
from medusa_spec.noise import SharedNoise
from medusa_spec.request import Request, Row
from medusa_spec.rowwise import criteria_of, processors_of, reason_against_rows
from medusa_spec.speculation import Speculation
from medusa_spec.static_decoding import StaticSteps
from medusa_spec.stats import DecodingStats
from medusa_spec.stopping import Sequence

logger = logging.get_logger(__name__)

HANDLED_MODEL_KWARGS = {
    *("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
"""What generate() hands on for the model's forward and the loop deals with; anything else would be lost."""

EXTRAS = ("hidden_states", "attentions")


@dataclass
class MedusaGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: Hugging Face's output and the counters of the decoding.

    Of a batch, `scores` and `logits` are zero behind the end of a row, and there is no `cache`. Where the target's own
    loop decoded (`stats.rule` says why) all is as there.

    Attributes:
        stats: Counters and times; see `DecodingStats`.
    """

    stats: DecodingStats | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of generate().

    Attributes:
        backbone: The target.
        drafter: What proposes trees.
        draft_nodes: Most draft nodes per pass and row; 0 is plain decoding.
        speculation: What the model has learnt about drafting.
        mode: Of speculation; None is the model's.
        record: Is given the counters.
        steps: Decodes in steps of fixed shape where that serves.
        streamer: Is given every token; None for none.
        synced_gpus: Whether ranks that share the target must make their passes together.
        user_cache: The user's, which is brought up to date; None for none.
    """

    backbone: Backbone
    drafter: Drafter
    draft_nodes: int | None
    speculation: Speculation
    mode: str | None
    record: Callable[[DecodingStats], None]
    steps: StaticSteps | None
    streamer: Any
    synced_gpus: bool
    user_cache: Any

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """As Hugging Face's own loop is called, and what that returns."""
        _refuse(logits_processor, model_kwargs)
        reason = self._reason_against(input_ids, logits_processor, stopping_criteria, generation_config)
        if reason is not None:
            logger.warning_once(f"This was decoded by the target's own loop, without drafts: {reason}.")
            prepared = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
            return self._by_the_target(reason, model, input_ids, generation_config, prepared | model_kwargs)
        cache = self.backbone.new_cache()
        if self.user_cache is not None:
            cache.load(self.user_cache)
        mask, past = model_kwargs.get("attention_mask"), cache.get_seq_length()
        prompts = [_prompt(input_ids, mask, row, generation_config, past) for row in range(len(input_ids))]
        padding = input_ids.shape[1] - prompts[0][0].shape[1]
        if padding and self.user_cache is not None and not isinstance(cache, SlabCache):
            raise UnsupportedError(
                "a cache with a padded prompt cannot be speculated on the route "
                f"{self.backbone.route.name!r}; pass the prompt unpadded"
            )
        request = self._request(cache, input_ids, prompts, logits_processor, stopping_criteria, generation_config)
        stats = decode(self.backbone, request)
        if self.streamer is not None:
            self.streamer.end()
        self.record(stats)
        kept = self._exported(request, cache, padding, generation_config)
        return _output(request.rows, kept, stats, generation_config)

    def _reason_against(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> str | None:
        """Why this cannot be decoded here, in words; None if it can."""
        if self.synced_gpus:
            return "ranks that share the target must make their passes together"
        if self.backbone.mixes_tokens:
            return (
                "its LLM.int8 layers choose outlier columns over all tokens of a pass, so drafts would change what is "
                "said; load it with llm_int8_threshold=0.0, or in four bits"
            )
        asked = [name for name in EXTRAS if _asked(config, name)]
        if asked and not self.backbone.route.collects:
            return f"{' and '.join(asked)} are not read off trees on the route {self.backbone.route.name!r}"
        if len(input_ids) == 1:
            return None
        if self.user_cache is not None:
            return "a cache was passed with a batch"
        if self.streamer is not None:
            return "a streamer is shown all rows of a batch at once"
        if self.backbone.rescales_positions:
            return "the longest row of a batch rescales the positions of all"
        if asked:
            return f"{' and '.join(asked)} of it were asked for"
        return reason_against_rows(processors, criteria)

    def _by_the_target(
        self, reason: str, model: Any, input_ids: torch.Tensor, config: GenerationConfig, prepared: dict[str, Any]
    ) -> Any:
        """What Hugging Face's own loop returns, with counters: rows that have ended count with their padding, and the
        time is all `verify`."""
        began = perf_counter()
        out = model._sample(
            input_ids, generation_config=config, synced_gpus=self.synced_gpus, streamer=self.streamer, **prepared
        )
        sequences, rows = getattr(out, "sequences", out), len(input_ids)
        new = sequences.shape[1] - input_ids.shape[1]
        stats = DecodingStats(
            requests=rows,
            rule=f"the target's own loop, since {reason}",
            new_tokens=rows * new,
            passes=rows * (new - 1),
        )
        stats.seconds["verify"] = perf_counter() - began
        self.record(stats)
        return MedusaGenerateOutput(**out, stats=stats) if isinstance(out, GenerateDecoderOnlyOutput) else out

    def _request(
        self,
        cache: SlabCache,
        input_ids: torch.Tensor,
        prompts: list[tuple[torch.Tensor, torch.Tensor]],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> Request:
        alone, (prompt, unread) = len(prompts) == 1, prompts[0]
        if unread.shape[1] < prompt.shape[1] and self.backbone.reads_anew(prompt, cache):
            cache, prompts = self.backbone.new_cache(), [(prompt, prompt)]
        noise = SharedNoise(len(prompts)) if config.do_sample and not alone else None
        rows = [
            Row(
                sequence=Sequence(input_ids[place : place + 1], criteria if alone else criteria_of(criteria)),
                unread=unread.to(self.backbone.device),
                session=self.drafter.begin(prompt[0].tolist()),
                rule=_rule(config, noise, place),
                processors=processors if alone else processors_of(processors, place, len(prompts)),
                emit=None if self.streamer is None else self._emit,
                extras=_extras(config, padding=input_ids.shape[1] - prompt.shape[1]) if alone else None,
                ended=None if noise is None else functools.partial(noise.end, place),
                keep_scores=_asked(config, "scores"),
                keep_logits=_asked(config, "logits"),
            )
            for place, (prompt, unread) in enumerate(prompts)
        ]
        return Request(
            rows=rows,
            cache=cache,
            reads=None if self.draft_nodes == 0 else self.drafter.reads,
            prefill_chunk=config.prefill_chunk_size,
            draft_nodes=self.draft_nodes,
            controllers=self._controllers(config),
            steps=self.steps,
        )

    def _controllers(self, config: GenerationConfig) -> Callable[[int], Controller | None]:
        temperature = float(config.temperature or 1.0) if config.do_sample else 0.0
        limits = {"limit": self.draft_nodes, "temperature": temperature, "mode": self.mode}
        return self.speculation.controllers(self.backbone, self.drafter, **limits)  # type: ignore[arg-type]

    def _emit(self, token: int) -> None:
        self.streamer.put(torch.tensor([token], device="cpu"))

    def _exported(self, request: Request, loaded: SlabCache, padding: int, config: GenerationConfig) -> Any:
        """The cache as it is returned; the user's, if there is one, is brought up to date."""
        if len(request.rows) > 1:
            return None
        if self.user_cache is not None and request.cache is not loaded:
            self.user_cache.layers = []  # the text was read anew
        if self.user_cache is not None or (config.return_dict_in_generate and config.use_cache):
            return request.cache.export(self.backbone.config, into=self.user_cache, padding=padding)
        return None


def _asked(config: GenerationConfig, name: str) -> bool:
    wanted = getattr(config, f"output_{name}")  # a flag or, of hidden states, numbers of layers: 0 is one
    return bool(config.return_dict_in_generate) and wanted is not None and wanted is not False


def _extras(config: GenerationConfig, *, padding: int) -> Extras | None:
    asked = tuple(name for name in EXTRAS if _asked(config, name))
    if not asked:
        return None
    wanted: Any = config.output_hidden_states  # a flag, the number of a layer, or several
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        wanted = [wanted]
    return Extras(asked=asked, padding=padding, selected=list(wanted) if isinstance(wanted, (list, tuple)) else None)


def _rule(config: GenerationConfig, noise: SharedNoise | None, row: int) -> Rule:
    if not config.do_sample:
        return GREEDY
    return EXACT_SAMPLING if noise is None else noise.rule(row)


def _output(rows: list[Row], cache: Any, stats: DecodingStats, config: GenerationConfig) -> Any:
    """Ids [B, T], or with `return_dict_in_generate` all that was asked for."""
    sequences: Any = _side_by_side([row.sequence.ids for row in rows], config)
    if not config.return_dict_in_generate:
        return sequences
    found: dict[str, Any] = {"cache": cache, "stats": stats}
    for name in ("scores", "logits"):
        found[name] = _by_position([getattr(row, name) for row in rows]) if _asked(config, name) else None
    if (extras := rows[0].extras) is not None:
        found |= {name: extras.given(name) for name in EXTRAS}
    return MedusaGenerateOutput(sequences=sequences, **found)


def _side_by_side(texts: list[torch.Tensor], config: GenerationConfig) -> torch.Tensor:
    """Prompts and answers [B, T]; behind the end of a row stands the padding token."""
    padding: Any = getattr(config, "_pad_token_tensor", None)
    longest = max(text.shape[1] for text in texts)
    ids = texts[0].new_full((len(texts), longest), 0 if padding is None else int(padding))
    for place, text in zip(ids, texts, strict=True):
        place[: text.shape[1]] = text[0]
    return ids


def _by_position(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """One tensor [B, V] per new token, zero behind the end of a row."""
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.cat(of_all) for of_all in zip_longest(*rows, fillvalue=nothing))


def _refuse(processors: LogitsProcessorList, model_kwargs: dict[str, Any]) -> None:
    """Refuses by name what would otherwise be ignored: a callable gets these silently."""
    found = None
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        found = f"guidance_scale: classifier-free guidance runs a second prompt beside each token; {INSTEAD}"
    elif lost := sorted(k for k, v in model_kwargs.items() if k not in HANDLED_MODEL_KWARGS and not _says_nothing(v)):
        found = f"{', '.join(lost)}: the drafted passes would go without; {INSTEAD}"
    if found:
        raise UnsupportedError(f"this cannot be speculated: {found}")


def _says_nothing(value: Any) -> bool:
    """Whether an argument is left open: generate() itself makes an empty dict of a prompt without images."""
    return value is None or (isinstance(value, dict) and not value)


def _prompt(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, row: int, config: GenerationConfig, past: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's prompt without padding, and the part of it that is not in the user's cache, each [1, T].

    Padding is left out rather than masked: it never enters the cache, and positions count from the first real token.
    """
    ids, mask = input_ids[row : row + 1], None if attention_mask is None else attention_mask[row]
    if mask is not None and not bool(mask.all()):
        if past:
            raise UnsupportedError("a cache with a padded prompt cannot be speculated; pass the prompt unpadded")
        ids = ids[:, mask.bool().to(ids.device)]
    if ids.shape[1] == 0:
        where = f" in row {row}" if len(input_ids) > 1 else ""
        raise ConfigError(f"input_ids must hold at least one token that attention_mask does not hide, got none{where}")
    # With a cache either the whole text or only its new part is passed; the mask covers the whole either way.
    whole = mask.shape[0] if mask is not None else getattr(config, "_mask_length", -1)
    unread = ids[:, past:] if past and whole == ids.shape[1] else ids
    if unread.shape[1] == 0:
        raise ConfigError(f"input_ids must go on beyond the {past} tokens that are in the cache, got no new token")
    return ids, unread
