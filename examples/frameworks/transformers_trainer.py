"""Hugging Face transformers: another Trainer, which shards its model; a second one resumes, compiled, and exports.

torchrun --nproc-per-node 2 examples/frameworks/transformers_trainer.py
"""

import json
import tempfile

import torch
import torch.distributed as dist
from problem import ACCUMULATE, BATCH, MAX_NORM
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from fsdp_compile.integrations.transformers import Trainer


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(50, (32, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(folder, epochs):
    settings = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=2 * BATCH // dist.get_world_size(),
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=MAX_NORM,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        torch_compile=epochs == 2,
        torch_compile_backend="aot_eager" if epochs == 2 else None,
    )
    set_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return Trainer(model=model, args=settings, train_dataset=Tokens())


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
trainer(folder[0], epochs=1).train()
resumed = trainer(folder[0], epochs=2)
resumed.train(resume_from_checkpoint=True)
resumed.save_model(f"{folder[0]}/exported")
dist.barrier()
plain = LlamaForCausalLM.from_pretrained(f"{folder[0]}/exported")  # loads without sharding
for name, param in resumed.model.named_parameters():
    full = param.full_tensor() if hasattr(param, "full_tensor") else param
    torch.testing.assert_close(plain.get_parameter(name).detach(), full.detach())
if dist.get_rank() == 0:
    print()  # ends a progress bar
    print(json.dumps([row[key] for row in resumed.state.log_history for key in ("loss", "grad_norm") if key in row]))
dist.barrier()
