"""Command: run many pre-trainings that answer one question, and report what follows. See
`pipeline/experiment/study.py`.

Ask the ViT paper's questions of your own images: how much data is enough (Figures 3 and 4), which model is best for a
compute budget and what would a larger one give (Figure 5), what does a part of the model contribute (Table 8, Figure
8)? And what are weights that were pre-trained without labels worth, when few labels are known?

Each combination of model, data size, length and seed is a cell: an ordinary pre-training run, in a folder of its own,
then its scores. The report has figures, fitted power laws with their uncertainty, and predictions where the fits
support them.

  Four ready studies, each in full size and in one for a CPU (docs/studies.md has their results on CIFAR-10):
      python launch/study.py --config configs/study/data_size_cpu.yaml plan=true
      python launch/study.py --config configs/study/data_size_cpu.yaml
      python launch/study.py --config configs/study/scaling.yaml 'settings=[data.path=datasets/photos]' \\
          score=top1 tflops=300 plan=true
  On this machine's GPUs, on a Ray cluster with 8 GPUs a cell, or one cell, as a task of a SLURM array does:
      python launch/study.py --config FILE launcher="deepspeed --num_gpus 8" gpus=8
      ray job submit --working-dir . -- python launch/study.py --config FILE on=ray gpus=8 out=/shared/runs
      python launch/study.py --config FILE gpus=8 cell=NAME

Cells run cheapest first. After any interruption, run the same command again: finished cells are kept, others resume.
A cell that fails or diverges is reported, and the others continue; the exit code is then 2 for failures.
"""

from _repository import command

from pipeline.settings.commands.study import StudyConfig

if __name__ == "__main__":
    command.main(StudyConfig, "pipeline.experiment.study", __doc__)
