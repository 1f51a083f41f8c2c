"""When a decoding ends. Checks every token, inside an accepted path too; knows no trees."""

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


class Sequence:
    """Prompt and emitted tokens of one row, with the criteria that end it.

    Length and EOS are checked on Python ints; other criteria are called at every token with the ids so far, exactly as
    plain decoding calls them.

    Args:
        input_ids: Prompt ids as the user gave them, padding included, [1, T].
        criteria: Hugging Face's prepared stopping criteria.
    """

    def __init__(self, input_ids: torch.Tensor, criteria: StoppingCriteriaList) -> None:
        self.limits = [c for c in criteria if type(c) is MaxLengthCriteria]
        self.max_length = min((c.max_length for c in self.limits), default=None)
        known = [c.max_position_embeddings for c in self.limits if c.max_position_embeddings is not None]
        self.positions = min(known, default=None)
        self.eos = {
            int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.flatten().tolist()
        }
        self.others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        self.scores: list[torch.Tensor] | None = None
        self.prompt_length = self.length = input_ids.shape[1]
        # Room for what is likely: a limit of a million tokens is none.
        room = self.length + min(max(256, (self.max_length or 0) - self.length), 4096)
        self._buffer = input_ids.new_empty(1, room, dtype=torch.long)
        self._buffer[:, : self.length] = input_ids

    @property
    def ids(self) -> torch.Tensor:
        """Prompt and tokens so far, [1, T]; a view, valid until the next token."""
        return self._buffer[:, : self.length]

    @property
    def new_tokens(self) -> int:
        """Tokens emitted."""
        return self.length - self.prompt_length

    def push(self, token: int) -> bool:
        """Emits a token; true if it is the last."""
        if self.length == self._buffer.shape[1]:
            self._buffer = torch.cat([self._buffer, torch.empty_like(self._buffer)], dim=1)
        self._buffer[0, self.length] = token
        self.length += 1
        done = token in self.eos or (self.max_length is not None and self.length >= self.max_length)
        if self.positions is not None and self.length > self.positions and not done:
            self.positions = None  # they warn, once, of a text that is longer than the model was made for
            for criterion in self.limits:
                criterion(self.ids, None)
        if not self.others:
            return done
        scores = None if self.scores is None else tuple(self.scores)
        # All are asked at every token, at the last one too: criteria may count, or show how far it is.
        verdicts = [bool(criterion(self.ids, scores)) for criterion in self.others]
        return done or any(verdicts)
