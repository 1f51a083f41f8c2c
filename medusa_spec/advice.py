"""When not to draft, in words, decided from numbers. Measures nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf

from medusa_spec.economics import Costs, Forecast, in_batch, paid_back_after

HARDLY = 1.05
"""A forecast below it is within what times differ from day to day."""

ONE_TOKEN_KERNEL = 1.6
"""T(2) / T(1) from which on a kernel is taken for one that is fast at one token alone."""

COMPUTE_BOUND = 2.0
"""T(8) / T(1) from which on passes are taken to be bound by arithmetic, not by reading weights."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One reason not to draft, and whether it holds here.

    Attributes:
        name: Of the reason.
        holds: Whether it speaks against drafting; None where it depends on what is asked of the model.
        text: A sentence with the numbers.
    """

    name: str
    holds: bool | None
    text: str


def advise(
    costs: Costs, best: Forecast | None, batch: Mapping[int, float] | None = None, rows: int = 1
) -> list[Advice]:
    """All reasons, those that hold here first.

    Args:
        costs: Times.
        best: The tree that brings most; None if no μ is known.
        batch: T(N) by N of passes with `rows` rows; None if not measured.
        rows: Of those passes.
    """
    found = [_overall(best), _one_token_kernel(costs), _compute_bound(costs, best)]
    if best is not None:
        found += [_short_outputs(costs, best), _temperature(best), _batch(costs, best, batch, rows)]
    return sorted(found, key=lambda advice: advice.holds is not True)


def _overall(best: Forecast | None) -> Advice:
    if best is None or best.honest is None:
        text = "what these heads gain was not counted: a tree pays where its μ, as `medusa-spec bench` measures it, is"
        return Advice(name="gain", holds=None, text=f"{text} above the one needed")
    if best.honest < 1.0:
        text = f"no tree pays: the best one needs μ {best.needed:.2f} and gains {best.mu:.2f}. Decode plainly"
    elif best.honest < HARDLY:
        text = f"the best tree gains {best.honest - 1:.0%}, which is within what times differ. Measure before you draft"
    else:
        nodes = "1 draft node" if best.nodes == 1 else f"{best.nodes} draft nodes"
        text = f"trees of {nodes} are expected to be {best.honest:.2f} times as fast as plain decoding"
    return Advice(name="gain", holds=best.honest < HARDLY, text=text)


def _one_token_kernel(costs: Costs) -> Advice:
    ratio = costs.ratio(2)
    holds = ratio > ONE_TOKEN_KERNEL
    text = f"a pass over 2 tokens takes {ratio:.2f} times one over 1"
    if holds:
        text += ": these kernels are fast at one token alone, as many for 4-bit weights are. Draft with other ones"
    return Advice(name="kernels", holds=holds, text=text)


def _compute_bound(costs: Costs, best: Forecast | None) -> Advice:
    ratio = costs.ratio(8)
    text = f"a pass over 8 tokens takes {ratio:.2f} times one over 1"
    if ratio <= COMPUTE_BOUND:
        return Advice(name="compute", holds=False, text=text)
    text += ": arithmetic bounds it rather than reading weights, so that nodes are dear"
    if best is not None and best.honest is not None and best.honest >= HARDLY:
        return Advice(name="compute", holds=None, text=f"{text}. Trees much larger than {best.nodes} do not pay")
    return Advice(name="compute", holds=True, text=f"{text}. Draft little, or nothing")


def _short_outputs(costs: Costs, best: Forecast) -> Advice:
    tokens = paid_back_after(costs, best)
    if isinf(tokens):
        return Advice(name="short outputs", holds=None, text="drafting saves nothing, however long an answer is")
    text = f"the first draft takes {costs.reading * 1e3:.1f} ms longer than others, paid back after {tokens:.0f} tokens"
    return Advice(name="short outputs", holds=None, text=f"{text}: answers shorter than that are faster plain")


def _temperature(best: Forecast) -> Advice:
    text = (
        f"sampling accepts less the higher the temperature: these trees pay while μ is above {best.needed:.2f} "
        f"(counted: {best.mu:.2f}). `medusa-spec bench --temperature` measures it at yours"
    )
    return Advice(name="temperature", holds=None, text=text)


def _batch(costs: Costs, best: Forecast, batch: Mapping[int, float] | None, rows: int) -> Advice:
    if batch is None:
        text = "many rows in a pass make nodes dearer, as they share the reading of weights: --batch measures it"
        return Advice(name="batches", holds=None, text=text)
    found = in_batch(costs, batch, best)
    assert found.honest is not None, "of a tree whose μ is known"
    text = (
        f"with {rows} rows in a pass these trees would be {found.honest:.2f} times as fast as plain decoding of as "
        f"many, at best; they need μ {found.needed:.2f}"
    )
    if found.honest < HARDLY:
        text += f". Do not draft in batches of {rows}"
    return Advice(name="batches", holds=found.honest < HARDLY, text=text)
