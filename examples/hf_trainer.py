"""A byte-level GPT-2 with VRLAMB in the Hugging Face Trainer, under DeepSpeed ZeRO-2; GSNR in the log.

deepspeed --num_gpus 2 examples/hf_trainer.py          (on a CPU: DS_ACCELERATOR=cpu LOCAL_SIZE=2 in front)
python examples/hf_trainer.py                          (one process, without DeepSpeed)
"""

from __future__ import annotations

import os
import tempfile

import torch
from text import VOCABULARY, blocks, unigram_entropy
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ds_vrgd
from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op
from ds_vrgd.hf import GSNRCallback, VRTrainerMixin

leave_out_shared_memory_op()  # on a CPU, compiling it takes a minute

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
}


class VRTrainer(VRTrainerMixin, Trainer):
    """The Trainer, with the param groups of VRLAMB."""


def main() -> None:
    """Train for 80 steps of 128 blocks, and compare with the loss of the bytes' frequencies alone."""
    set_seed(0)
    spread = "RANK" in os.environ
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        deepspeed=DEEPSPEED if spread else None,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4 if spread else 8,
        max_steps=80,
        learning_rate=4e-2,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    trainer = VRTrainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks(64)],
        optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {"gamma": 0.1}),
    )
    trainer.add_callback(GSNRCallback(trainer))
    trainer.train()
    if trainer.is_world_process_zero():
        last = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
        print(f"loss {last:.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    if spread:
        torch.distributed.destroy_process_group()  # gloo's threads may abort an exit that leaves them running


if __name__ == "__main__":
    main()
