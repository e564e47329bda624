"""The commands of `fsdp-compile`, a file each: its texts, its options, and what it runs.

Functions import what they need themselves: importing torch takes seconds, and `--help` answers at once without it.
"""
