"""The rule that excuses rounding, and nothing else."""

import torch

from medusa_spec.excuse import Difference, explain


def test_only_a_gap_within_four_times_the_noise_is_excused():
    assert Difference(position=0, gap=0.39, noise=0.1).excused
    assert not Difference(position=0, gap=0.41, noise=0.1).excused
    assert not Difference(position=0, gap=1e-9, noise=0.0).excused


def test_equal_outputs_need_no_excuse(llama, prompt):
    assert explain(llama, prompt(5), [1, 2], [1, 2]) is None


def test_a_wrong_token_is_not_excused_and_its_gap_is_the_target_s(make_model, prompt):
    model, ids = make_model("llama", dtype=torch.float32), prompt(6)
    plain = model.generate(ids, do_sample=False, max_new_tokens=8)[0, 6:].tolist()
    wrong = [*plain[:5], (plain[5] + 1) % 128, *plain[6:]]
    difference = explain(model, ids, plain, wrong)
    with torch.no_grad():
        top = model(torch.cat([ids, torch.tensor([plain[:5]])], dim=1)).logits[0, -1].topk(2).values
    assert difference.position == 5
    assert abs(difference.gap - float(top[0] - top[1])) < 1e-4
    assert 0 <= difference.noise < 1e-4
    assert not difference.excused


def test_noise_grows_with_coarser_rounding(make_model, prompt):
    noise = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("llama", dtype=dtype)
        text = list(range(2, 60))
        noise.append(explain(model, prompt(6), text, [*text[:-1], 100]).noise)
    assert 0 < noise[0] < noise[1] / 10
