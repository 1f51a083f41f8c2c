"""Whether texts are laid out in decoding as they were in training. Knows templates, no models."""

import hashlib
import warnings

from transformers import PreTrainedTokenizerBase

from medusa_spec.config import MedusaConfig


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """First 16 hex digits of the SHA-256 of the chat template; None without a template."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]


def check_chat_template(config: MedusaConfig | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Warns if heads were trained with another chat template than this tokenizer's.

    Output stays the target's, but heads meet texts unlike those of their training: acceptance falls, and nothing else
    shows why.

    Args:
        config: Of the heads; None, or one that does not say, passes.
        tokenizer: With the template that decoding uses.

    Returns:
        Whether they agree.
    """
    trained = None if config is None else config.chat_template_hash
    found = chat_template_hash(tokenizer)
    if trained is None or trained == found:
        return True
    warnings.warn(
        f"the heads were trained on chats laid out by the template {trained}, this tokenizer has "
        f"{found or 'no template'}. Output stays exactly the target's; acceptance may be lower: use the tokenizer of "
        f"their training ({config.base_model_name_or_path if config else None}), or fine-tune the heads with this one",
        stacklevel=2,
    )
    return False
