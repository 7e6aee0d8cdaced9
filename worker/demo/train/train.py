#!/usr/bin/env python3
"""Makes the demo model: tokenizer, training, export and evaluation.

    python train.py                      train with the default number of steps and export
    python train.py --minutes 30         the same, with the length given as a time
    python train.py --evaluate           evaluate the exported files only

See README.md.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # much faster while other programs use the CPU

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "corpus"))
import phrasings  # noqa: E402
import stories  # noqa: E402

SPECIAL = ["<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, END, PAD = 0, 1, 2
CONTEXT = 1024
CONFIG = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=640, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, hidden_act="silu",
    attention_bias=False, mlp_bias=False, attention_dropout=0.0, initializer_range=0.02, bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD,
)
NAME = "inflight-demo.gguf"
GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{% elif message['role'] == 'assistant' %}<|assistant|>{% else %}<|system|>{% endif %}"
    "{{ message['content'] | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# ---------------------------------------------------------------- corpus

def plain(text):
    """What is left of a phrasing without case and punctuation."""
    return " ".join(re.sub(r"[^\w+ ]", " ", text.lower()).split())


def read_entries(path):
    entries = []
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("@"):
            entries.append(dict(name=line[1:].strip(), terms=[], versus=[], asks=[], answers=[], weight=1.0))
            continue
        kind, value = line[0], line[2:].strip()
        assert line[1] == ":", line
        entry = entries[-1]
        if kind == "t":
            entry["terms"] += [t.strip() for t in value.split(";")]
        elif kind == "v":
            entry["versus"].append([t.strip() for t in value.split(";")])
        elif kind == "q":
            entry["asks"].append(value)
        elif kind == "a":
            entry["answers"].append(value.replace("\\n", "\n"))
        elif kind == "w":
            entry["weight"] = float(value)
        else:
            raise ValueError(line)
    return entries


def read_unknown(path):
    entry = dict(nouns=[], asks=[], answers=[])
    for line in path.read_text().splitlines():
        if line[:2] == "n:":
            entry["nouns"] += [t.strip() for t in line[2:].split(";")]
        elif line[:2] == "q:":
            entry["asks"].append(line[2:].strip())
        elif line[:2] == "a:":
            entry["answers"].append(line[2:].strip())
    return entry


def read_eval(path):
    cases = []
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            question, words = line.rsplit("=>", 1)
            cases.append((question.strip(), [w.strip().split("|") for w in words.split(",")]))
    return cases


class Corpus:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.entries = read_entries(HERE / "corpus/qa.txt")
        self.weights = [e["weight"] for e in self.entries]
        self.unknown = read_unknown(HERE / "corpus/unknown.txt")
        self.held_out = {plain(q) for q, _ in read_eval(HERE / "corpus/eval.txt")} - {"hello", "who are you", "tell me a story"}

    def unknown_question(self):
        rng, unknown = self.rng, self.unknown
        roll = rng.random()
        if roll < 0.42:
            return rng.choice(unknown["asks"])
        if roll < 0.9:
            noun = rng.choice(unknown["nouns"])
            if rng.random() < 0.15:  # such as "a chess guitar": no known thing, though made of common words
                noun += " " + re.sub(r"^(an?|the) ", "", rng.choice(unknown["nouns"]))
            if rng.random() < 0.08:
                return rng.choice(phrasings.VERSUS).replace("{a}", noun).replace("{b}", rng.choice(unknown["nouns"]))
        elif roll < 0.97:
            noun = rng.choice(["", "a ", "the "]) + stories.pseudo(rng)
        elif roll < 0.985:
            return rng.choice(["What is {} plus {}", "{} + {}", "What is {} times {}", "how much is {} * {}", "{} - {}", "what is {}+{}", "calculate {} / {}"]).format(rng.randint(0, 99), rng.randint(0, 99))
        else:
            return rng.choice(["What is the capital of {}", "Who is {}", "Where is {}", "Who invented {}", "How do I make {}", "How old is {}", "Write {} code for me"]).format(stories.pseudo(rng).capitalize())
        return rng.choice(phrasings.TERM).replace("{t}", noun)

    def known_question(self, entry):
        rng = self.rng
        terms, versus, asks = entry["terms"], entry["versus"], entry["asks"]
        roll = rng.random()
        if versus and roll < 0.75:
            a, b = rng.choice(versus)
            if rng.random() < 0.5:
                a, b = b, a
            return rng.choice(phrasings.VERSUS).replace("{a}", a).replace("{b}", b)
        if terms and (roll < 0.6 or not asks):
            # The first term is the usual one.
            term = terms[0] if rng.random() < 0.3 else rng.choice(terms)
            return rng.choice(phrasings.TERM).replace("{t}", term)
        return rng.choice(asks or ["Explain this"])

    def pair(self, story_share):
        """A question as it might be typed, and an answer."""
        rng = self.rng
        while True:
            roll = rng.random()
            if roll < story_share:
                answer, facts = stories.story(rng)
                question = stories.request(rng, facts)
            elif roll < story_share + (1 - story_share) * 0.13:
                question, answer = self.unknown_question(), rng.choice(self.unknown["answers"])
            else:
                entry = rng.choices(self.entries, self.weights)[0]
                question, answer = self.known_question(entry), rng.choice(entry["answers"])
            question = phrasings.vary(rng, question)
            if plain(question) not in self.held_out:
                return question, answer

    def document(self):
        """Segments (text, is it learned?) of one training document."""
        rng = self.rng
        roll = rng.random()
        if roll < 0.17:  # a story as plain text
            text, _ = stories.story(rng)
            if rng.random() < 0.12:  # one that begins in the middle
                sentences = text.split(". ")
                text = ". ".join(sentences[rng.randint(1, min(6, len(sentences) - 1)):])
            return [("<|bos|>", False), (text + "<|end|>", True)]
        if roll < 0.23:  # knowledge as plain text
            question, answer = self.pair(0.0)
            form = rng.random()
            if form < 0.2:
                return [("<|bos|>", False), (answer + "<|end|>", True)]
            if form < 0.7:
                return [("<|bos|>" + question + rng.choice(["\n", "\n\n", ""]), False), (answer + "<|end|>", True)]
            return [("<|bos|>" + rng.choice(["Q: ", "Question: "]) + question + "\n" + rng.choice(["A:", "Answer:"]), False), (" " + answer + "<|end|>", True)]
        head = "<|bos|>"
        if rng.random() < 0.2:
            prompt = rng.choice(phrasings.SYSTEM)
            while "{p}" in prompt:
                prompt = prompt.replace("{p}", stories.pseudo(rng).capitalize(), 1)
            head += "<|system|>" + prompt + "<|end|>"
        if roll < 0.55:  # only the beginning of a requested story: most of what follows from the request is decided there
            text, facts = stories.story(rng)
            question = phrasings.vary(rng, stories.request(rng, facts))
            if plain(question) not in self.held_out:
                sentences = re.split(r"(?<=[.!?]) ", text)
                return [(head + "<|user|>" + question + "<|end|><|assistant|>", False), (" ".join(sentences[:rng.choice([1, 1, 2, 3])]), True)]
        turns = 1 if roll < 0.9 else rng.choice([2, 2, 2, 3, 3, 4, 5, 6, 8])
        segments = []
        for _ in range(turns):
            question, answer = self.pair(0.22 if turns == 1 else 0.12)
            segments += [(head + "<|user|>" + question + "<|end|><|assistant|>", False), (answer + "<|end|>", True)]
            head = ""
        return segments


def train_tokenizer(corpus):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: F401
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)])
    texts = []
    for entry in corpus.entries:
        texts += [a for a in entry["answers"]] * 12
    for _ in range(6000):
        texts += corpus.pair(0.0)
    for _ in range(1500):
        text, facts = stories.story(corpus.rng)
        texts += [text, stories.request(corpus.rng, facts)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"], special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    return tokenizer


def encode(tokenizer, documents):
    """Token ids and the mask of learned tokens, per document."""
    encoded = iter(tokenizer.encode_batch([text for doc in documents for text, _ in doc], add_special_tokens=False))
    result = []
    for doc in documents:
        ids, learned = [], []
        for _, learn in doc:
            part = next(encoded).ids
            if len(ids) + len(part) > CONTEXT:
                break
            ids += part
            learned += [learn] * len(part)
        if any(learned):
            result.append((ids, learned))
    return result


def micro_batches(corpus, tokenizer, pool=768, size=3072):
    """Yields endless pairs of batches of similar length: one of short documents, one of long ones."""
    while True:
        documents = sorted(encode(tokenizer, [corpus.document() for _ in range(pool)]), key=lambda d: len(d[0]))
        batches, current = [], []
        for doc in documents:
            if current and (len(current) + 1) * len(doc[0]) > size:
                batches.append(current)
                current = []
            current.append(doc)
        half = len(batches) // 2
        short, long = batches[:half], batches[half:half * 2]
        corpus.rng.shuffle(short)
        corpus.rng.shuffle(long)
        for pair in zip(short, long):
            yield [tensors(b) for b in pair]


def tensors(batch):
    width = max(len(ids) for ids, _ in batch)
    x = torch.full((len(batch), width), PAD)
    mask = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, (ids, learned) in enumerate(batch):
        x[row, :len(ids)] = torch.tensor(ids)
        mask[row, :len(ids)] = torch.tensor(learned)
    return x, mask


# ---------------------------------------------------------------- training

def build_model():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def loss_of(model, x, mask, bf16):
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model.model(input_ids=x[:, :-1], use_cache=False).last_hidden_state
        keep = mask[:, 1:]
        logits = model.lm_head(hidden[keep])
    return F.cross_entropy(logits.float(), x[:, 1:][keep], reduction="sum"), int(keep.sum())


def train(args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    corpus = Corpus(args.seed)
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    model = build_model()
    if args.resume:
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        model.load_state_dict(torch.load(work / "checkpoint.pt"))
    else:
        tokenizer = train_tokenizer(corpus)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    data = micro_batches(corpus, tokenizer)
    start = time.time()
    seen, average, step, saved = 0, None, 0, 0.0
    while True:
        progress = (time.time() - start) / (60 * args.minutes) if args.minutes else step / args.steps
        if progress >= 1:
            break
        rate = min(1.0, (step + 1) / (15 if args.resume else 60)) * (1 - progress if progress > 0.2 else 0.8) / 0.8
        total, count = 0.0, 0
        for x, mask in next(data):
            loss, n = loss_of(model, x, mask, not args.fp32)
            (loss / n / 2).backward()
            total, count, seen = total + float(loss.detach()), count + n, seen + int((x != PAD).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average = total / count if average is None else 0.95 * average + 0.05 * total / count
        step += 1
        if step % 50 == 0:
            print(f"step {step}  {(time.time() - start) / 60:.1f} min  {seen / 1e6:.2f}M tokens  loss {average:.4f}  rate {rate:.2f}", flush=True)
        if time.time() - saved > 180:
            torch.save(model.state_dict(), work / "checkpoint.pt")
            tokenizer.save(str(work / "tokenizer.json"))
            saved = time.time()
    torch.save(model.state_dict(), work / "checkpoint.pt")
    print(f"trained {step} steps, {seen} tokens, {(time.time() - start) / 60:.1f} min, final loss {average:.4f}")
    export(model, tokenizer, Path(args.out))


# ---------------------------------------------------------------- export

def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def interleave(weight, heads):
    """Rows of a query or key projection in the order of GGUF's Llama: the two halves of each head alternate."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def q6_k(weight):
    """Encodes rows as q6_k: blocks of 256 elements, 16 scales of 8 bits each with a common scale, elements of 6 bits.

    The layout is that of ggml's `block_q6_K`: low nibbles, high pairs of bits, scales, common scale.
    """
    groups = weight.reshape(-1, 16, 16).astype(np.float32)
    # The element of largest magnitude becomes -32, the longer end of the range, whatever its sign.
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)[..., 0]
    scales = largest / -32
    top = np.take_along_axis(scales, np.abs(scales).argmax(-1, keepdims=True), -1)
    common = (top / -128).astype(np.float16)
    safe = np.where(common == 0, 1, common).astype(np.float32)
    steps = np.clip(np.round(scales / safe), -128, 127)
    unit = (steps * safe)[..., None]
    quants = np.clip(np.round(np.divide(groups, unit, out=np.zeros_like(groups), where=unit != 0)), -32, 31)
    quants = (quants + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = quants & 15
    low = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], -1)
    high = quants >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), steps.astype(np.int8).view(np.uint8), common.view(np.uint8).reshape(-1, 2)]
    return np.concatenate(parts, -1).reshape(weight.shape[0], -1)


