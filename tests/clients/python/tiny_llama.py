"""A Llama in numpy, for tiny checkpoints: log probabilities by one pass over all tokens, in f64, without a cache."""

import json
import math
import pathlib

import numpy as np
from safetensors.numpy import load_file


class TinyLlama:
    """The checkpoint of a Llama in f32, of one file."""

    def __init__(self, folder: pathlib.Path):
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if self.config["model_type"] != "llama":
            raise ValueError(f"{folder}: a {self.config['model_type']} model, this is for Llama")
        self.weights = {name: one.astype(np.float64) for name, one in load_file(folder / "model.safetensors").items()}

    def frequencies(self) -> np.ndarray:
        """Rotary frequencies [head / 2], with the scaling of Llama 3."""
        config = self.config
        half = config["head_dim"] // 2
        plain = config["rope_theta"] ** -(np.arange(half) / half)
        scaling = config.get("rope_scaling")
        if not scaling:
            return plain
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return plain * (kept + (1 - kept) / scaling["factor"])

    def norm(self, name: str, rows: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return rows / scale * self.weights[f"{name}.weight"]

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """Log probabilities [tokens, vocabulary]: row k is what follows `tokens[: k + 1]`."""
        config, weights, count = self.config, self.weights, len(tokens)
        heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        angles = np.outer(np.arange(count), self.frequencies())
        cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def rotate(rows):
            left, right = np.split(rows, 2, axis=-1)
            return np.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)

        future = np.triu(np.full((count, count), -np.inf), 1)
        hidden = weights["model.embed_tokens.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"

            def project(which, rows):
                return rows @ weights[f"{name}.{which}.weight"].T

            normed = self.norm(f"{name}.input_layernorm", hidden)
            query = rotate(project("self_attn.q_proj", normed).reshape(count, heads, size))
            key = rotate(project("self_attn.k_proj", normed).reshape(count, groups, size))
            value = project("self_attn.v_proj", normed).reshape(count, groups, size)
            key, value = (np.repeat(one, heads // groups, axis=1) for one in (key, value))
            scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(size) + future
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", shares, value).reshape(count, heads * size)
            hidden = hidden + project("self_attn.o_proj", attended)
            normed = self.norm(f"{name}.post_attention_layernorm", hidden)
            gate = project("mlp.gate_proj", normed)
            hidden = hidden + project("mlp.down_proj", gate / (1 + np.exp(-gate)) * project("mlp.up_proj", normed))
        head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
        logits = self.norm("model.norm", hidden) @ head.T
        largest = logits.max(axis=-1, keepdims=True)
        return logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood of `continuation`, and whether greedy decoding would give it."""
        tokens = [*context, *continuation]
        rows = self.logprobs(tokens)[len(context) - 1 : -1]
        return float(rows[np.arange(len(continuation)), continuation].sum()), rows.argmax(axis=-1).tolist() == continuation

    def greedy(self, prompt: list[int], limit: int) -> list[int]:
        """Up to `limit` tokens of greedy decoding, without the one that ends the output."""
        ends, tokens = self.config["eos_token_id"], []
        ends = ends if isinstance(ends, list) else [ends]
        while len(tokens) < limit:
            token = int(self.logprobs([*prompt, *tokens])[-1].argmax())
            if token in ends:
                break
            tokens.append(token)
        return tokens
