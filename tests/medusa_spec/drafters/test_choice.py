"""Choices turn logits into trees: a template's ranks, or the likeliest nodes that pay."""

import torch

from medusa_spec.drafters.choice import GrowthChoice, ProductChoice, TemplateChoice
from medusa_spec.drafters.levels import plan_of
from medusa_spec.tree import Candidates, Growth, TreeTemplate, Trust

CHEAP = Growth(
    token_seconds=1.0, level_seconds=1e-6, pass_seconds=((1, 1.0), (9, 1.0 + 1e-6)), hit=1.0, beam=2, width=2
)


def logits_of(*chances: list[float]) -> torch.Tensor:
    return torch.tensor(chances).log()


def test_a_template_takes_the_guesses_of_its_ranks() -> None:
    template = TreeTemplate(paths=((0,), (1,), (1, 0), (1, 1)))
    choice = TemplateChoice(template, plan_of(template, torch.device("cpu")), torch.tensor([10, 11, 12]))
    chosen = choice.take(0, logits_of([0.2, 0.5, 0.3]))
    assert chosen is not None and list(chosen.rows) == [0] and chosen.tokens.tolist() == [12]
    assert choice.take(1, logits_of([0.1, 0.3, 0.6])) is None
    tree = choice.tree(7)
    assert tree.shape == template.shape and tree.tokens == (7, 11, 12, 12, 11)


def test_growth_goes_on_below_the_likeliest_and_keeps_the_best() -> None:
    choice = GrowthChoice(CHEAP, deepest=2, limit=None, draft_ids=[10, 11, 12])
    chosen = choice.take(0, logits_of([0.1, 0.3, 0.6]))
    assert chosen is not None and list(chosen.rows) == [0, 0] and chosen.tokens.tolist() == [12, 11]
    assert choice.take(1, logits_of([0.9, 0.06, 0.04], [0.2, 0.7, 0.1])) is None  # two levels are all
    tree = choice.tree(7)
    assert tree.tokens[:3] == (7, 12, 10) and tree.shape.parents[:3] == (-1, 0, 1)
    assert sorted(tree.tokens[1:]) == [10, 10, 11, 11, 11, 12]


def test_growth_stops_where_a_level_does_not_pay() -> None:
    dear = Growth(token_seconds=1.0, level_seconds=0.7, pass_seconds=((1, 1.0), (9, 1.1)), hit=0.5, width=2)
    choice = GrowthChoice(dear, deepest=5, limit=None, draft_ids=None)
    assert choice.take(0, logits_of([0.6, 0.3, 0.1])) is None
    assert choice.tree(1).tokens == (1, 0, 1)


def test_growth_keeps_to_its_limit_and_may_draft_nothing() -> None:
    choice = GrowthChoice(CHEAP, deepest=1, limit=1, draft_ids=None)
    choice.take(0, logits_of([0.6, 0.3, 0.1]))
    assert choice.tree(1).tokens == (1, 0)
    dear = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (2, 2.0)))
    nothing = GrowthChoice(dear, deepest=1, limit=None, draft_ids=None)
    nothing.take(0, logits_of([0.6, 0.3, 0.1]))
    assert nothing.tree(1).tokens == (1,)


def test_temperature_and_coverage_make_guesses_less_sure() -> None:
    unsure = Growth(
        token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (9, 1.8)), temperature=2.0, coverage=0.5, width=3
    )
    choice = GrowthChoice(unsure, deepest=1, limit=None, draft_ids=None)
    choice.take(0, logits_of([0.64, 0.32, 0.04]))
    expected = torch.tensor([0.8, 0.32**0.5, 0.2]) / (1.0 + 0.32**0.5) * 0.5
    assert torch.allclose(torch.tensor(choice.growing.candidates.values[1:]), expected[expected > 0.1], atol=1e-6)


