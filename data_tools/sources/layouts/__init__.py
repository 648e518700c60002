"""One reader for each raw layout; to add one, see `docs/extending.md`.

Each lists its samples as a table and says how to fetch their bytes. Imports the helpers beside this folder.
"""
