"""The settings of every command: typed, documented, with ranges. One file for each kind of command.

schema.py fills typed trees from YAML and overrides; quantities.py has the types with units. Imports only the ground floor
(errors, installed, json_record, outputs, words). `launch/` calls it through `pipeline.settings.command`; all other code receives the finished
values. Used by most rooms.
"""
