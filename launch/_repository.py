"""Puts the repository on the path, of which `python launch/NAME.py` knows this folder only; and the frame of every
command.
"""

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

from pipeline.settings import command as command
