"""Training. loop.py is the file to read; start.py checks, starts and ends a run; setup.py prepares what the loop uses,
bookkeeping.py does what it does beside the step, shown_facts.py says what MLflow shows; zero/ holds DeepSpeed.

Imports all rooms before it in docs/architecture.md but architecture/ and explain/. VTAB's cells use `training_step`
alone. Used by experiment/, data_tools/ and launch/.
"""
