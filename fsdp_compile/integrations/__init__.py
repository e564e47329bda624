"""Training frameworks, each in a file that is imported by name and needs its framework.

lightning      strategies for Lightning's Fabric and Trainer
accelerate     an Accelerator for Hugging Face accelerate
transformers   a Trainer for Hugging Face transformers
"""
