"""A run on its hosts: state files of its folder, stopping, supervision; tasks and ranks on Ray.

Imports checkpoint/, monitor/, data/storage (paths), settings/, process/ and base/. Used by train/, experiment/,
review/, data_tools/ and launch/.
"""
