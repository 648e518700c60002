"""Every setting of every command: typed, documented, with its range. One file for each kind of command.

schema.py makes typed trees of YAML and overrides; quantities.py are lengths and sizes with units. Imports errors only.
Called by `launch/` (through `pipeline.command`); everything else is handed the finished values.
"""
