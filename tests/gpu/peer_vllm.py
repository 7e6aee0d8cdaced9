"""vLLM on the same checkpoint, to be asked for rounds of requests, as the measuring binary is: `peer_vllm.py MODEL OPTIONS`

OPTIONS is a JSON object: utilization, slots, batch_tokens, context_tokens. The first line of input begins to load the model, each
later one is a round: {"lengths": [[prompt, output], ...], "sampling": {...}}. Each is answered with one line of JSON.
"""

import json
import os
import random
import sys
import time


def private_output():
    """The standard output for answers alone: whatever else is printed there goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=answers, flush=True)


def load(path, options):
    from vllm import LLM
    common = dict(model=path, skip_tokenizer_init=True, dtype="bfloat16", seed=0, enable_prefix_caching=False,
                  gpu_memory_utilization=options["utilization"], max_model_len=options["context_tokens"],
                  max_num_seqs=options["slots"], max_num_batched_tokens=options["batch_tokens"])
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= options["slots"]]
    try:
        # Fewer graphs than by default, of the same sizes as ours at these batches: capturing takes time.
        return LLM(**common, compilation_config={"cudagraph_capture_sizes": sizes})
    except (TypeError, ValueError) as error:
        print(f"without sizes of graphs: {error}", file=sys.stderr)
        return LLM(**common)


def serve(engine, vocabulary, message, number):
    from vllm import SamplingParams
    generator = random.Random(number)
    prompts = [{"prompt_token_ids": [generator.randrange(2, vocabulary) for _ in range(prompt)]} for prompt, _ in message["lengths"]]
    sampling = {"temperature": 0.0, **message.get("sampling", {})}
    settings = [SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, **sampling) for _, output in message["lengths"]]
    begun = time.monotonic()
    results = engine.generate(prompts, settings, use_tqdm=False)
    seconds = time.monotonic() - begun
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    wanted = sum(output for _, output in message["lengths"])
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens came of {wanted}")
    return {"output_tokens": tokens, "seconds": seconds, "output_tokens_per_second": tokens / seconds}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("peer_vllm.py MODEL OPTIONS")
    path, options = sys.argv[1], json.loads(sys.argv[2])
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    answer = private_output()
    try:
        # What takes longest to import, while another program loads its model.
        import vllm
        answer({"ready": False, "version": vllm.__version__})
        sys.stdin.readline()
        begun = time.monotonic()
        engine = load(path, options)
        with open(os.path.join(path, "config.json")) as file:
            vocabulary = json.load(file)["vocab_size"]
        answer({"ready": True, "load_seconds": time.monotonic() - begun})
        for number, line in enumerate(sys.stdin):
            answer(serve(engine, vocabulary, json.loads(line), number))
    except Exception as error:  # Whoever asks should hear why.
        answer({"error": f"{type(error).__name__}: {str(error)[:600]}"})
        raise


if __name__ == "__main__":
    main()
