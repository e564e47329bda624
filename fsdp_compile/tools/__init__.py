"""Tools on top of the package's public names.

cli.py               the command fsdp-compile
commands/            its commands, a file each
options.py           how their options are read, and files written
check.py             `check`: whether a model trains sharded as it does unsharded, by each way of running it
check_training.py    what is checked, and training it unsharded and by each way
check_values.py      all values of a step, and by how much they may differ
check_modules.py     which module's output or gradient differs first
check_job.py         what one rank does: the reference, or a way beside it
check_ranks.py       processes that are such ranks
check_report.py      what came out, as text and JSON
files.py             files of users that define models
server.py            processes that fork from one that has imported what they need; served.py: that
"""
