"""Adapters for training frameworks: optional parts, nothing below the top imports them. Each needs its framework.

lightning      strategies for Lightning's Fabric and Trainer
accelerate     an Accelerator for Hugging Face accelerate
transformers   a Trainer for Hugging Face transformers
torchtitan     configs whose models this package shards, for torchtitan's trainer
"""
