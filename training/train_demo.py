"""Train the demo model: a small Qwen3-MoE language model on GSM8K's training split.

    python training/train_demo.py --data DIR --out src/moespeq/demo/model

DIR holds `train.jsonl` and `test.jsonl` (GSM8K: one {"question", "answer"} a line). The tokenizer is a byte-level BPE
trained on the same text. The checkpoint with the lowest validation loss is kept, written in bf16 beside
`training.json`, which records that loss and the command. Three minutes on one data-centre GPU; a CPU takes hours.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shlex
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 4096
BLOCK_TOK = 512
EOS = "<|eos|>"


def read_problems(path: Path) -> list[str]:
    """One training text a problem; the `<<...>>` calculator notes are stripped."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        f"Question: {row['question'].strip()}\nAnswer: {re.sub(r'<<.*?>>', '', row['answer']).strip()}" for row in rows
    ]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def demo_config() -> Qwen3MoeConfig:
    """8 layers x 16 experts, top-2; 4.3 M parameters, 8.6 MB in bf16."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        intermediate_size=256,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.02,
        output_router_logits=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def pack_blocks(encoded: list[list[int]], count: int, rng: random.Random) -> torch.Tensor:
    """`count` blocks of BLOCK_TOK tokens, each a concatenation of randomly drawn problems. [count, BLOCK_TOK]"""
    blocks = []
    for _ in range(count):
        block: list[int] = []
        while len(block) < BLOCK_TOK:
            block += rng.choice(encoded)
        blocks.append(block[:BLOCK_TOK])
    return torch.tensor(blocks)


def validation_blocks(encoded: list[list[int]], count: int) -> torch.Tensor:
    stream = [token for text in encoded for token in text]
    return torch.tensor(stream[: count * BLOCK_TOK]).view(count, BLOCK_TOK)


@torch.no_grad()
def validation_loss(model: Qwen3MoeForCausalLM, blocks: torch.Tensor) -> float:
    model.eval()
    with torch.autocast(blocks.device.type, torch.bfloat16):
        logits = model(input_ids=blocks).logits.float()
    model.train()
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE), blocks[:, 1:].reshape(-1)).item()


def shrink_residual_outputs(model: Qwen3MoeForCausalLM, num_layers: int) -> None:
    """Scale the projections that write to the residual stream by 1 / sqrt(2 L), as GPT-2 does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                parameter.mul_(1 / math.sqrt(2 * num_layers))


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    texts = read_problems(args.data / "train.jsonl")
    tokenizer = train_tokenizer(texts)
    eos = tokenizer.token_to_id(EOS)
    encoded = [[*tokenizer.encode(text).ids, eos] for text in texts]
    held_out = [[*tokenizer.encode(text).ids, eos] for text in read_problems(args.data / "test.jsonl")]
    validation = validation_blocks(held_out, 64).to(device)

    config = demo_config()
    model = Qwen3MoeForCausalLM(config).to(device)
    shrink_residual_outputs(model, config.num_hidden_layers)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=args.lr,
        betas=(0.9, 0.95),
        weight_decay=args.weight_decay,
        fused=device == "cuda",
    )
    best, best_state, best_step = math.inf, {}, 0
    started_s = time.monotonic()
    for step in range(1, args.steps + 1):
        progress = max(step / args.steps, (time.monotonic() - started_s) / (60 * args.minutes))
        warm = min(1.0, step / 60)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * (0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, progress))))
        blocks = pack_blocks(encoded, args.batch, rng).to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=blocks, labels=blocks).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or progress >= 1:
            held = validation_loss(model, validation)
            elapsed_s = time.monotonic() - started_s
            print(f"step {step} train {loss.item():.3f} validation {held:.3f} {elapsed_s:.0f} s", flush=True)
            if held < best:
                best, best_step = held, step
                best_state = {k: v.detach().to(torch.bfloat16).clone() for k, v in model.state_dict().items()}
            elif held > best + 0.15:
                break
        if progress >= 1:
            break

    model = model.to(torch.bfloat16)
    model.load_state_dict(best_state)
    model.config.output_router_logits = False
    model.config.dtype = "bfloat16"
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS).save_pretrained(args.out)
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "validation_loss": round(best, 4),
        "steps": best_step,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "data": "GSM8K training split (MIT licence, Copyright (c) 2021 OpenAI); validation on test text",
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
