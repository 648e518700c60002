"""Raw images to a sharded data set. Read shard.py first: `_run` shows the steps of a job in order.

source -> listing (../sources) -> class rules and held-out samples (selection.py), merged exact copies (copies.py) ->
`make_plan`, which samples each shard holds (plan.py) -> `write_planned`, one Ray task for each shard ->
manifest.
index.py writes a manifest for existing WebDataset tars instead, in place. shard_once.py starts shard.py for a run that
names a folder of images. Imports sources/; called by `launch/pretrain.py`, `launch/finetune.py`, `launch/shard.py`,
`launch/index.py`, `launch/demo.py`, vtab/ and bench/.
"""
