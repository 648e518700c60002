"""Training. loop.py is the file to read; run.py starts and ends it, setup.py prepares what it uses; zero/ holds DeepSpeed.

Imports all rooms before it in docs/architecture.md but architecture/, ray_tasks/ and explain/. VTAB's cells use `training_step` alone. Used by experiment/, data_tools/ and launch/.
"""
