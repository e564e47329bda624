"""What ranks compare, so that those that differ raise instead of waiting for each other.

checks.py         what is checked of a root, by each rank alone and among ranks
order.py          the order in which units communicate, and what graphs call to compare theirs
"""