def test_guesses_of_all_heads_at_once_make_the_tree_that_pays() -> None:
    rules = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (9, 1.8)), width=2)  # .1 a node
    choice = ProductChoice(rules, limit=None, draft_ids=[10, 11, 12])
    choice.take(logits_of([0.1, 0.3, 0.6], [0.55, 0.41, 0.04]))
    tree = choice.tree(7)
    assert tree.shape.parents == (-1, 0, 1, 1, 0, 4, 4)
    assert tree.tokens == (7, 12, 10, 11, 11, 10, 11)  # .6 .33 .246, .3 .165 .123
    choice = ProductChoice(rules, limit=3, draft_ids=None)
    choice.take(logits_of([0.1, 0.3, 0.6], [0.55, 0.41, 0.04]))
    assert choice.tree(7).tokens == (7, 2, 0, 1)


def test_guesses_of_all_heads_join_those_of_others() -> None:
    rules = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (9, 2.6)), width=2)  # .2 a node
    candidates = Candidates()
    candidates.graft([50, 60], [0.9, 0.9])
    ProductChoice(rules, None, [10, 11, 12], candidates).take(logits_of([0.1, 0.3, 0.6]))
    assert candidates.tokens == [-1, 50, 60, 12, 11] and candidates.best(rules).tokens == [50, 60, 12, 11]


def test_guesses_on_the_path_that_came_true_are_learnt_from() -> None:
    trust, said = Trust(), list[tuple[float, bool]]()
    trust.learn = lambda chance, right: said.append((round(chance, 3), right))  # type: ignore[method-assign]
    choice = GrowthChoice(CHEAP, deepest=3, limit=None, draft_ids=[10, 11, 12], trust=trust)
    choice.take(0, logits_of([0.1, 0.3, 0.6]))  # 12 .6, 11 .3
    choice.take(1, logits_of([0.9, 0.06, 0.04], [0.2, 0.7, 0.1]))  # below 12: 10; below 11: 11
    choice.learn([11, 11, 50])  # the third level was not guessed
    assert said == [(0.6, False), (0.7, True)]
    said.clear()
    choice.learn([50])
    assert said == [(0.6, False)]


def test_guesses_of_all_heads_are_learnt_from_as_far_as_the_text_goes() -> None:
    trust, said = Trust(), list[tuple[float, bool]]()
    trust.learn = lambda chance, right: said.append((round(chance, 3), right))  # type: ignore[method-assign]
    choice = ProductChoice(CHEAP, None, [10, 11, 12], trust=trust)
    choice.take(logits_of([0.1, 0.3, 0.6], [0.55, 0.41, 0.04], [0.5, 0.3, 0.2]))
    choice.learn([12, 11])
    assert said == [(0.6, True), (0.55, False)]


def test_what_is_learnt_moves_chances_and_how_deep_trees_grow() -> None:
    dear = Growth(token_seconds=1.0, level_seconds=0.5, pass_seconds=((1, 1.0), (9, 1.1)), hit=0.5, width=2)
    trusted, plain = Trust(), GrowthChoice(dear, deepest=5, limit=None, draft_ids=None)
    assert plain.take(0, logits_of([0.6, 0.3, 0.1])) is None
    for _ in range(20):
        trusted.learn(0.5, True)
    sure = GrowthChoice(dear, deepest=5, limit=None, draft_ids=None, trust=trusted)
    assert sure.take(0, logits_of([0.6, 0.3, 0.1])) is not None
    assert sure.growing.candidates.values[1] > plain.growing.candidates.values[1]


def test_a_step_without_chances_does_not_end_what_follows() -> None:
    trust = Trust()
    for logits in (torch.full((1, 3), float("nan")), logits_of([0.6, 0.3, 0.1])):
        choice = GrowthChoice(CHEAP, deepest=1, limit=None, draft_ids=None, trust=trust)
        choice.take(0, logits)
        tree = choice.tree(7)
        choice.learn([0])
    assert tree.size > 1
