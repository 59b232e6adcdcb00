"""Train the seed of a published shape: a small MoE language model with that model's layers, experts and routing.

    python benchmarks/train_seed.py --shape qwen1.5-moe --data DIR --out SEED_DIR

DIR holds `train.jsonl` and `test.jsonl` (GSM8K: one {"question", "answer"} a line). The tokenizer is a byte-level BPE
of the same text; the checkpoint with the lowest validation loss is kept and written in bf16. About six minutes on one
data-centre GPU. Its arithmetic is wrong, as models this small are: it serves measurement, not answers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from prompts import read_texts
from shapes import SHAPES

EOS = "<|eos|>"
_WARM_STEPS = 60
_LAST_LR_SHARE = 0.05
_VALIDATE_EVERY = 50
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.02,
    "output_router_logits": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_MIXTRAL: dict[str, Any] = {"num_hidden_layers": 32, "num_experts_per_tok": 2, "sliding_window": None}
SEEDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen1.5-moe": (
        "qwen2_moe",
        {
            "num_hidden_layers": 24,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "num_key_value_heads": 8,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "qwen3-30b-half": (
        "qwen3_moe",
        {
            "num_hidden_layers": 24,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "intermediate_size": 128,
            "moe_intermediate_size": 16,
        },
    ),
    "phi-3.5-moe": ("mixtral", {**_MIXTRAL, "num_local_experts": 16, "intermediate_size": 80}),
    "mixtral-8x7b": ("mixtral", {**_MIXTRAL, "num_local_experts": 8, "intermediate_size": 224}),
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to train; the first of steps and minutes that is over ends it."""

    steps: int
    minutes: float
    batch: int
    block_tok: int
    lr: float

    def progress(self, step: int, elapsed_s: float) -> float:
        return min(1.0, max(step / self.steps, elapsed_s / (60 * self.minutes)))

    def lr_at(self, step: int, progress: float) -> float:
        """Linear warm-up, then a cosine down to a small share."""
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * min(1.0, step / _WARM_STEPS) * (_LAST_LR_SHARE + (1 - _LAST_LR_SHARE) * cosine)


def read_corpus(path: Path) -> list[str]:
    """One text a problem, question and answer."""
    return [f"{prompt} {answer}" for prompt, answer in read_texts(path)]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE that keeps digits apart, so that numbers are read the same everywhere."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_model(shape: str, **overrides: Any) -> PreTrainedModel:
    """The untrained seed; what writes to the residual stream starts small, as in GPT-2."""
    family, specific = SEEDS[shape]
    config = AutoConfig.for_model(family, **{**_COMMON, **specific, **overrides})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                parameter.mul_(1 / math.sqrt(2 * config.num_hidden_layers))
    return model


def random_blocks(encoded: Sequence[list[int]], schedule: Schedule, rng: random.Random) -> Iterator[torch.Tensor]:
    """Batches [batch, block_tok], each row randomly drawn problems one after the other."""
    while True:
        rows = []
        for _ in range(schedule.batch):
            row: list[int] = []
            while len(row) < schedule.block_tok:
                row += rng.choice(encoded)
            rows.append(row[: schedule.block_tok])
        yield torch.tensor(rows)


@torch.no_grad()
def validation_loss(model: PreTrainedModel, blocks: torch.Tensor) -> float:
    """Mean loss a token; the router's balancing loss is left out."""
    model.eval()
    with torch.autocast(blocks.device.type, torch.bfloat16):
        logits = model(input_ids=blocks).logits.float()
    model.train()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten()).item()


def train(model: PreTrainedModel, batches: Iterator[torch.Tensor], held_out: torch.Tensor, schedule: Schedule) -> float:
    """Train in place and leave the best weights in `model`; returns their validation loss."""
    device = held_out.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.lr, betas=(0.9, 0.95), weight_decay=0.1)
    best, best_state = math.inf, {}
    begin_s, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        step += 1
        progress = schedule.progress(step, time.monotonic() - begin_s)
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr_at(step, progress)
        batch = next(batches).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _VALIDATE_EVERY == 0 or progress >= 1:
            found = validation_loss(model, held_out)
            print(f"step {step}: train {loss.item():.3f}, validation {found:.3f}", flush=True)
            if found < best:
                best = found
                best_state = {name: value.to("cpu", torch.bfloat16) for name, value in model.state_dict().items()}
    model.load_state_dict(best_state)
    return best


def save(model: PreTrainedModel, tokenizer: Tokenizer, out: Path, facts: dict[str, Any]) -> None:
    """Write the seed as bf16 with its tokenizer and how it was made."""
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(out, max_shard_size="15MB")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS).save_pretrained(out)
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def train_seed(
    shape: str, data: Path, out: Path, schedule: Schedule, *, seed: int, device: str, **overrides: Any
) -> float:
    """The whole of it; returns the validation loss."""
    torch.manual_seed(seed)
    model = new_model(shape, **overrides).to(device)
    texts = read_corpus(data / "train.jsonl")
    tokenizer = train_tokenizer(texts, model.config.vocab_size)
    eos = tokenizer.token_to_id(EOS)
    encoded = [[*tokenizer.encode(text).ids, eos] for text in texts]
    stream = [token for text in read_corpus(data / "test.jsonl") for token in (*tokenizer.encode(text).ids, eos)]
    num_blocks = min(32, len(stream) // schedule.block_tok)
    held_out = torch.tensor(stream[: num_blocks * schedule.block_tok], device=device).view(num_blocks, -1)
    loss = train(model, random_blocks(encoded, schedule, random.Random(seed)), held_out, schedule)
    save(model, tokenizer, out, {"shape": shape, "seed": seed, "validation_loss": round(loss, 4)})
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name in SEEDS], required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--block", type=int, default=512, help="tokens of a training row")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    schedule = Schedule(args.steps, args.minutes, args.batch, args.block, args.lr)
    loss = train_seed(args.shape, args.data, args.out, schedule, seed=args.seed, device=args.device)
    print(f"{args.out}: validation loss {loss:.3f}")


if __name__ == "__main__":
    main()