def export(model, tokenizer, out):
    """Writes the model as GGUF: matrices in q8_0, those from the hidden size to the feed-forward size in q6_k."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(str(out / NAME), "llama")
    writer.add_name("inflight-demo")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_rope_dimension_count(CONFIG["head_dim"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(PAD)

    def add(name, weight):
        if weight.ndim == 1:
            writer.add_tensor(name, weight.astype(np.float32))
        elif "gate" in name or "up" in name:
            writer.add_tensor(name, q6_k(weight), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    add("token_embd.weight", state["model.embed_tokens.weight"])
    add("output_norm.weight", state["model.norm.weight"])
    for layer in range(CONFIG["num_hidden_layers"]):
        for ours, theirs in GGUF_NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs == "attn_q":
                weight = interleave(weight, CONFIG["num_attention_heads"])
            if theirs == "attn_k":
                weight = interleave(weight, CONFIG["num_key_value_heads"])
            add(f"blk.{layer}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (out / NAME).chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "generation_config.json", dict(bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD, do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=400))
    write_json(out / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", model_max_length=CONTEXT, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>",
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
        added_tokens_decoder={str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True) for i, t in enumerate(SPECIAL)},
        chat_template=CHAT_TEMPLATE))
    size = sum((out / n).stat().st_size for n in (NAME, "tokenizer.json", "generation_config.json", "tokenizer_config.json"))
    print(f"exported {size} bytes to {out}")
    assert size <= 4_000_000


# ---------------------------------------------------------------- evaluation

def load_exported(out):
    """The exported model with the weights that its file holds, after quantization."""
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) if t.tensor_type.name.startswith("Q") else t.data for t in gguf.GGUFReader(str(out / NAME)).tensors}
    state = {"model.embed_tokens.weight": tensors["token_embd.weight"], "lm_head.weight": tensors["token_embd.weight"], "model.norm.weight": tensors["output_norm.weight"]}
    for layer in range(CONFIG["num_hidden_layers"]):
        for ours, theirs in GGUF_NAMES.items():
            weight = tensors[f"blk.{layer}.{theirs}.weight"]
            heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}.get(theirs)
            if heads:
                weight = weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            state[f"model.layers.{layer}.{ours}.weight"] = weight
    model = build_model()
    model.load_state_dict({name: torch.from_numpy(np.array(tensor)) for name, tensor in state.items()})
    return model.eval()


def evaluate(args):
    """Answers the held-out phrasings greedily with the exported files."""
    from transformers import AutoTokenizer
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model = load_exported(Path(args.out))
    cases = read_eval(HERE / "corpus/eval.txt")
    passed = 0
    for question, words in cases:
        ids = tokenizer.apply_chat_template([dict(role="user", content=question)], add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, top_p=None, max_new_tokens=400)[0, ids.shape[1]:]
        answer = tokenizer.decode(out, skip_special_tokens=True)
        good = all(any(w.lower() in answer.lower() for w in group) for group in words) and int(out[-1]) == END
        passed += good
        if not good or args.verbose:
            print(f"[{'ok' if good else 'FAILED'}] {question}\n    {answer}" + ("" if int(out[-1]) == END else "  [did not end]"), flush=True)
    print(f"{passed} of {len(cases)} passed ({100 * passed / len(cases):.1f} %)")
    prompts = ["Once upon a time there was a little robot", "Once upon a time", "What is continuous batching?", "The brave little duck"]
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert int(ids[0, 0]) == BOS
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, top_p=None, max_new_tokens=400)[0]
        print(f"--- {prompt!r}\n{tokenizer.decode(out, skip_special_tokens=True)}\n    ({len(out)} tokens{', ended' if int(out[-1]) == END else ', did not end'})")


def main():
    parser = argparse.ArgumentParser(description="Trains, exports and evaluates the demo model.")
    parser.add_argument("--steps", type=int, default=4000, help="training steps (default 4000)")
    parser.add_argument("--minutes", type=float, default=0, help="train for this long instead of a number of steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fp32", action="store_true", help="no bf16 arithmetic")
    parser.add_argument("--out", default=str(HERE.parent), help="where the model files go")
    parser.add_argument("--work", default="/tmp/inflight-demo", help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="begin with the last checkpoint and its tokenizer")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the exported files")
    parser.add_argument("--export-checkpoint", action="store_true", help="only export the last checkpoint")
    parser.add_argument("--verbose", action="store_true", help="print all answers of the evaluation")
    args = parser.parse_args()
    if args.export_checkpoint:
        from tokenizers import Tokenizer
        model = build_model()
        model.load_state_dict(torch.load(Path(args.work) / "checkpoint.pt"))
        export(model, Tokenizer.from_file(str(Path(args.work) / "tokenizer.json")), Path(args.out))
    elif not args.evaluate:
        train(args)
    if not args.export_checkpoint:
        evaluate(args)


if __name__ == "__main__":
    main()
