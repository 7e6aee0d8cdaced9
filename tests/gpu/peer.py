"""Output tokens a second of transformers' continuous batching, on the same weights, prompts and output lengths.

It gets what helps it: the manager that `generate_batch` uses, told each request's own length, its graphs captured before
the clock starts, the implementation of attention that is the fastest of those that run here.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

# Not every machine has the packages, and releases before 5.20 want the prefix.
ATTENTION = ["flash_attention_3", "flash_attention_2", "sdpa", "paged|sdpa"]
# So long without a result: it hangs.
SILENCE_S = 60


def measure(path, lengths, attention, device):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=attention)
    model = model.to(device).eval()
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, model.config.vocab_size, (prompt,), generator=generator).tolist()
               for prompt, _ in lengths]
    # No end before the length asked for.
    config = GenerationConfig(max_new_tokens=max(output for _, output in lengths), do_sample=False,
                              eos_token_id=-1, pad_token_id=0, use_cache=True)

    def run(manager, count):
        for prompt, (_, output) in list(zip(prompts, lengths))[:count]:
            manager.add_request(input_ids=prompt, max_new_tokens=output, eos_token_id=-1)
        tokens = ended = 0
        heard = time.monotonic()
        while ended < count:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running() or time.monotonic() - heard > SILENCE_S:
                    raise RuntimeError(f"it stopped after {ended} of {count} requests")
                continue
            heard = time.monotonic()
            if getattr(result, "error", None):
                raise RuntimeError(f"a request failed: {result.error}")
            if result.is_finished():
                ended += 1
                tokens += len(result.generated_tokens)
        return tokens

    # Not under inference mode: the manager's thread is not in it, and may not write to tensors made there.
    with model.continuous_batching_context_manager(
            generation_config=config, block=True, timeout=5, warmup=True) as manager:
        run(manager, min(8, len(lengths)))
        begun = time.monotonic()
        tokens = run(manager, len(lengths))
        seconds = time.monotonic() - begun
    wanted = sum(output for _, output in lengths)
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens came of {wanted}")
    return {"output_tokens": tokens, "seconds": seconds, "output_tokens_per_second": tokens / seconds,
            "attention": attention}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("peer.py MODEL LENGTHS.json")
    path, lengths_file = sys.argv[1:]
    with open(lengths_file) as file:
        lengths = json.load(file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failures = []
    for attention in ATTENTION:
        try:
            print(json.dumps(measure(path, lengths, attention, device)))
            return
        except Exception as error:  # The next one may be there.
            failures.append(f"{attention}: {type(error).__name__}: {str(error)[:300]}")
            print(failures[-1], file=sys.stderr)
    print(json.dumps({"error": "; ".join(failures)}))
    sys.exit(1)


if __name__ == "__main__":
    main()
