"""How far drafting is left to what it brings: the mode, and what a wrapped model has learnt. Knows no loop."""

from collections.abc import Callable, Hashable
from functools import cache
from weakref import finalize

from transformers.utils import logging

from medusa_spec.backbone import Backbone
from medusa_spec.controller import Controller, Experience
from medusa_spec.drafters import Drafter
from medusa_spec.errors import ConfigError
from medusa_spec.pass_times import PassTimes, pass_times

logger = logging.get_logger(__name__)

MODES = ("auto", "fixed")

DEFAULT = "auto"
"""Mode of a model that was wrapped without one."""

HOT = 0.25
"""Temperatures are told apart in such steps: what is accepted falls with them."""


def bucket(rows: int) -> int:
    """Batches are told apart by powers of two: 1, 2, 4, 8, …, the next one from `rows` on."""
    return 1 << (rows - 1).bit_length()


def checked(mode: str) -> str:
    """The mode.

    Raises:
        ConfigError: If there is no such mode.
    """
    if mode not in MODES:
        raise ConfigError(f"speculation must be one of {MODES}, got {mode!r}")
    return mode


class Speculation:
    """The mode of a wrapped model, and its memory.

    `"auto"`: times decide, pass by pass, whether to draft and how much, down to plain decoding; the tokens are the same
    (in 16-bit arithmetic up to rounding, where passes of another size round otherwise), the number of passes need not
    be. `"fixed"`: drafts are made at every pass by the rules saved with the heads, whatever they bring: reproducible.

    Args:
        mode: One of `MODES`; None is `DEFAULT`.
        prepared: What was done to the target to make it fast, in words that are the same whenever it is done again.
    """

    def __init__(self, mode: str | None = None, prepared: str = "") -> None:
        self.mode, self.prepared = checked(DEFAULT if mode is None else mode), prepared
        self._times: dict[Hashable, PassTimes | None] = {}
        self._known: dict[int, dict[tuple[int, int], Experience]] = {}

    def controllers(
        self, backbone: Backbone, drafter: Drafter, *, limit: int | None, temperature: float, mode: str | None = None
    ) -> Callable[[int], Controller | None]:
        """From the rows of a pass to what decides for a request as long as it has about so many; None if nothing is to
        be decided.

        Args:
            backbone: The target.
            drafter: What drafts.
            limit: Most draft nodes asked for, in each row.
            temperature: Of sampling; 0 is greedy decoding.
            mode: For this request; None is the model's.
        """
        fixed = limit == 0 or checked(self.mode if mode is None else mode) == "fixed"

        @cache
        def of(about: int) -> Controller | None:
            times = None if fixed else self.times(backbone, about)
            if times is None:
                return None
            share = drafter.level_share
            if about > 1 and share and (alone := self.times(backbone)) is not None:
                share *= about * alone.seconds(1, 0) / times.seconds(1, 0)  # each row's draft costs what it costs alone
            return Controller(
                times=times,
                known=self.known(drafter, temperature, about),
                limit=limit,
                expected=drafter.expected(),
                level_share=share,
                hit=drafter.hit,
            )

        return lambda rows: of(bucket(rows))

    def known(self, drafter: Drafter, temperature: float, rows: int = 1) -> Experience:
        """What was learnt with a drafter at about this temperature and batch; forgotten with the drafter."""
        if id(drafter) not in self._known:  # not by itself: a user's drafter may have no hash
            self._known[id(drafter)] = {}
            finalize(drafter, self._known.pop, id(drafter), None)  # another one may get that id
        return self._known[id(drafter)].setdefault((round(temperature / HOT), rows), Experience())

    def times(self, backbone: Backbone, rows: int = 1) -> PassTimes | None:
        """T(N) of the target where it is now, of passes over several rows N in each; None if it cannot be timed.

        Those of one row are measured; those of more follow from them, and from what decoding sees.
        """
        key = (backbone.device, backbone.dtype, rows)
        if key not in self._times:
            try:
                alone = pass_times(backbone, self.prepared) if rows == 1 else self.times(backbone)
                self._times[key] = alone if alone is None or rows == 1 else alone.for_rows(rows)
            except Exception as error:  # whatever it was, decoding goes on as it can without times
                logger.warning(f"passes of this model could not be timed, so speculation='fixed' it is: {error!r}")
                self._times[key] = None
        return self._times[key]

    def __getstate__(self) -> dict[str, str]:
        """For copies and pickles, which learn anew: they may be on another machine."""
        return {"mode": self.mode, "prepared": self.prepared}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__init__(state["mode"], state["prepared"])  # type: ignore[misc]
