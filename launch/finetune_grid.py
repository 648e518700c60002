"""Command: learning rates on a dev split, then the best on all data, over seeds. See `pipeline/transfer/grid.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.reports import GridConfig
from pipeline.transfer.grid import run

if __name__ == "__main__":
    main(
        GridConfig,
        run,
        """
        The paper's fine-tuning protocol: every learning rate is tried on a part of the training split that is held out, the best
        is used on all of it, once for each seed; the mean and the deviation of these are the score.

          python launch/finetune_grid.py --config configs/grid/pets.yaml launcher="deepspeed --num_gpus 8"
          python launch/finetune_grid.py name=photos run=configs/finetune/pets_384px.yaml lr=[0.003,0.01,0.03] \\
              settings=[data.path=datasets/photos,data.eval_split=val,init.weights=runs/vit_l16]

        Every run is a folder in <out>/<name>. The same command goes on where it was cut off; finished runs are not run again.
        """,
    )
