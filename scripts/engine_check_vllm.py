"""Decodes prompts greedily with vLLM and prints tokens and counters. Runs in vLLM's environment and knows no heads."""

import json
import sys
from pathlib import Path


def main(job_file: str, result_file: str) -> None:
    """Reads a job, decodes it, writes what came.

    Args:
        job_file: JSON: `model`, `speculative` (vLLM's config, or null), `prompts` (lists of ids), `max_new_tokens`,
            `processes` (tensor parallel).
        result_file: JSON: `engine`, `tokens` (a list per prompt), `drafts`, `draft_tokens`, `per_position`.
    """
    import vllm
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    speculative = job["speculative"]
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"]
    model = LLM(
        model=job["model"],
        dtype="float32",
        speculative_config=speculative,
        tensor_parallel_size=job["processes"],
        max_model_len=longest + 32,  # so that no draft is cut where the text ends
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    outputs = model.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling)
    counted = {metric.name: metric for metric in model.get_metrics() if "spec_decode" in metric.name}
    count = {name.removeprefix("vllm:spec_decode_num_"): metric for name, metric in counted.items()}
    result = {
        "engine": f"vLLM {vllm.__version__}",
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": int(count["drafts"].value) if speculative else 0,
        "draft_tokens": int(count["draft_tokens"].value) if speculative else 0,
        "per_position": [int(n) for n in count["accepted_tokens_per_pos"].values] if speculative else [],
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
