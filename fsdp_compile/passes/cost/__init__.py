"""What collectives and computing cost in seconds: numbers in, numbers out, the same on every rank.

hardware.py   links and devices with their figures, each with its source
roofline.py   seconds of a collective by its bytes and ranks, and of computing by its operations and bytes
profile.py    measured seconds in place of estimated ones
"""
