"""The settings of every command: typed, documented, with ranges. run.py has those of a run, commands/ those of all
other commands.

schema.py fills typed trees from YAML and overrides; quantities.py has the types with units. Imports base/, process/ and
architecture/, and no torch. `launch/` calls command.py, which reads a command's settings before its one call; all other
code receives the finished values. Used by most rooms.
"""
