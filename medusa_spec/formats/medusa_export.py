"""Medusa heads for engines: in the names of their authors, which vLLM and TGI read, too. Knows no folder."""

from pathlib import Path
from typing import Any

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.formats import vllm
from medusa_spec.formats.engine_limits import check_limits
from medusa_spec.formats.exported import Exported, plain
from medusa_spec.formats.full_rows import each_lm_head, shared_lm_head
from medusa_spec.formats.original import LINEAR, LM_HEAD
from medusa_spec.heads import DraftHeads
from medusa_spec.serving import vllm_proposer
from medusa_spec.serving.vllm_proposer import WEIGHTS_FILE

PROPOSER = Path(vllm_proposer.__file__)
FILE = "medusa_lm_head.safetensors"
"""The name that TGI asks for; vLLM takes any, but reads all files of a folder: there must be no second one."""


def universal_medusa(heads: DraftHeads, backbone: Backbone) -> Exported:
    """One folder for vLLM 0.27 to 0.32 and for TGI.

    Where all heads read one LM head it is written once, under the first head's name: `original_lm_head` tells vLLM so.
    There is no `architectures` and no `model_type`: with them TGI takes the folder for something else and decodes
    without any heads; vLLM is told the method by its caller.

    Raises:
        UnsupportedError: If the heads have what the format cannot carry.
    """
    format = "Medusa heads for vLLM and TGI"
    check_limits(heads, backbone, format)
    one = heads.config.lm_head == "shared"
    layers = heads.config.num_layers
    notes = list(_notes(heads))
    if one:
        tensors = {LM_HEAD.format(head=0, layer=layers): plain(shared_lm_head(heads))}
        if heads.draft_ids is not None:
            notes.append(
                "TGI reads this folder, but takes the target's own LM head, so guesses may fall outside the draft "
                "vocabulary there; for TGI export to 'original'"
            )
    else:
        tensors = _each(heads)
    if one and layers > 1:
        notes.append("TGI reads one block per head from such a folder; for TGI export to 'original'")
    return _exported(heads, format, tensors | _blocks(heads), {"original_lm_head": one}, tuple(notes))


def original_medusa(heads: DraftHeads, backbone: Backbone) -> Exported:
    """The authors' own layout, an LM head for every head: larger, and read by everything that reads Medusa heads.

    Raises:
        UnsupportedError: As `universal_medusa`.
    """
    format = "Medusa heads of the authors' layout"
    check_limits(heads, backbone, format)
    return _exported(heads, format, _each(heads) | _blocks(heads), {"original_lm_head": False}, _notes(heads))


def proposer_medusa(heads: DraftHeads, backbone: Backbone) -> Exported:
    """Heads beside a class that vLLM 0.32 and 0.33 load as their proposer, in vLLM's names.

    The draft vocabulary stays one: only its rows are multiplied.

    Raises:
        UnsupportedError: As `universal_medusa`.
    """
    format = "Medusa heads with a proposer class for vLLM"
    check_limits(heads, backbone, format)
    one = heads.config.lm_head == "shared"
    tensors = _blocks(heads, vllm.LINEAR)
    if one:
        tensors[vllm.ONE] = plain(heads.projection.weight)
    else:
        each = enumerate(each_lm_head(heads, cut=True))
        tensors |= {vllm.LM_HEAD.format(head=k): plain(weight) for k, weight in each}
    config = {
        "num_heads": heads.config.num_heads,
        "num_hidden_layers": heads.config.num_layers,
        "medusa_fc_bias": True,
        "hidden_size": heads.config.hidden_size,
        "vocab_size": heads.config.vocab_size,
        "target_lm_head": one and heads.draft_ids is None,
    }
    if heads.draft_ids is not None:
        tensors[vllm.TOKEN_MAP] = plain(heads.draft_ids)
        config["truncated_vocab_size"] = len(heads.draft_ids)
    beside = {f"{PROPOSER.stem}.py": PROPOSER}
    return Exported(format=format, file=WEIGHTS_FILE, tensors=tensors, config=config, beside=beside)


def _exported(
    heads: DraftHeads, format: str, tensors: dict[str, torch.Tensor], more: dict[str, Any], notes: tuple[str, ...]
) -> Exported:
    config = {
        "medusa_num_heads": heads.config.num_heads,
        "medusa_num_layers": heads.config.num_layers,
        "medusa_fc_bias": True,  # without it vLLM leaves the blocks' biases out and says nothing
        "hidden_size": heads.config.hidden_size,
        "vocab_size": heads.config.vocab_size,
        **more,
    }
    return Exported(format=format, file=FILE, tensors=tensors, config=config, notes=notes)


def _blocks(heads: DraftHeads, names: str = LINEAR) -> dict[str, torch.Tensor]:
    return {
        names.format(head=k, layer=layer, part=part): plain(getattr(block.linear, part))
        for k in range(heads.config.num_heads)
        for layer, block in enumerate(heads.head(k).blocks)  # type: ignore[arg-type]
        for part in ("weight", "bias")
    }


def _each(heads: DraftHeads) -> dict[str, torch.Tensor]:
    layers = heads.config.num_layers
    return {LM_HEAD.format(head=k, layer=layers): plain(weight) for k, weight in enumerate(each_lm_head(heads))}


def _notes(heads: DraftHeads) -> tuple[str, ...]:
    if heads.draft_ids is None:
        return ()
    return (
        f"the draft vocabulary of {len(heads.draft_ids)} tokens is kept by the rows of the LM head: guesses are the "
        f"same, but an engine computes the logits of all {heads.config.vocab_size}",
    )
