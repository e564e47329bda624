"""What ranks compare, so that those that differ raise instead of waiting for each other.

root_checks.py     what is checked of a root, by each rank alone and among ranks
rank_order.py      the order in which units communicate, and what graphs call to compare theirs
"""
