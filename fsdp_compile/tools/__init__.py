"""Tools on top of the package's public names.

cli.py               the command fsdp-compile
commands/            its commands, a file each
options.py           how their options are read, and files written
check.py             `check`: whether a model trains sharded as it does unsharded, by each way of running it
files.py             files of users that define models
server.py            processes that fork from one that has imported what they need; served.py: that
"""
