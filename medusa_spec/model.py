"""MedusaModel: a frozen target with heads and a drafter. The front door; everything else can be read from here."""

import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import PushToHubMixin, logging

from medusa_spec import speculation as modes
from medusa_spec.adapter_methods import AdapterMethods
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import heads_folder, names_heads, save_heads, target_of
from medusa_spec.config import MedusaConfig
from medusa_spec.default_model import DEFAULT_MODEL, default_model_path
from medusa_spec.drafters import Drafter, HeadsDrafter, HybridDrafter, NgramDrafter, SuffixDrafter
from medusa_spec.errors import ConfigError
from medusa_spec.generation import generate
from medusa_spec.head_adapters import load_with_adapter, save_active
from medusa_spec.heads import DraftHeads, HeadsConfig, MedusaHeads
from medusa_spec.mtp import NATIVE, native_heads
from medusa_spec.prepare import Prepared, prepare
from medusa_spec.probe import probe
from medusa_spec.speculation import Speculation, checked
from medusa_spec.static_decoding import StaticSteps
from medusa_spec.stats import DecodingStats
from medusa_spec.target_adapter import MARK, check_adapted, copy_adapter, target_adapter, with_adapter
from medusa_spec.tree import TreeTemplate, chain_template

logger = logging.get_logger(__name__)


