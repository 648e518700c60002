"""Command: choose a learning rate on a dev split, then fine-tune with it on all data, over seeds. See
`pipeline/experiment/grid.py`.

The ViT paper's fine-tuning protocol: choose the learning rate by accuracy on a held-out part of the training split,
then train with it on the whole split, once per seed. The score is the mean and standard deviation over seeds.

  python launch/finetune_grid.py --config configs/grid/pets.yaml launcher="deepspeed --num_gpus 8"
  python launch/finetune_grid.py name=photos run=configs/finetune/pets_384px.yaml lr=[0.003,0.01,0.03] \\
      settings=[data.path=datasets/photos,data.eval_split=val,init.weights=runs/vit_l16]

Each run is a folder in <out>/<name>. After an interruption, run the same command again: finished runs are kept, others
continue.
"""

from _repository import command

from pipeline.settings.commands.reports import GridConfig

if __name__ == "__main__":
    command.main(GridConfig, "pipeline.experiment.grid", __doc__)
