"""Which settings of a run go, alone and together: before hours are spent on what would be refused or ignored later."""

from dataclasses import fields
from typing import TYPE_CHECKING, get_args

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.choices import LOSSES, MIMICS, SELF, TARGET_LOSSES, DType
from medusa_spec.heads import FAMILIES, options_of
from medusa_spec.heads.config import KINDS, LM_HEADS

if TYPE_CHECKING:
    from medusa_spec.finetune.config import FinetuneConfig

_AT_LEAST_ONE = (
    "max_length num_heads num_layers rank epochs batch_positions shard_positions batch_tokens save_steps "
    "tree_width max_tree_size self_conversations self_new_tokens distil_new_tokens distil_batch report_prompts "
    "report_new_tokens gradient_accumulation eval_new_tokens joint_epochs joint_batch_tokens"
)

_AT_LEAST_OR_NONE = {
    "draft_vocab_size": 1,
    "tree_size": 0,
    "max_steps": 1,
    "max_records": 1,
    "top_logits": 0,
    "adapter_rank": 1,
    "eval_prompts": 0,
    "target_rank": 1,
    "joint_max_steps": 1,
}


def check(config: "FinetuneConfig") -> None:
    """Looks at all of them.

    Raises:
        ConfigError: If a value is out of range, or would have no effect beside another, naming it.
    """
    if not config.data:
        raise ConfigError("data must name at least one file or data set, got none; 'self' needs no data")
    for name in _AT_LEAST_ONE.split():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be an integer of 1 or more, got {value!r}")
    for name, least in _AT_LEAST_OR_NONE.items():
        value = getattr(config, name)
        if value is not None and (type(value) is not int or value < least):
            raise ConfigError(f"{name} must be an integer of {least} or more, or None, got {value!r}")
    if config.kind not in KINDS:
        raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {config.kind!r}")
    try:
        options_of(config.kind, config.options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.lm_head not in LM_HEADS:
        raise ConfigError(f"lm_head must be one of {', '.join(LM_HEADS)}, got {config.lm_head!r}")
    if type(config.seed) is not int or not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed must be an integer in 0..{2**32 - 1}, got {config.seed!r}")
    if not 0 < config.held_out < 1:
        raise ConfigError(f"held_out must be a share between 0 and 1, got {config.held_out}")
    if not config.learning_rate > 0:
        raise ConfigError(f"learning_rate must be above 0, got {config.learning_rate}")
    if not 0 <= config.warmup < 1:
        raise ConfigError(f"warmup must be a share of the steps in 0..1, got {config.warmup}")
    if not 0 < config.depth_decay <= 1:
        raise ConfigError(f"depth_decay must be in 0..1 and above 0, got {config.depth_decay}")
    _check_unroll(config)
    if not config.feature_weight >= 0 or (config.feature_weight and config.kind not in MIMICS):
        raise ConfigError(
            f"feature_weight must be 0 or more, and 0 unless kind is one of {', '.join(MIMICS)}, got "
            f"{config.feature_weight} with kind {config.kind!r}"
        )
    if not config.distil_temperature >= 0:
        raise ConfigError(f"distil_temperature must be 0 or more, got {config.distil_temperature}")
    _check_self(config)
    if config.keep_states and not (config.distil or config.data == (SELF,)):
        raise ConfigError("keep_states must be off unless the target writes texts: turn on distil, or data = 'self'")
    if config.device is not None and config.device.rpartition(":")[2] not in (config.device, "0"):
        raise ConfigError(
            f"device must be a kind, like 'cuda', whose first one is used, got {config.device!r}: Trainer would take "
            "the first all the same; choose by the environment, CUDA_VISIBLE_DEVICES=1 for one"
        )
    if config.tree_size is not None and config.tree_size > config.max_tree_size:
        raise ConfigError(f"tree_size must be at most max_tree_size = {config.max_tree_size}, got {config.tree_size}")
    _check_loss(config)
    _check_adapter(config)
    _check_joint(config)
    if not 0 <= config.ema < 1:
        raise ConfigError(f"ema must be a decay in 0..1 and below 1, or 0 for none, got {config.ema}")
    if config.dtype not in get_args(DType):
        raise ConfigError(f"dtype must be one of {', '.join(get_args(DType))}, got {config.dtype!r}")


def _check_self(config: "FinetuneConfig") -> None:
    if SELF not in config.data:
        return
    if config.data != (SELF,):
        raise ConfigError(
            f"data must be 'self' alone or other names, got {config.data}: write the model's own conversations in a "
            "run of their own, and give its self.jsonl beside the others"
        )
    if config.distil:
        raise ConfigError("distil must be off for data = 'self', whose answers are the model's own already")
    if config.sources not in (None, (SELF,)):
        raise ConfigError(f"sources must be None for data = 'self', which is a source of its own, got {config.sources}")


def _check_joint(config: "FinetuneConfig") -> None:
    if config.target_alpha is not None and (config.target_rank is None or not config.target_alpha > 0):
        raise ConfigError(f"target_alpha must be above 0, and None without target_rank, got {config.target_alpha}")
    if config.target_rank is not None and config.adapter_rank is not None:
        raise ConfigError(
            f"target_rank must be None with adapter_rank, got {config.target_rank}: an adapter of heads leaves the "
            "target as it is; train heads and target together first, then domains on them"
        )
    if config.target_loss not in TARGET_LOSSES:
        raise ConfigError(f"target_loss must be one of {', '.join(TARGET_LOSSES)}, got {config.target_loss!r}")
    for name in ("target_learning_rate", "heads_rate", "heads_weight"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(config, name)}")
    if not config.joint_alone:
        return
    passed = "loss ema top_logits epochs max_steps batch_positions learning_rate unroll_ramp".split()
    passed += "states_from states_dump keep_states".split()
    defaults = {field.name: field.default for field in fields(config)}
    given = [name for name in passed if getattr(config, name) != defaults[name]]
    if given:
        raise ConfigError(
            f"{', '.join(given)} must be left alone with target_rank and init_from, got "
            f"{', '.join(repr(getattr(config, name)) for name in given)}: no states are read and heads are not trained "
            "alone; joint training has settings of its own"
        )


def _check_loss(config: "FinetuneConfig") -> None:
    if config.loss not in LOSSES:
        raise ConfigError(f"loss must be one of {', '.join(LOSSES)}, got {config.loss!r}")
    if config.loss != LOSSES[0] and config.kept_logits == 0:
        raise ConfigError(
            f"top_logits must be 1 or more, or None, with loss {config.loss!r}, which learns from them, got 0"
        )


def _check_adapter(config: "FinetuneConfig") -> None:
    if config.adapter_rank is not None and config.init_from is None:
        raise ConfigError(
            f"adapter_rank must be None without init_from, got {config.adapter_rank}: adapters stand on trained heads"
        )
    if config.adapter_alpha is not None and (config.adapter_rank is None or not config.adapter_alpha > 0):
        raise ConfigError(f"adapter_alpha must be above 0, and None without adapter_rank, got {config.adapter_alpha}")


def _check_unroll(config: "FinetuneConfig") -> None:
    if not 0 <= config.unroll_ramp < 1 or (config.unroll_ramp and config.unroll is None):
        raise ConfigError(f"unroll_ramp must be in 0..1, and 0 without unroll, got {config.unroll_ramp}")
    if config.unroll is None:
        return
    if type(config.unroll) is not int or not 1 <= config.unroll <= config.num_heads:
        raise ConfigError(f"unroll must be in 1..{config.num_heads} (num_heads), or None, got {config.unroll!r}")
    tied = getattr(options_of(config.kind, config.options), "tied", False)
    if config.unroll < config.num_heads and not (FAMILIES[config.kind].attends and tied):
        raise ConfigError(
            f"unroll must be None for {config.kind} heads with these options, got {config.unroll}: every head has "
            "weights of its own to train"
        )
