"""`generate` of transformers on sharded models: a decoder, and an encoder with a decoder.

torchrun --nproc-per-node 2 examples/frameworks/transformers_generate.py
"""

import json

import torch
import torch.distributed as dist
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from fsdp_compile import fully_shard, register_fsdp_forward_method, summon_full_params

SMALL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYERS = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 0}
BART = LAYERS | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}


def decoder():
    return LlamaForCausalLM(LlamaConfig(**SMALL, **LLAMA))


def encoder_decoder():
    return BartForConditionalGeneration(BartConfig(**SMALL, **BART, max_position_embeddings=32))


# Every rank goes on until the last one has finished: all take part in each all-gather.
HOW = {"max_new_tokens": 8, "do_sample": False, "synced_gpus": True}

dist.init_process_group("gloo")
prompts = torch.randint(2, 50, (2, 2, 5), generator=torch.Generator().manual_seed(1))
tokens = []
for build in (decoder, encoder_decoder):
    torch.manual_seed(0)
    model = fully_shard(build().eval())
    prompt = prompts[dist.get_rank()]
    with torch.no_grad(), summon_full_params(model, recurse=False, writeback=False):  # for once
        one = model.generate(prompt, **HOW)
    register_fsdp_forward_method(model, "generate")  # for good
    other = model.generate(prompt, **HOW)
    assert torch.equal(one, other)
    tokens += one.flatten().tolist()
if dist.get_rank() == 0:
    print(json.dumps(tokens))