class MedusaModel(nn.Module, AdapterMethods, PushToHubMixin):
    """A causal LM that decodes several tokens per pass and says exactly what it said before.

    ```python
    model = MedusaModel.from_pretrained("org/base-model", heads="path-or-hub-id")
    out = model.generate(**inputs, max_new_tokens=256)
    model.last_stats.mu  # accepted draft tokens per drafted pass
    ```

    What is not found here is looked up on the target: `model.config`, `model.device`, `model.get_input_embeddings()`.
    The target is frozen; calling the model is calling the target.

    Args:
        model: A Hugging Face causal LM, loaded any way: quantised, sharded, with a PEFT adapter active.
        heads: Trained heads: `DraftHeads` of any family, or what `load_heads` takes, other projects' checkpoints among
            them; an adapter of heads, whose heads are loaded with it; `"mtp"` for the MTP layers that the target's own
            checkpoint ships. None makes untrained Medusa heads, which begin as the target's own LM head, unless the
            drafter needs none.
        drafter: `"heads"`; `"suffix"`, what followed before in this and earlier texts (needs no training); `"hybrid"`,
            both in one tree, or the latter alone where no heads are given; `"ngram"`, the plainest look-up; or a
            `Drafter` of your own.
        tree: Template for the heads; None takes the one saved with them.
        speculation: `"auto"` lets what passes cost here and what drafts bring decide, pass by pass, how much is
            drafted, down to plain decoding; `"fixed"` always drafts by the heads' own rules. See `Speculation`.
        probe: Check on attaching that tree passes of this model are exact; off only if you have just seen it pass.
        prepare: Make the target's linear layers fast for decoding where that pays; see `prepare.prepare`, and
            `prepared.reason` for what was done.

    Raises:
        AttachError: If tree passes would not be exact, or the model is wrapped already.
        UnsupportedError: If the model has no LM head, or layers that cannot hold a tree.
        CheckpointError: If the heads do not fit the target.
        ConfigError: If an argument cannot be right.
    """

    target: PreTrainedModel
    heads: DraftHeads | None
    drafter: Drafter

    def __init__(
        self,
        model: Any,
        heads: DraftHeads | str | os.PathLike[str] | None = None,
        *,
        drafter: str | Drafter = "heads",
        tree: TreeTemplate | None = None,
        speculation: str | None = None,
        probe: bool = True,
        prepare: bool = True,
    ) -> None:
        super().__init__()
        if not (isinstance(drafter, Drafter) or drafter in DRAFTERS):
            raise ConfigError(f"drafter must be a Drafter or one of {sorted(DRAFTERS)}, got {drafter!r}")
        mode = checked(modes.DEFAULT if speculation is None else speculation)
        self.backbone = Backbone(model)
        self.target = self.backbone.model
        self.probe_result = "not probed"
        self.prepared = Prepared(reason="not prepared: prepare=False")
        self.last_stats: DecodingStats | None = None
        self.medusa_config: MedusaConfig | None = None
        self.target_adapter: Path | None = None
        self.steps = StaticSteps()
        self._trainable = [parameter for parameter in self.target.parameters() if parameter.requires_grad]
        self._trained = [module for module in self.target.modules() if module.training]
        try:
            self.target.requires_grad_(False).eval()
            if isinstance(heads, str) and heads == NATIVE:
                heads = native_heads(self.backbone, None if tree is None else tree.depth)
            if prepare:
                self.prepared = _prepare(self.target, self.backbone.lm_head)
            if probe:
                self.probe_result = _probe(self.backbone)
            else:
                self.backbone.route.check()
            self.heads = self._heads(heads, needed=drafter == "heads")
            self.drafter = drafter if isinstance(drafter, Drafter) else DRAFTERS[drafter](self, tree)
            # Not the reason: that tells measured times, which differ from one wrapping to the next.
            self.speculation = Speculation(mode, f"{len(self.prepared.modules)} modules")
            if mode == "auto":
                self.speculation.times(self.backbone)  # now rather than in the first answer
        except BaseException:
            self.detach()  # a model that could not be wrapped goes back as it came
            raise

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        heads: DraftHeads | str | os.PathLike[str] | None = None,
        *,
        drafter: str | Drafter = "heads",
        tree: TreeTemplate | None = None,
        speculation: str | None = None,
        **kwargs: Any,
    ) -> "MedusaModel":
        """Loads a target with `AutoModelForCausalLM` and wraps it.

        Heads alone that were trained together with an adapter on their target bring that along: the target is then the
        adapted model, see `exact_to`. Where the target is named, too, it stays as it is named.

        Args:
            name_or_path: The target's folder or hub id; or a folder (or hub id, or packaged name) of heads alone, from
                which the target's name and revision are read, as PEFT does.
            heads: See the class.
            drafter: See the class.
            tree: See the class.
            speculation: See the class.
            **kwargs: For `AutoModelForCausalLM.from_pretrained`; `dtype` is `"auto"` unless given.

        Raises:
            CheckpointError: If heads alone do not say which model they are for.
        """
        kwargs.setdefault("dtype", "auto")
        adapter = None
        if heads is None and names_heads(name_or_path):
            heads = heads_folder(name_or_path)
            adapter = target_adapter(heads)
            name_or_path, revision = target_of(name_or_path, heads)
            if name_or_path == DEFAULT_MODEL:
                name_or_path = default_model_path()  # it comes without a network, too
            if revision is not None:
                kwargs.setdefault("revision", revision)
        target = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
        if adapter is not None:
            target = with_adapter(target, adapter)
        model = cls(target, heads, drafter=drafter, tree=tree, speculation=speculation)
        if adapter is not None:
            model.target_adapter = adapter
            logger.warning(f"Output is exactly that of {model.exact_to}.")
        return model

    def _heads(self, heads: Any, *, needed: bool) -> DraftHeads | None:
        if isinstance(heads, (str, os.PathLike)):
            heads, self.medusa_config = load_with_adapter(heads, self.backbone)
            check_adapted(self.target, self.medusa_config)
        elif heads is None and needed:
            config = HeadsConfig(hidden_size=self.backbone.hidden_size, vocab_size=self.backbone.vocab_size)
            heads = MedusaHeads(config, self.backbone.projection())
            heads = heads.to(dtype=self.backbone.dtype, device=self.backbone.head_device)
        if isinstance(heads, DraftHeads) and self.medusa_config is None:
            self.medusa_config = MedusaConfig(
                heads=heads.config,
                base_model_name_or_path=self.target.config.name_or_path or None,
                lm_head_hash=self.backbone.lm_head_hash(),
            )
        elif heads is not None and not isinstance(heads, DraftHeads):
            raise ConfigError(
                f"heads must be DraftHeads, a folder, a hub id or a packaged name, got {type(heads).__name__}"
            )
        return heads

    def generate(
        self,
        *args: Any,
        draft_nodes: int | None = None,
        drafter: Drafter | None = None,
        speculation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hugging Face's `generate`, several tokens per pass.

        Greedy decoding gives the target's tokens; sampling gives the tokens that the target's own sampling gives with
        the same seed. Logits processors, stopping criteria, streamers, stop strings, hidden states and a user's cache
        are as they are there, and so are batches. What cannot be speculated (beams, assistants, guidance) is refused by
        name; docs/generate.md says of every option which of both holds.

        Args:
            *args: As for the target's `generate`.
            draft_nodes: Most draft nodes per pass; 0 is plain decoding through the same code; None leaves the size to
                the drafter.
            drafter: Another drafter for this call.
            speculation: Another mode for this call; see the class.
            **kwargs: As for the target's `generate`.

        Returns:
            Ids [B, T], or with `return_dict_in_generate=True` Hugging Face's output with `stats` added. The counters
            are in `last_stats` too.

        Raises:
            UnsupportedError: For what cannot be speculated, naming it and the alternative.
            AttachError: If the model was detached, or its adapters changed since it was wrapped.
        """
        drafter = self.drafter if drafter is None else drafter
        options: dict[str, Any] = {"draft_nodes": draft_nodes, "record": self._record, "steps": self.steps}
        options |= {"speculation": self.speculation, "mode": speculation}
        return generate(self.backbone, drafter, *args, **options, **kwargs)

    @property
    def exact_to(self) -> str:
        """In words, the model whose output is reproduced."""
        name = self.target.config.name_or_path or type(self.target).__name__
        if hasattr(self.target, MARK):
            return f"{name} with the adapter that its heads were trained with, not that of {name} alone"
        return f"{name} with the adapters that were active when it was wrapped" if self.backbone.adapters else name

    @property
    def route(self) -> str:
        """How the target checks a tree, in words; see `routes`. `probe_result` says what was found."""
        return self.backbone.route.name

    @property
    def graph_reason(self) -> str | None:
        """Why the last `generate` was not decoded by CUDA graphs, in words; None if it was."""
        return self.steps.reason

    def _record(self, stats: DecodingStats) -> None:
        self.last_stats = stats

    @property
    def generation_config(self) -> GenerationConfig:
        """The target's; to set it here is to set it there."""
        return self.target.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self.target.generation_config = config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The target's forward."""
        return self.target(*args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Saves the heads alone, with the name of their target; while an adapter of theirs is active, that adapter.

        Args:
            save_directory: Folder; made if missing.
            push_to_hub: Upload it too, as `push_to_hub` does.
            **kwargs: For `push_to_hub`.

        Raises:
            ConfigError: If there are no heads to save.
        """
        if self.heads is None or self.medusa_config is None:
            raise ConfigError(f"there are no heads to save: the drafter is {self.drafter.name!r}")
        if not save_active(save_directory, self.heads, self.medusa_config):
            if self.medusa_config.target_adapter_hash is not None:
                copy_adapter(self.target_adapter, Path(save_directory))
            save_heads(save_directory, self.heads, self.medusa_config, dtype=next(self.heads.parameters()).dtype)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def detach(self) -> PreTrainedModel:
        """Gives the target back as it was before it was wrapped; this object cannot decode any more."""
        if self.backbone.attached:
            self.prepared.undo()
            self.steps.clear()
            self.backbone.detach()
            for parameter in self._trainable:
                parameter.requires_grad_(True)
            for module in self._trained:
                module.training = True
        return self.target

    def train(self, mode: bool = True) -> "MedusaModel":
        """Puts the heads into training mode; the target stays in evaluation: dropout would change what it says."""
        super().train(mode)
        self.target.eval()
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("target", "heads"):
                raise
            return getattr(self.target, name)


_probe, _prepare = probe, prepare


def _heads_drafter(model: MedusaModel, tree: TreeTemplate | None) -> Drafter:
    assert model.heads is not None and model.medusa_config is not None
    config = model.medusa_config
    return HeadsDrafter(
        model.heads,
        tree or config.tree or chain_template(config.heads.num_heads),
        config.values,
        growth=config.growth if tree is None else None,
        follow_adapters=tree is None,
        dtype=model.backbone.dtype,
        device=model.backbone.head_device,
    )


def _hybrid_drafter(model: MedusaModel, tree: TreeTemplate | None) -> Drafter:
    return SuffixDrafter() if model.heads is None else HybridDrafter(_heads_drafter(model, tree))


DRAFTERS = {
    "heads": _heads_drafter,
    "hybrid": _hybrid_drafter,
    "ngram": lambda model, tree: NgramDrafter(),
    "suffix": lambda model, tree: SuffixDrafter(),
}
"""Drafters by name."""
